"""Copies of the shared part: every node gets what many conversations begin with.

Functions on an `Op`, as in `tree`. The Lua twin is `lua/copies.lua`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from connector.ids import BlockHash, Namespace, NodeId
from connector.indexmsg import CopyStep
from store_worker.index import limits as L
from store_worker.index import room, tree
from store_worker.index.records import Copy, Node, Run
from store_worker.index.tree import Op, Path


class _Plan(NamedTuple):
    """Steps so far. keep: (run, depth) that no copy may push out. bounded: to the share of a node
    that copies may take."""

    steps: list[CopyStep]
    keep: tuple[int, int]
    bounded: bool

    @property
    def left(self) -> int:
        """How many more."""
        return L.COPY_BLOCKS_PER_CALL - len(self.steps)


def plan(op: Op, path: Path, shared: int) -> tuple[CopyStep, ...]:
    """Blocks of the shared part that some node lacks, with room reserved there, a few."""
    if not shared or len(op.s.by_idx) < 2:
        return ()
    planned = _Plan([], (path[0][0].id, path[0][1]), True)
    for run, depth in reversed(path):
        upto = min(depth, shared)
        if not tree.reachable(op, run.node, run.epoch) or upto <= run.start:
            break
        done = {(c.node, c.epoch) for c in run.copies if c.upto >= upto}
        for node in op.s.by_idx:
            if node.idx != run.node and (node.idx, node.epoch) not in done:
                _copy_to(op, run, upto, node, planned)
    return tuple(planned.steps)


def moves(op: Op, name: str) -> tuple[CopyStep, ...]:
    """What to copy away from a draining node, a few blocks: each run to the least used node."""
    source = op.s.nodes.get(name)
    planned = _Plan([], (0, 0), False)
    if source is None or not source.draining or not source.up:
        return ()
    runs = op.s.place(source.idx, source.epoch).runs
    for run_id in runs.upto(inf, L.MOVE_RUNS_PER_CALL):
        run = op.s.runs[run_id]
        target = _target(op, run)
        if target is not None and planned.left > 0:
            _copy_to(op, run, run.stop, target, planned)
            runs.add(run_id, op.now)  # another one first next time
    return tuple(planned.steps)


def _target(op: Op, run: Run) -> Node | None:
    """Where a run goes: on to where a part of it is, else to the node that is least used."""
    able = [n for n in op.s.by_idx if n.up and not n.draining and n.capacity]
    begun = {c.node for c in run.copies if tree.current(op, c.node, c.epoch)}
    return min(able, key=lambda n: (n.idx not in begun, n.used / n.capacity, n.idx), default=None)


def _copy_to(op: Op, run: Run, upto: int, node: Node, planned: _Plan) -> None:
    size, source = run.block_bytes, op.s.node_at(run.node)
    if not node.up or node.draining or not node.capacity:
        return
    at = max((c.upto for c in run.copies if (c.node, c.epoch) == (node.idx, node.epoch)),
             default=run.start)  # fmt: skip
    while at < upto and planned.left > 0:
        block = run.hash_at(at + 1)
        key = (node.idx, run.ns, block)
        over_share = node.copies + size > node.capacity * L.COPY_PERCENT // 100
        if (
            key in op.s.copying
            or (run.ns, block) in node.dying_blocks
            or (planned.bounded and over_share)
        ):
            break
        if node.used + size > node.capacity:
            # Next time there is room.
            tree.wake(op, node)
            wanted = size * min(upto - at, L.COPY_BLOCKS_PER_CALL)
            room.evict(op, node, wanted - node.dying, None, planned.keep)
            break
        op.s.copying[key] = (size, run.ranks, node.epoch)
        op.s.copy_ends.add(key, op.now + L.COPY_ROOM_MS)
        node.granted += size
        planned.steps.append(CopyStep(Namespace(run.ns), BlockHash(block), NodeId(source.name),
                                      NodeId(node.name), run.ranks))  # fmt: skip
        at += 1


def copied(op: Op, steps: Sequence[CopyStep]) -> None:
    """Those copies are made. What is of no use any more dies."""
    for step in steps:
        node = op.s.nodes.get(step.node)
        key = (node.idx if node else 0, step.namespace, step.hash)
        size = op.s.copying.get(key)
        if node is None or size is None:
            continue
        found = tree.find(op, step.namespace, step.hash)
        if found is not None and node.epoch == size[2] and _add_copy(op, *found, node, size[0]):
            op.s.count("copies_made")
            _settle_over(op, found[0], node)
        room.end_copying(op, key)


def _add_copy(op: Op, run: Run, depth: int, node: Node, size: int) -> bool:
    mine = [c for c in run.copies if (c.node, c.epoch) == (node.idx, node.epoch)]
    upto = mine[0].upto if mine else run.start
    if upto != depth - 1 or run.block_bytes != size or run.node == node.idx:
        return False
    if (run.ns, run.hash_at(depth)) in node.dying_blocks:
        return False
    run.copies = [c for c in run.copies if c.node != node.idx]
    run.copies.append(Copy(node.idx, node.epoch, depth))
    node.copies += size
    op.s.place(node.idx, node.epoch).copied.add(run.id, op.now)
    return True


def _settle_over(op: Op, run: Run, node: Node) -> None:
    """A run that has left a draining node whole lies on the new one from now on."""
    old = tree.current(op, run.node, run.epoch)
    mine = next(c for c in run.copies if c.node == node.idx)
    if old is None or not old.draining or mine.upto < run.stop:
        return
    bytes_ = (run.stop - run.start) * run.block_bytes
    old.stored -= bytes_
    old.blocks -= run.stop - run.start
    node.copies -= bytes_
    node.stored += bytes_
    node.blocks += run.stop - run.start
    for block in reversed(run.hashes):
        tree.bury(op, old, run.ns, block, (run.block_bytes, run.ranks))
    tree.leave(op, run)
    run.copies = [c for c in run.copies if c is not mine]
    run.node, run.epoch = node.idx, node.epoch
    place = op.s.place(node.idx, node.epoch)
    place.copied.discard(run.id)
    place.runs.add(run.id, 0)
    op.s.count("blocks_moved", run.stop - run.start)
    tree.settle(op, run)
