"""Room on the nodes: promises, victims, what dies, and what is swept.

Functions on an `Op`, as in `tree`. The Lua twins are in `lua/room.lua`.
"""

from __future__ import annotations

from typing import NamedTuple

from connector.ids import BlockHash, Namespace, NodeId
from connector.indexmsg import Victim
from store_worker.index import limits as L
from store_worker.index import tree
from store_worker.index.records import Grant, Node, Run, Zset
from store_worker.index.tree import Op


class Worth(NamedTuple):
    """What keeping a leaf is worth: compared field by field, the lowest goes first."""

    level: int
    score: float
    at_ms: float
    run: int


def block_bytes(node: Node, object_bytes: int, ranks: int) -> int:
    """What one block takes on the node."""
    return node.charges.get(object_bytes, object_bytes) * ranks


# -- promises ------------------------------------------------------------------------------------


def promise(op: Op, node: Node, grant: Grant) -> None:
    """Count a grant's bytes."""
    need = grant.block_bytes * len(grant.hashes)
    node.granted += need
    for block in grant.hashes:
        key = (grant.ns, block)
        node.promised[key] = node.promised.get(key, 0) + 1
    minute = op.now // 60_000
    then, now_bytes, before = node.recent
    if then == minute:
        node.recent = (minute, now_bytes + need, before)
    else:
        node.recent = (minute, need, now_bytes if then == minute - 1 else 0)


def recent_bytes(op: Op, node: Node) -> float:
    """Bytes promised in about the last minute (times 60,000)."""
    then, now_bytes, before = node.recent
    minute = op.now // 60_000
    if then != minute:
        now_bytes, before = 0, now_bytes if then == minute - 1 else 0
    return now_bytes * 60_000.0 + before * (60_000.0 - op.now % 60_000)


def settle_promise(op: Op, grant: Grant) -> None:
    """End a promise. What is not listed on the node may yet lie there: it dies, unless another
    running grant (or a copy under way) may have written it as well."""
    node = tree.current(op, grant.node, grant.epoch)
    parent = tree.find(op, grant.ns, grant.parent) if grant.parent else None
    if parent is not None and parent[0].children.discard(-grant.id):
        tree.settle(op, parent[0])
    if node is None:
        return
    node.granted -= grant.block_bytes * len(grant.hashes)
    for block in grant.hashes:
        key = (grant.ns, block)
        others = node.promised.pop(key) - 1
        if others:
            node.promised[key] = others
        elif (node.idx, *key) not in op.s.copying:
            found = tree.find(op, grant.ns, block)
            if found is None or not tree.lies_on(op, *found, node):
                tree.bury(op, node, grant.ns, block, (grant.block_bytes, grant.ranks))


def expire(op: Op) -> None:
    """Grants and copies that nobody finished in time give their room back; old replies go."""
    s = op.s
    for grant_id in s.grant_ends.upto(op.now, L.EXPIRE_PER_CALL):
        grant = s.grants.pop(grant_id)
        s.grant_ends.discard(grant_id)
        if grant.reply is None:
            settle_promise(op, grant)
            s.count("grants_expired")
    for key in s.copy_ends.upto(op.now, L.EXPIRE_PER_CALL):
        end_copying(op, key)


def end_copying(op: Op, key: tuple[int, bytes, bytes]) -> bool:
    """End a reservation for a copy; False if there was none. Its objects die unless listed."""
    s = op.s
    idx, ns, block = key
    size = s.copying.pop(key, None)
    s.copy_ends.discard(key)
    if size is None:
        return False
    node = tree.current(op, idx, size[2])
    if node is None:
        return False
    node.granted -= size[0]
    found = tree.find(op, ns, block)
    if (found is None or not tree.lies_on(op, *found, node)) and (ns, block) not in node.promised:
        tree.bury(op, node, ns, block, (size[0], size[1]))
    return True


# -- victims -------------------------------------------------------------------------------------


def worst(op: Op, node: Node, skip: int = 0) -> Worth | None:
    """The leaf on the node that is worth least: of the lowest level, at either end of a list."""
    place = op.s.place(node.idx, node.epoch)
    table = op.s.table
    found: Worth | None = None
    for (level, cls), zset in place.lists.items():
        if level < 0 or (found is not None and level > found.level):
            continue
        for at_ms, run in _ends(zset, skip):
            score = table.score(cls, int(op.now - at_ms)) if level != L.LEVEL_FREE else 0.0
            if found is not None and level == found.level and score > found.score:
                continue
            worth = Worth(level, score, at_ms, run)
            if found is None or worth < found:
                found = worth
    return found


def _ends(zset: Zset, skip: int) -> list[tuple[float, int]]:
    """(time, run) at both ends of a list of leaves; its neighbour instead of the run `skip`."""
    ends: list[tuple[float, int]] = []
    for end, from_end in ((zset.first(), False), (zset.last(), True)):
        if end is not None and end[1] == skip:
            end = zset.second(from_end)
        if end is not None:
            ends.append(end)
    return ends[:1] if len(zset) == 1 else ends


def evict(op: Op, node: Node, bytes_: int, own: float | None, keep: tuple[int, int]) -> bool:
    """Name victims on the node until so many bytes die, within the budget. keep: (run, depth)
    that must stay. own: the score of what wants the room, None if it may not be declined.

    False if it stopped at a victim that is worth more than `own`."""
    while bytes_ > 0 and op.budget > 0:
        worth = worst(op, node, keep[0])
        if worth is None and keep[0]:
            worth = worst(op, node)
        if worth is None:
            return True
        if own is not None and worth.level >= L.LEVEL_NORMAL and worth.score > own:
            return False
        run = op.s.runs[worth.run]
        floor = evict_floor(op, run)
        if run.id == keep[0]:
            floor = max(floor, keep[1])
        blocks = min(run.stop - floor, op.budget, -(-bytes_ // run.block_bytes))
        if blocks <= 0:
            return True
        blocks = tree.unpromised(op, run, blocks)
        if not blocks:
            op.budget -= L.RUN_COST
            continue
        if worth.level == L.LEVEL_PINNED:
            op.s.count("pinned_overruns", blocks)
        op.s.count("evicted_unwanted" if worth.level == L.LEVEL_FREE else "evicted", blocks)
        bytes_ -= blocks * run.block_bytes
        tree.trim(op, run, run.stop - blocks)
    return True


def evict_floor(op: Op, run: Run) -> int:
    """How far the run may be trimmed in one go: to a child, a lease, a later use, or the end of a
    shared part."""
    shared = max((d for d in run.shared if d < run.stop), default=0)
    floor = max(run.start, run.top_child(), tree.leased_to(op, run), shared)
    if run.free:
        floor = max(floor, run.top_holder())
    if len(run.marks) > 1:
        floor = max(floor, run.marks[-2].depth)
    return floor


def drop_copies(op: Op, node: Node, bytes_: int, idle_ms: int) -> int:
    """Drop copies that no load used for so long, the oldest first, from the deepest block up, at
    most 128 blocks. Returns the bytes that die."""
    place = op.s.place(node.idx, node.epoch)
    died, before = 0, len(op.victims)
    while died < bytes_ and len(op.victims) - before < L.BLOCKS_MAX:
        first = place.copied.first()
        if first is None or op.now - first[0] < idle_ms:
            break
        gone = uncopy(op, op.s.runs[first[1]], node, 0)
        assert gone, "a run in the list of copies that has none there"
        died += gone
    return died


def uncopy(op: Op, run: Run, node: Node, upto: int) -> int:
    """Shorten the copy of a run on a node to the depth `upto`. Returns the bytes that die."""
    died = 0
    kept = []
    upto = max(upto, run.start)
    for copy in run.copies:
        if copy.node != node.idx or copy.epoch != node.epoch or copy.upto <= upto:
            kept.append(copy)
            continue
        for depth in range(copy.upto, upto, -1):
            of = (run.block_bytes, run.ranks)
            tree.bury(op, node, run.ns, run.hash_at(depth), of)
            node.copies -= run.block_bytes
            died += run.block_bytes
        if upto > run.start:
            kept.append(copy._replace(upto=upto))
        else:
            op.s.place(node.idx, node.epoch).copied.discard(run.id)
    run.copies = kept
    op.s.count("copies_dropped", died // run.block_bytes if died else 0)
    return died


# -- dying and sweeping --------------------------------------------------------------------------


def reissue(op: Op, node: Node, limit: int) -> None:
    """Name again what was not reported freed for a while."""
    for key in node.dying_order.upto(op.now - L.REISSUE_MS, limit):
        node.dying_order.add(key, op.now)
        ns, block = key
        ranks = node.dying_blocks[key].ranks
        op.victims.append(Victim(Namespace(ns), BlockHash(block), NodeId(node.name), ranks))


def freed(op: Op, victims: list[Victim]) -> None:
    """Their bytes are room again."""
    for victim in victims:
        node = op.s.nodes.get(victim.node)
        key = (victim.namespace, victim.hash)
        gone = node.dying_blocks.pop(key, None) if node else None
        if node is not None and gone is not None:
            node.dying_order.discard(key)
            node.dying -= gone.bytes


def free_up(op: Op, run: Run | None) -> int:
    """Remove what nobody needs from the end of `run` upward, through its parents. A rest that is
    leased, that a running grant needs, or beyond the budget, is marked as free. Returns the blocks
    removed."""
    total = 0
    while run is not None:
        held = max(run.start, run.top_child(), run.top_holder())
        blocks = min(run.stop - max(held, tree.leased_to(op, run)), op.budget)
        blocks = tree.unpromised(op, run, max(0, blocks))
        if run.unwanted(run.stop - blocks):
            run.free = True
        if not blocks:
            tree.settle(op, run)
            break
        parent = tree.find(op, run.ns, run.parent) if run.parent else None
        start, emptied = run.start, run.stop - blocks == run.start
        tree.trim(op, run, run.stop - blocks)
        total += blocks
        run = parent[0] if emptied and parent and parent[0].stop == start else None
    return total


def sweep_free(op: Op) -> int:
    """Free what nobody wants any more, on every node. Returns the blocks removed."""
    total = 0
    for node in op.s.by_idx:
        tree.wake(op, node)
        place = op.s.place(node.idx, node.epoch)
        while op.budget > 0 and (L.LEVEL_FREE, 0) in place.lists:
            first = place.lists[L.LEVEL_FREE, 0].first()
            blocks = free_up(op, op.s.runs[first[1]]) if first else 0
            if not blocks:
                break
            total += blocks
    return total


def free_left(op: Op) -> bool:
    """Would `sweep_free` find something?"""
    return any(
        (L.LEVEL_FREE, 0) in op.s.place(node.idx, node.epoch).lists for node in op.s.by_idx
    )


def sweep_dead(op: Op) -> None:
    """Remove runs whose data is lost, and what lies behind them, from the leaves."""
    total = 0
    for where in op.s.dead.upto(op.now, L.DEAD_PER_CALL):
        place = op.s.places.get(where)
        steps = L.SWEEP_STEPS
        while place is not None and op.budget > 0 and steps > 0:
            first = place.runs.first()
            if first is None or first[0] > op.now:
                break
            steps -= 1
            blocks = _remove_below(op, op.s.runs[first[1]])
            if not blocks:
                place.runs.add(first[1], op.now + L.DEAD_GRACE_MS)
            total += blocks
        node = tree.current(op, *where)
        if where[0] and node is None and (place is None or not place.runs):
            op.s.dead.discard(where)
            op.s.places.pop(where, None)
    op.s.count("swept", total)


def _remove_below(op: Op, run: Run) -> int:
    """Remove blocks from the end of a leaf below `run`, or of `run`; 0 if they are needed now."""
    while run.children:
        top = run.children.last()
        assert top is not None
        if top[1] < 0:
            return 0
        run = op.s.runs[top[1]]
    floor = max(run.start, run.top_child(), tree.leased_to(op, run))
    blocks = tree.unpromised(op, run, max(0, min(run.stop - floor, op.budget)))
    if blocks:
        tree.trim(op, run, run.stop - blocks)
    return blocks
