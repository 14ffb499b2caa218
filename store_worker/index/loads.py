"""Loads: the usable prefix of a chain.

Functions on an `Op`, as in `tree`. The Lua twin is `lua/acquire.lua`.
"""

from __future__ import annotations

from typing import NamedTuple

from connector.ids import BlockHash, Namespace, NodeId, SessionKey
from connector.indexmsg import Acquired, RunSlice
from store_worker.index import limits as L
from store_worker.index import sessions, tree
from store_worker.index.options import IndexOptions
from store_worker.index.records import Mark, Run
from store_worker.index.tree import Op


class Wish(NamedTuple):
    """What to load. candidates: (hash, depth), deepest first."""

    namespace: Namespace
    candidates: tuple[tuple[BlockHash, int], ...]
    lease_s: float
    session: SessionKey


def acquire(op: Op, wish: Wish, options: IndexOptions) -> Acquired:
    """See `SessionIndex.acquire`."""
    found = None
    deeper: list[tuple[bytes, bytes]] = []
    for block, _ in wish.candidates:
        found = tree.find(op, wish.namespace, block)
        if found is not None:
            break
        deeper.append((wish.namespace, block))
    more = any(key in node.promised for node in op.s.by_idx for key in deeper)
    path = tree.walk(op, *found) if found else None
    if not path:
        return Acquired(0, pending=more)
    record = op.s.sessions.get(wish.session)
    home = record.home if record is not None else 0
    slices: list[RunSlice] = []
    last: tuple[Run, int] | None = None
    for run, depth in reversed(path):
        upto = min(depth, tree.live_stop(op, run))
        for piece in _sources(op, run, upto, home):
            _append(slices, piece)
        if len(slices) > L.SLICES_MAX:
            slices.pop()
            upto = run.start
        if upto > run.start:
            last = (run, upto)
        if upto < depth:
            break
    if last is None:
        return Acquired(0, pending=more)
    run, depth = last
    until = op.now + round(wish.lease_s * 1000)
    mark = tree.mark_at(run, depth)
    run.free = False
    tree.add_lease(op, run, depth, until)
    tree.add_mark(run, Mark(depth, op.now, mark.cls if mark else 0))
    tree.settle(op, run)
    if record is not None:
        sessions.used(op, wish.session, record, options.engine)
    return Acquired(depth, tuple(slices), until, more)


def _sources(op: Op, run: Run, upto: int, home: int) -> list[RunSlice]:
    """Where to load (run.start, upto] from: the session's home if it has the blocks, so that one
    load touches few nodes, else the run's own node, else the longest copy."""
    own = tree.reachable(op, run.node, run.epoch)
    copies = [c for c in run.copies if tree.reachable(op, c.node, c.epoch)]
    pieces: list[RunSlice] = []
    at = run.start
    at_home = next((c for c in copies if c.node == home), None)
    if at_home is not None and not (own and run.node == home):
        at = _piece(op, run, (at_home.node, at, min(upto, at_home.upto)), pieces)
        _copy_used(op, run, at_home.node)
    if own:
        _piece(op, run, (run.node, at, upto), pieces)
    elif copies:
        longest = max(copies, key=lambda c: (c.upto, -c.node))
        _piece(op, run, (longest.node, at, min(upto, longest.upto)), pieces)
        _copy_used(op, run, longest.node)
    return pieces


def _piece(op: Op, run: Run, part: tuple[int, int, int], pieces: list[RunSlice]) -> int:
    """Add (node, start, stop) unless it is empty; where the next piece starts."""
    idx, start, stop = part
    if stop <= start:
        return start
    node = op.s.node_at(idx)
    pieces.append(RunSlice(NodeId(node.name), node.incarnation, start, stop, run.ranks))
    return stop


def _copy_used(op: Op, run: Run, idx: int) -> None:
    node = op.s.node_at(idx)
    op.s.place(idx, node.epoch).copied.add(run.id, op.now)


def _append(slices: list[RunSlice], piece: RunSlice) -> None:
    """Join neighbours on one node."""
    if slices:
        last = slices[-1]
        same = (last.node, last.incarnation, last.ranks) == (
            piece.node, piece.incarnation, piece.ranks,
        )  # fmt: skip
        if same and last.stop == piece.start:
            slices[-1] = RunSlice(last.node, last.incarnation, last.start, piece.stop, last.ranks)
            return
    slices.append(piece)
