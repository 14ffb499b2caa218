"""Copies of the shared part: every node gets what many conversations begin with.

Functions on an `Op`, as in `tree`. The Lua twin is `lua/copies.lua`.
"""

from __future__ import annotations

from collections.abc import Sequence

from connector.ids import BlockHash, Namespace, NodeId
from connector.indexmsg import CopyStep
from store_worker.index import limits as L
from store_worker.index import room, tree
from store_worker.index.options import IndexOptions
from store_worker.index.records import Copy, Node, Run
from store_worker.index.tree import Op, Path


def plan(
    op: Op, path: Path, shared: int, options: IndexOptions
) -> tuple[CopyStep, ...]:
    """Blocks of the shared part that some node lacks, with room reserved there, a few."""
    steps: list[CopyStep] = []
    if not shared or len(op.s.by_idx) < 2:
        return ()
    for run, depth in reversed(path):
        upto = min(depth, shared)
        source = _node_or_none(op, run)
        if source is None or upto <= run.start:
            break
        for node in op.s.by_idx:
            if len(steps) < L.COPY_BLOCKS_PER_COMMIT and node is not source:
                limit = L.COPY_BLOCKS_PER_COMMIT - len(steps)
                steps += _copy_to(op, run, upto, node, (source, limit, options.high_water))
    return tuple(steps)


def _node_or_none(op: Op, run: Run) -> Node | None:
    if tree.reachable(op, run.node, run.epoch):
        return op.s.node_at(run.node)
    return None


def _copy_to(
    op: Op, run: Run, upto: int, node: Node, how: tuple[Node, int, float]
) -> list[CopyStep]:
    source, limit, high_water = how
    size = run.block_bytes
    if not node.up or node.draining or not node.capacity:
        return []
    at = max((c.upto for c in run.copies if (c.node, c.epoch) == (node.idx, node.epoch)),
             default=run.start)  # fmt: skip
    steps: list[CopyStep] = []
    while at < upto and len(steps) < limit:
        block = run.hash_at(at + 1)
        key = (node.idx, run.ns, block)
        if (
            key in op.s.copying
            or (run.ns, block) in node.dying_blocks
            or node.used + size > int(node.capacity * high_water)
            or node.copies + size > node.capacity * L.COPY_PERCENT // 100
        ):
            break
        op.s.copying[key] = (size, run.ranks, node.epoch)
        op.s.copy_ends.add(key, op.now + L.COPY_ROOM_MS)
        node.granted += size
        steps.append(CopyStep(Namespace(run.ns), BlockHash(block), NodeId(source.name),
                              NodeId(node.name), run.ranks))  # fmt: skip
        at += 1
    return steps


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
