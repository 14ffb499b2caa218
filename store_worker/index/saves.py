"""Saves: room for one.

Functions on an `Op`, as in `tree`. The Lua twin is `lua/prepare.lua`.
"""

from __future__ import annotations

from typing import NamedTuple

from connector.ids import BlockHash, GrantId, NodeId
from connector.indexmsg import (
    Declined,
    DeclineReason,
    Granted,
    PrepareRequest,
)
from store_worker.index import limits as L
from store_worker.index import room, sessions, tree
from store_worker.index.options import IndexOptions
from store_worker.index.records import Grant, Node, Session
from store_worker.index.tree import Op, Path


class Wanted(NamedTuple):
    """A save that passed the first checks. path: of the last listed block before it."""

    request: PrepareRequest
    first_missing: int
    before: BlockHash
    path: Path

    @property
    def hashes(self) -> tuple[BlockHash, ...]:
        """What has to be saved."""
        return self.request.hashes[self.first_missing :]


def prepare(op: Op, request: PrepareRequest, options: IndexOptions) -> Granted | Declined:
    """See `SessionIndex.prepare`."""
    session = request.session
    if sessions.stale(op, session, request.generation):
        return decline(op, DeclineReason.STALE_GENERATION)
    record = op.s.sessions.get(session)
    if session and not (record and record.counted) and _over_quota(op, options):
        return decline(op, DeclineReason.QUOTA)
    wanted = _wanted(op, request)
    if wanted is None:
        return decline(op, DeclineReason.MISSING_PARENT)
    if len(wanted.path) >= L.PATH_RUNS_MAX:
        return decline(op, DeclineReason.FULL)
    if not wanted.hashes:
        node = _node_of(op, wanted)
        return _grant(op, wanted, node, options)
    nodes = choose(op, wanted)
    if not nodes:
        return decline(op, DeclineReason.NO_NODE)
    reason = DeclineReason.FULL
    for node in nodes:
        if any((request.namespace, h) in node.dying_blocks for h in wanted.hashes):
            reason = DeclineReason.DYING
        else:
            refused = make_room(op, node, wanted, options)
            if refused is None:
                return _grant(op, wanted, node, options)
            reason = refused
        if reason is not DeclineReason.FULL:
            break
    if session and reason is DeclineReason.ROOM:
        record = sessions.open_session(op, session, request.generation, options.tenant)
        _settle_down(op, record, node, len(request.nodes) == 1)
    room.reissue(op, node, L.BLOCKS_MAX // 4)
    return decline(op, reason)


def _over_quota(op: Op, options: IndexOptions) -> bool:
    tenant = op.s.tenants.get(options.tenant)
    return bool(options.sessions_max and tenant and tenant.sessions >= options.sessions_max)


def decline(op: Op, reason: DeclineReason) -> Declined:
    """Counted."""
    op.s.count(f"declined_{reason.value}")
    return Declined(reason, tuple(op.victims))


def _wanted(op: Op, request: PrepareRequest) -> Wanted | None:
    """None if the chain up to `parent` can't be loaded."""
    path: Path = []
    if request.parent:
        found = tree.find(op, request.namespace, request.parent)
        above = tree.walk(op, *found) if found else None
        if above is None or any(tree.live_stop(op, run) < depth for run, depth in above):
            return None
        path = above
    before = request.parent
    first = 0
    for block in request.hashes:
        found = tree.find(op, request.namespace, block)
        if found is None or tree.live_stop(op, found[0]) < found[1]:
            break
        if path and path[0][0] is found[0]:
            path[0] = found
        else:
            path.insert(0, found)
        before = block
        first += 1
    return Wanted(request, first, before, path)


def _node_of(op: Op, wanted: Wanted) -> Node:
    """Where the last listed block lies."""
    run, depth = wanted.path[0]
    if tree.reachable(op, run.node, run.epoch):
        return op.s.node_at(run.node)
    return next(
        op.s.node_at(c.node)
        for c in run.copies
        if c.upto >= depth and tree.reachable(op, c.node, c.epoch)
    )


def choose(op: Op, wanted: Wanted) -> list[Node]:
    """Nodes to try, in order: the home if it takes blocks, then the cheaper candidate."""
    request = wanted.request
    known = [op.s.nodes[n] for n in request.nodes if n in op.s.nodes]
    able = [node for node in known if node.up and not node.draining]
    if len(request.nodes) == 1:
        return able
    record = op.s.sessions.get(request.session)
    home = op.s.node_at(record.home) if record is not None and record.home else None
    if home is not None and home.up and not home.draining:
        return [home, *(node for node in able if node is not home)]
    if len(able) > 1:
        able.sort(key=lambda node: _price(op, node, wanted))
    return able


def _price(op: Op, node: Node, wanted: Wanted) -> tuple[bool, int, float, float, float]:
    """What a save costs there: what its next victim is worth, then how busy the node is."""
    request = wanted.request
    size = room.block_bytes(node, request.object_bytes, request.ranks)
    need = size * len(wanted.hashes)
    busy = room.recent_bytes(op, node)
    if not node.capacity or node.used + need <= node.capacity:
        return False, 0, 0.0, 0.0, busy
    tree.wake(op, node)
    worth = room.worst(op, node)
    if worth is None:
        return True, L.LEVEL_PINNED + 1, 0.0, 0.0, busy
    return True, worth.level, worth.score, worth.at_ms, busy


def make_room(
    op: Op, node: Node, wanted: Wanted, options: IndexOptions
) -> DeclineReason | None:
    """Name victims if the node is nearly full. None: there is room for the save now."""
    request = wanted.request
    size = room.block_bytes(node, request.object_bytes, request.ranks)
    need = size * len(wanted.hashes)
    keep = (wanted.path[0][0].id, wanted.path[0][1]) if wanted.path else (0, 0)
    if not node.capacity:
        over = node.blocks + len(wanted.hashes) - L.UNACCOUNTED_BLOCKS_MAX
        if over > 0:
            tree.wake(op, node)
            room.evict(op, node, over * size, None, keep)
        return None
    if need > node.capacity:
        return DeclineReason.FULL
    high = int(node.capacity * options.high_water)
    over = node.used + need - high - node.dying
    if node.used + need > high:
        tree.wake(op, node)
        if over > 0:
            over -= room.drop_copies(op, node, over, L.COPY_IDLE_MS)
        if over > 0 and not room.evict(op, node, over, _own_score(op, wanted), keep):
            return DeclineReason.NOT_WORTH
    if node.used + need <= node.capacity:
        return None
    if not node.dying:
        room.drop_copies(op, node, over, 0)
    return DeclineReason.ROOM if node.dying else DeclineReason.FULL


def _own_score(op: Op, wanted: Wanted) -> float | None:
    """What the save is worth; None if it may not be declined."""
    request = wanted.request
    if request.must:
        return None
    private, _ = sessions.first_private(wanted.path, wanted.hashes[0])
    cls = sessions.class_now(op, request.namespace, private, request.new_tokens)
    return op.s.table.score(cls, 0)


def _grant(op: Op, wanted: Wanted, node: Node, options: IndexOptions) -> Granted:
    s, request = op.s, wanted.request
    if request.session:
        record = sessions.open_session(op, request.session, request.generation, options.tenant)
        sessions.used(op, request.session, record, options.engine)
        if wanted.hashes:
            _settle_down(op, record, node, len(request.nodes) == 1)
    s.last_grant += 1
    expires = op.now + min(round(request.grant_s * 1000), L.GRANT_TTL_MAX_S * 1000)
    grant = Grant(
        s.last_grant, request.namespace, request.session, request.generation, wanted.before,
        request.start + wanted.first_missing, wanted.hashes, node.idx, node.epoch, request.ranks,
        room.block_bytes(node, request.object_bytes, request.ranks), request.new_tokens,
    )  # fmt: skip
    s.grants[grant.id] = grant
    s.grant_ends.add(grant.id, expires)
    room.promise(op, node, grant)
    if wanted.path:
        run, depth = wanted.path[0]
        run.children.add(-grant.id, depth + 0.5)
        tree.settle(op, run)
    s.count("granted")
    room.reissue(op, node, L.BLOCKS_MAX // 4)
    return Granted(
        GrantId(grant.id), NodeId(node.name), node.incarnation, wanted.first_missing, expires,
        tuple(op.victims),
    )  # fmt: skip


def _settle_down(op: Op, record: Session, node: Node, forced: bool) -> None:
    """Fix the home; a forced node is one only for a session that has no live home."""
    home = op.s.node_at(record.home) if record.home else None
    if home is None or not forced or not home.up:
        record.home = node.idx
