"""The chains' tree: walks, uses, leases, lists of leaves, removal from the end, splits.

Pure functions on an `Op`: a `State`, the time of the call and the victims named so far. The Lua
scripts in `lua/tree.lua` do the same, in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from connector.ids import BlockHash, Namespace, NodeId
from connector.indexmsg import Victim
from store_worker.index import limits as L
from store_worker.index.records import BUSY, Copy, Dying, Lease, ListKey, Mark, Node, Run, State

Path = list[tuple[Run, int]]
"""(run, depth in it) from the tip to the root."""


@dataclass(slots=True)
class Op:
    """One call. budget: how many blocks it may still remove; a run costs a little more."""

    s: State
    now: int
    budget: int = L.REMOVED_MAX
    victims: list[Victim] = field(default_factory=list)


def find(op: Op, ns: bytes, block: bytes) -> tuple[Run, int] | None:
    """(run, depth) of a listed block."""
    entry = op.s.entries.get(ns, {}).get(block)
    return None if entry is None else (op.s.runs[entry[0]], entry[1])


def walk(op: Op, run: Run, depth: int) -> Path | None:
    """From the block at `depth` to the root; None if the way is too long."""
    path = [(run, depth)]
    runs, entries = op.s.runs, op.s.entries[run.ns]
    while run.parent:
        if len(path) >= L.WALK_RUNS_MAX:
            return None
        entry = entries.get(run.parent)
        assert entry is not None and entry[1] == run.start, "a parent that is not listed"
        run, depth = runs[entry[0]], entry[1]
        path.append((run, depth))
    return path


# -- where a run's bytes are ---------------------------------------------------------------------


def current(op: Op, idx: int, epoch: int) -> Node | None:
    """The node, if this is its present incarnation."""
    if not idx:
        return None
    node = op.s.node_at(idx)
    return node if node.epoch == epoch else None


def reachable(op: Op, idx: int, epoch: int) -> bool:
    """Can be loaded from now."""
    node = current(op, idx, epoch)
    return node is not None and node.up


def live_stop(op: Op, run: Run) -> int:
    """How deep the run can be loaded; its start if not at all."""
    if reachable(op, run.node, run.epoch):
        return run.stop
    return max(
        (c.upto for c in run.copies if reachable(op, c.node, c.epoch)), default=run.start
    )


def lies_on(op: Op, run: Run, depth: int, node: Node) -> bool:
    """Is the block at `depth` listed on the node's present incarnation?"""
    if run.node == node.idx and run.epoch == node.epoch:
        return True
    return any(
        c.node == node.idx and c.epoch == node.epoch and c.upto >= depth for c in run.copies
    )


def bury(op: Op, node: Node, ns: bytes, block: bytes, of: tuple[int, int]) -> None:
    """Name a victim: its bytes stay counted, as dying, until it is reported freed.

    of: (bytes, ranks)."""
    key = (ns, block)
    if key not in node.dying_blocks:
        node.dying_blocks[key] = Dying(*of)
        node.dying += of[0]
        node.dying_order.add(key, op.now)
    op.victims.append(Victim(Namespace(ns), BlockHash(block), NodeId(node.name), of[1]))


# -- uses and leases -----------------------------------------------------------------------------


def add_mark(run: Run, mark: Mark) -> None:
    """Note a use. A deeper use that is not older covers it."""
    kept = []
    for old in run.marks:
        if old.depth >= mark.depth and old.at_ms >= mark.at_ms:
            if old.depth > mark.depth or old.at_ms > mark.at_ms:
                return
        elif old.depth > mark.depth or old.at_ms > mark.at_ms:
            kept.append(old)
    run.marks = sorted([*kept, mark])


def mark_at(run: Run, depth: int) -> Mark | None:
    """The use that counts for the block at `depth` once nothing deeper is left."""
    return next((m for m in run.marks if m.depth >= depth), run.marks[-1] if run.marks else None)


def add_lease(op: Op, run: Run, depth: int, until_ms: int) -> None:
    """Protect the block at `depth`; never shortens."""
    kept = [m for m in run.leases if m.until_ms > op.now]
    if not any(m.depth >= depth and m.until_ms >= until_ms for m in kept):
        kept = [m for m in kept if m.depth > depth or m.until_ms > until_ms]
        kept.append(Lease(depth, until_ms))
    run.leases = sorted(kept)


def leased_to(op: Op, run: Run) -> int:
    """The deepest leased depth; the run's start if none."""
    return max((m.depth for m in run.leases if m.until_ms > op.now), default=run.start)


# -- the lists of leaves -------------------------------------------------------------------------


def settle(op: Op, run: Run) -> None:
    """Put a run into the list where it belongs, or into none if its last block has a child."""
    target, score, timer = _belongs(op, run)
    place = op.s.place(run.node, run.epoch)
    if run.where is not None and run.where != target:
        _unlist(op, run)
    if target is not None:
        zset = place.lists.get(target)
        if zset is None:
            zset = place.lists[target] = type(place.runs)()
        zset.add(run.id, score)
    run.where = target
    if timer:
        place.timers.add(run.id, timer)
    else:
        place.timers.discard(run.id)


def _unlist(op: Op, run: Run) -> None:
    if run.where is not None:
        place = op.s.place(run.node, run.epoch)
        zset = place.lists[run.where]
        zset.discard(run.id)
        if not zset:
            del place.lists[run.where]
        run.where = None


def leave(op: Op, run: Run) -> None:
    """Take a run out of everything that its node keeps."""
    _unlist(op, run)
    place = op.s.place(run.node, run.epoch)
    place.timers.discard(run.id)
    place.runs.discard(run.id)


def _belongs(op: Op, run: Run) -> tuple[ListKey | None, float, int]:
    """(list, score in it, when to look again or 0)."""
    if run.top_child() >= run.stop:
        return None, 0, 0
    until = max((m.until_ms for m in run.leases if m.depth >= run.stop), default=0)
    if until > op.now:
        return BUSY, until, 0
    mark = run.marks[-1]
    if run.free and run.top_holder() >= run.stop:
        run.free = False
    if run.free:
        return (L.LEVEL_FREE, 0), mark.at_ms, 0
    level, timer = _level(op, run)
    return (level, 0 if level == L.LEVEL_PINNED else run.leaf_class(op.s)), mark.at_ms, timer


def _level(op: Op, run: Run) -> tuple[int, int]:
    """(level that the leaf's holders give it, when that may change or 0)."""
    level, timer = 0, 0
    for session in run.holders.beyond(run.stop):
        record = op.s.sessions.get(session)
        if record is None:
            level = max(level, L.LEVEL_NORMAL)
            continue
        own = record.level(op.now)
        if record.priority and record.priority_until_ms > op.now:
            timer = min(timer or record.priority_until_ms, record.priority_until_ms)
        if record.pin_until_ms > op.now:
            own = L.LEVEL_PINNED
            timer = min(timer or record.pin_until_ms, record.pin_until_ms)
        level = max(level, own)
    return level or L.LEVEL_NORMAL, timer


def wake(op: Op, node: Node) -> None:
    """Put leaves whose lease, retention or pin is over where they belong now."""
    place = op.s.place(node.idx, node.epoch)
    busy = place.lists.get(BUSY)
    due = busy.upto(op.now, L.WAKE_PER_CALL) if busy else []
    due += place.timers.upto(op.now, L.WAKE_PER_CALL)
    for run_id in due:
        settle(op, op.s.runs[run_id])


def unpromised(op: Op, run: Run, blocks: int) -> int:
    """How many of the last `blocks` may go. One that a running grant has promised to the same node
    may have been written by it as well: to delete it would destroy what that grant commits. It is
    leased for a little, and what lies above it."""
    at = [current(op, run.node, run.epoch), *(current(op, c.node, c.epoch) for c in run.copies)]
    nodes = [node for node in at if node is not None]
    for depth in range(run.stop, run.stop - blocks, -1):
        key = (run.ns, run.hash_at(depth))
        if any(key in node.promised for node in nodes):
            add_lease(op, run, depth, op.now + L.PROMISE_MS)
            settle(op, run)
            return run.stop - depth
    return blocks


# -- removal -------------------------------------------------------------------------------------


def trim(op: Op, run: Run, stop: int) -> None:
    """Take the blocks (stop, run.stop] out of the index, the deepest first, and name victims for
    their objects. The caller has made sure that nothing needs them. An empty run goes too."""
    s, cut = op.s, run.first_cut(op.s, stop)
    home = current(op, run.node, run.epoch)
    copies = [(c, node) for c in run.copies if (node := current(op, c.node, c.epoch))]
    entries = s.entries[run.ns]
    of = (run.block_bytes, run.ranks)
    for depth in range(run.stop, stop, -1):
        block = run.hashes.pop()
        del entries[block]
        if home is not None:
            home.stored -= run.block_bytes
            home.blocks -= 1
            bury(op, home, run.ns, block, of)
        for copy, node in copies:
            if copy.upto >= depth:
                node.copies -= run.block_bytes
                bury(op, node, run.ns, block, of)
    op.budget -= run.stop - stop + L.RUN_COST
    run.stop = stop
    _cap_copies(op, run)
    run.leases = [m for m in run.leases if m.depth <= stop]
    run.shared = [d for d in run.shared if d <= stop]
    if stop == run.start:
        _drop(op, run, cut)
        return
    run.marks = [m for m in run.marks if m.depth <= stop]
    if cut is not None:
        add_mark(run, Mark(stop, cut.at_ms, cut.cls))
    settle(op, run)


def _cap_copies(op: Op, run: Run) -> None:
    """Copies reach no deeper than the run; those that reach nowhere are dropped."""
    kept = []
    for copy in run.copies:
        upto = min(copy.upto, run.stop)
        if upto > run.start:
            kept.append(copy._replace(upto=upto))
        else:
            _uncopied(op, copy, run.id)
    run.copies = kept


def _uncopied(op: Op, copy: Copy, run_id: int) -> None:
    place = op.s.places.get((copy.node, copy.epoch))
    if place is not None:
        place.copied.discard(run_id)


def _drop(op: Op, run: Run, mark: Mark | None) -> None:
    """Remove an empty run; its use, its holders and whether it is wanted pass to its parent."""
    s = op.s
    leave(op, run)
    found = find(op, run.ns, run.parent) if run.parent else None
    parent = found[0] if found else None
    if parent is not None:
        parent.children.discard(run.id)
        if mark is not None:
            add_mark(parent, Mark(run.start, mark.at_ms, mark.cls))
    bare = parent is not None and parent.stop == run.start and parent.top_child() < run.start
    for session, _ in run.holders.items():
        deeper = parent is not None and (parent.holders.score(session) or 0) >= run.start
        _rehold(op, session, run, parent if bare and not deeper else None)
    del s.runs[run.id]
    if not s.entries[run.ns]:
        del s.entries[run.ns]
    if parent is not None:
        if run.free and parent.stop == run.start and parent.unwanted(parent.stop):
            parent.free = True
        settle(op, parent)


def _rehold(op: Op, session: bytes, run: Run, parent: Run | None) -> None:
    """A hold on `run`, which goes, becomes one on the end of `parent`, or ends."""
    record = op.s.sessions.get(session)
    since = record.holds.score(run.id) if record else None
    if record is not None:
        record.holds.discard(run.id)
    if parent is not None:
        parent.holders.add(session, run.start)
        if record is not None:
            record.holds.add(parent.id, max(since or 0, record.holds.score(parent.id) or 0))
    elif record is not None and not record.holds:
        op.s.idle.add(session, record.last_ms)


# -- splits --------------------------------------------------------------------------------------


def split(op: Op, run: Run, at: int) -> tuple[Run, Run]:
    """Cut a run in two at a depth inside it; (upper part, lower part). The part with fewer
    children gets a new id."""
    s = op.s
    assert run.start < at < run.stop
    upper_children = run.children.count(run.start, at + 0.5)
    lower_moves = len(run.children) - upper_children <= upper_children
    k = at - run.start
    s.last_run += 1
    other = Run(
        s.last_run, run.ns, run.parent, run.start, at, run.node, run.epoch, run.ranks,
        run.block_bytes, run.hashes[:k], free=run.free,
    )  # fmt: skip
    s.runs[other.id] = other
    place = s.place(run.node, run.epoch)
    place.runs.add(other.id, place.runs.score(run.id) or 0)
    parent = find(op, run.ns, run.parent) if run.parent else None
    link = run.hashes[k - 1]
    if lower_moves:
        other.parent, other.start, other.stop, other.hashes = link, at, run.stop, run.hashes[k:]
        run.stop, run.hashes = at, run.hashes[:k]
        upper, lower = run, other
    else:
        run.parent, run.start, run.hashes = link, at, run.hashes[k:]
        upper, lower = other, run
        if parent is not None:
            parent[0].children.discard(run.id)
            parent[0].children.add(other.id, other.start)
    depths = range(other.start + 1, other.stop + 1)
    entries = s.entries[run.ns]
    entries.update(
        (block, (other.id, depth)) for block, depth in zip(other.hashes, depths, strict=True)
    )
    _share_out(op, run, other, at)
    upper.children.add(lower.id, at)
    settle(op, upper)
    settle(op, lower)
    return upper, lower


def _share_out(op: Op, run: Run, other: Run, at: int) -> None:
    """Give `other` what hangs on its blocks. Both runs have their new bounds."""
    upper = other.stop == at
    low, high = (-inf, at) if upper else (at + 1, inf)
    for child in run.children.between(low, high + 0.5):
        other.children.add(child, run.children.score(child) or 0)
        run.children.discard(child)
    for session in run.holders.between(low, high):
        other.holders.add(session, run.holders.score(session) or 0)
        run.holders.discard(session)
        record = op.s.sessions.get(session)
        if record is not None:
            record.holds.add(other.id, record.holds.score(run.id) or 0)
            record.holds.discard(run.id)
    for name in ("marks", "leases"):
        both = getattr(run, name)
        parts = [m for m in both if m.depth <= at], [m for m in both if m.depth > at]
        setattr(other, name, parts[0 if upper else 1])
        setattr(run, name, parts[1 if upper else 0])
    depths = [d for d in run.shared if d <= at], [d for d in run.shared if d > at]
    other.shared, run.shared = depths if upper else (depths[1], depths[0])
    _share_copies(op, (other, run) if upper else (run, other), run.copies, at)


def _share_copies(op: Op, parts: tuple[Run, Run], copies: list[Copy], at: int) -> None:
    upper, lower = parts
    copies = [c for c in copies if current(op, c.node, c.epoch)]
    upper.copies = [c._replace(upto=min(c.upto, at)) for c in copies]
    lower.copies = [c for c in copies if c.upto > at]
    for copy in copies:
        copied = op.s.place(copy.node, copy.epoch).copied
        since = max(copied.score(upper.id) or 0, copied.score(lower.id) or 0)
        copied.add(upper.id, since)
        if copy.upto > at:
            copied.add(lower.id, since)
        else:
            copied.discard(lower.id)
