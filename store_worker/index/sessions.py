"""Sessions, their holds, and what is remembered of turns.

Functions on an `Op`, as in `tree`. The Lua twins are in `lua/sessions.lua`.
"""

from __future__ import annotations

from connector.indexmsg import TurnEnd
from store_worker.index import limits as L
from store_worker.index import tree
from store_worker.index.options import IndexOptions
from store_worker.index.records import Conversation, Run, Session, Tenant
from store_worker.index.tree import Op, Path
from store_worker.policy import Ended, Turn


def stale(op: Op, session: bytes, token: int) -> bool:
    """Is this generation over? A record that was dropped lives on in the floor."""
    record = op.s.sessions.get(session)
    if not session:
        return False
    return token < (op.s.floor if record is None else record.generation)


def open_session(op: Op, session: bytes, token: int, tenant: str) -> Session:
    """The record, made with the generation it was given if there is none."""
    s = op.s
    record = s.sessions.get(session)
    if record is None:
        s.seq += 1
        s.generation = max(s.generation, token)
        record = s.sessions[session] = Session(token, s.seq, last_ms=op.now)
        s.by_seq.add(session, s.seq)
        s.idle.add(session, op.now)
    if not record.counted:
        record.counted, record.tenant = True, tenant
        s.tenants.setdefault(tenant, Tenant()).sessions += 1
    return record


def uncount(op: Op, session: bytes, record: Session) -> None:
    """It no longer counts against its tenant's limits."""
    unpin(op, session, record)
    if record.counted:
        record.counted = False
        op.s.tenants[record.tenant].sessions -= 1


def unpin(op: Op, session: bytes, record: Session) -> None:
    """End its pin."""
    op.s.pins.discard(session)
    if record.pin_bytes:
        op.s.tenants[record.tenant].pinned -= record.pin_bytes
    record.pin_until_ms = record.pin_bytes = 0


def session_bytes(op: Op, record: Session) -> int:
    """What its chains take on the nodes, shared blocks included (a bounded look)."""
    total = 0
    seen: set[int] = set()
    for run_id in record.holds:
        run: Run | None = op.s.runs[run_id]
        depth = run.stop if run else 0
        while run is not None and run.id not in seen and len(seen) < L.PATH_RUNS_MAX:
            seen.add(run.id)
            total += (depth - run.start) * run.block_bytes
            up = tree.find(op, run.ns, run.parent) if run.parent else None
            run, depth = up if up else (None, 0)
    return total


def pin(op: Op, session: bytes, ttl_s: float, options: IndexOptions) -> float:
    """See `SessionIndex.pin`."""
    record = open_session(op, session, op.s.generation, options.tenant)
    ttl_s = min(ttl_s, L.PIN_TTL_MAX_S)
    if not _charge_pin(op, record, options.pinned_bytes_max):
        op.s.count("pins_rejected")
        return 0.0
    record.pin_until_ms = max(record.pin_until_ms, op.now + round(ttl_s * 1000))
    op.s.pins.add(session, record.pin_until_ms)
    settle_held(op, record)
    return ttl_s


def _charge_pin(op: Op, record: Session, bytes_max: int) -> bool:
    """Count what it takes now against its tenant; False, and nothing changed, if that is over."""
    tenant = op.s.tenants[record.tenant]
    bytes_ = session_bytes(op, record)
    if tenant.pinned - record.pin_bytes + bytes_ > bytes_max:
        return False
    tenant.pinned += bytes_ - record.pin_bytes
    record.pin_bytes = bytes_
    return True


def repin(op: Op, session: bytes, record: Session, bytes_max: int) -> None:
    """A pinned session has grown: its pin ends if that is too much for its tenant."""
    if not _charge_pin(op, record, bytes_max):
        unpin(op, session, record)
        op.s.count("pins_ended")
        settle_held(op, record)


def retain(op: Op, session: bytes, priority: int, ttl_s: float, tenant: str) -> None:
    """See `SessionIndex.retain`."""
    record = open_session(op, session, op.s.generation, tenant)
    record.priority = min(max(priority, L.PRIORITY_MIN), L.PRIORITY_MAX)
    record.priority_until_ms = op.now + round(ttl_s * 1000) if ttl_s > 0 else L.NEVER_MS
    settle_held(op, record)


def settle_held(op: Op, record: Session) -> None:
    """What the session holds may belong into other lists now."""
    for run_id in record.holds:
        tree.settle(op, op.s.runs[run_id])


def used(op: Op, session: bytes, record: Session, engine: str) -> None:
    """The session was used now, by this engine."""
    record.last_ms = op.now
    if engine and record.engines[:1] != (engine,):
        others = [name for name in record.engines if name != engine]
        record.engines = (engine, *others)[: L.ENGINES_MAX]
    if session in op.s.idle:
        op.s.idle.add(session, op.now)


def tidy(op: Op) -> None:
    """Forget old records of sessions that hold nothing, old conversations and old pins; a few."""
    s = op.s
    for session in s.pins.upto(op.now, 2):
        unpin(op, session, s.sessions[session])
    for _ in range(2):
        first = s.idle.first()
        over = len(s.idle) > L.SESSIONS_KEPT_MAX
        if first is None or not (over or first[0] <= op.now - L.SESSION_KEPT_MS):
            break
        session = first[1]
        record = s.sessions[session]
        uncount(op, session, record)
        if record.closed:
            s.floor = max(s.floor, record.generation)
        s.idle.discard(session)
        s.by_seq.discard(session)
        del s.sessions[session]
    for _ in range(2):
        if len(s.by_use) > L.TURNS_KEPT_MAX:
            first = s.by_use.first()
            assert first is not None
            s.by_use.discard(first[1])
            del s.conversations[first[1]]


# -- holds ---------------------------------------------------------------------------------------


def drop_hold(op: Op, session: bytes, run: Run) -> None:
    """One hold less."""
    run.holders.discard(session)
    record = op.s.sessions.get(session)
    if record is not None:
        record.holds.discard(run.id)
        if not record.holds:
            op.s.idle.add(session, record.last_ms)


def held_at(run: Run, session: bytes) -> int:
    """How deep the session holds the run; 0 if it does not. What was evicted is not held."""
    return min(int(run.holders.score(session) or 0), run.stop)


def hold(op: Op, session: bytes, path: Path) -> None:
    """Claim the tip of `path`; claims on its ancestors move there."""
    s = op.s
    run, depth = path[0]
    record = s.sessions.get(session)
    if record is None:
        for upper, at in path[1:2]:
            if upper.holders.score(session) == at:
                upper.holders.discard(session)
    else:
        held = set(record.holds)
        for upper, at in path[1:]:
            if upper.id in held and held_at(upper, session) <= at:
                drop_hold(op, session, upper)
    if session not in run.holders and len(run.holders) >= L.HOLDERS_MAX:
        first = run.holders.first()
        assert first is not None
        drop_hold(op, first[1], run)
    run.holders.add(session, max(depth, held_at(run, session)))
    if record is not None:
        record.holds.add(run.id, op.now)
        s.idle.discard(session)
        if len(record.holds) > L.HOLDS_MAX:
            oldest = record.holds.first()
            assert oldest is not None
            other = s.runs[oldest[1]]
            drop_hold(op, session, other)
            tree.settle(op, other)


# -- turns ---------------------------------------------------------------------------------------


def first_private(path: Path, beyond: bytes) -> tuple[bytes, int]:
    """(the chain's first block below its shared part, depth of the shared part). Empty if the
    chain is wholly shared. beyond: the chain's block after the tip, if that one is not listed."""
    following = beyond
    for run, depth in path:
        # Few runs have any, and a chain has many runs.
        shared = max((d for d in run.shared if d <= depth), default=0) if run.shared else 0
        if shared:
            return (run.hash_at(shared + 1) if shared < depth else following), shared
        following = run.hashes[0]
    return following, 0


def class_now(op: Op, ns: bytes, private: bytes, new_tokens: int) -> int:
    """The class of a chain in its present turn."""
    if not private:
        return op.s.table.class_of(L.TIMES_SHARED, new_tokens)
    known = op.s.conversations.get((ns, private))
    return op.s.table.class_of(known.turns + 1 if known else 1, new_tokens)


def end_turn(op: Op, ns: bytes, path: Path, private: tuple[bytes, int], turn: TurnEnd) -> int:
    """Count a turn of the conversation, log it, and return its class."""
    s = op.s
    cls = class_now(op, ns, private[0], turn.new_tokens)
    if not private[0]:
        return cls
    key = (ns, private[0])
    known = s.conversations.get(key)
    depth = max([path[0][1] if path else 0, *(b.depth for b in turn.boundaries)])
    tip = path[0][0].hash_at(path[0][1]) if path else b""
    if known is None:
        _log(op, Turn(op.now, cls))
    else:
        kept = _kept(op, ns, known, path, depth)
        _log(op, Turn(op.now, cls, known.cls, op.now - known.at_ms, kept))
    turns = known.turns + 1 if known else 1
    s.conversations[key] = Conversation(turns, op.now, cls, tip, depth, private[1])
    s.by_use.add(key, op.now)
    return cls


def _kept(op: Op, ns: bytes, known: Conversation, path: Path, depth: int) -> float:
    """The share of the last turn's private blocks that this turn has again, in thousandths."""
    had = known.depth - known.shared
    if had <= 0:
        return 1.0
    common = min(depth, known.depth)
    found = tree.find(op, ns, known.tip) if known.tip else None
    if found is not None:
        here = {run.id: at for run, at in path}
        run, at = found
        while run.id not in here and run.parent:
            at = run.start
            up = tree.find(op, ns, run.parent)
            assert up is not None
            run = up[0]
        branch = min(at, here.get(run.id, 0))
        if branch < found[1]:
            common = min(common, branch)
    return min(1000, max(0, common - known.shared) * 1000 // had) / 1000


def _log(op: Op, event: Turn | Ended) -> None:
    op.s.log.append(event)
    op.s.logged += 1


def end_conversation(op: Op, run: Run, depth: int) -> None:
    """The chain's owner says that it is over: it is neither a return nor an absence."""
    path = tree.walk(op, run, depth)
    private = first_private(path, b"")[0] if path else b""
    known = op.s.conversations.pop((run.ns, private), None) if private else None
    if known is not None:
        op.s.by_use.discard((run.ns, private))
        _log(op, Ended(known.cls, known.at_ms))


def remember(record: Session, ns: bytes, turn: TurnEnd) -> None:
    """Put a turn's boundaries in front of the session's."""
    newest = {b.depth: bytes(b.hash) for b in turn.boundaries}
    old = [b for b in record.boundaries.pop(ns, []) if b[0] not in newest]
    front = sorted(newest.items(), reverse=True)
    record.boundaries[ns] = [*front, *old][: L.BOUNDARIES_MAX]
    while len(record.boundaries) > L.NAMESPACES_MAX:
        del record.boundaries[next(iter(record.boundaries))]
