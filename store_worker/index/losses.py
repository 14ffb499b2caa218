"""What ends: sessions, data, nodes.

Functions on an `Op`, as in `tree`. The Lua twins are in `lua/losses.lua`.
"""

from __future__ import annotations

from collections.abc import Sequence

from connector.indexmsg import Closed
from store_worker.index import limits as L
from store_worker.index import room, sessions, tree
from store_worker.index.records import Node, Run, Zset
from store_worker.index.tree import Op


def close(op: Op, session: bytes, resume: bool) -> Closed:
    """See `SessionIndex.close`."""
    s = op.s
    blocks = 0
    if not resume:
        token = s.sessions[session].generation if session in s.sessions else 0
        s.generation = max(s.generation, token) + 1
        _end_generation(op, session)
        for run_id in _let_go(op, session):
            blocks += room.free_up(op, s.runs.get(run_id))
    blocks += room.sweep_free(op)
    s.count("closed_blocks", blocks)
    return Closed(blocks, tuple(op.victims), room.free_left(op))


def _end_generation(op: Op, session: bytes) -> None:
    """The record of a new, empty life; also of a session that was not known."""
    s = op.s
    record = s.sessions.get(session)
    if record is None:
        record = sessions.open_session(op, session, 0, "")
    sessions.uncount(op, session, record)
    record.generation, record.closed = s.generation, True
    record.home = record.turns = record.priority = record.priority_until_ms = 0
    record.last_ms, record.engines = op.now, ()
    record.boundaries.clear()
    s.count("closed")


def _let_go(op: Op, session: bytes) -> list[int]:
    """Drop all holds; the runs that were held, the newest first. Each of many is work of its own,
    which leaves less to be removed in this call."""
    s = op.s
    record = s.sessions[session]
    held = [run_id for run_id, _ in reversed(record.holds.items())]
    for run_id in held[: L.ENDED_PER_CLOSE]:
        run = s.runs[run_id]
        sessions.end_conversation(op, run, sessions.held_at(run, session))
    for run_id in held:
        s.runs[run_id].holders.discard(session)
    record.holds = Zset()
    op.budget -= L.RUN_COST * max(0, len(held) - 1)
    s.idle.add(session, op.now)
    return held


def forget(op: Op, ns: bytes, hashes: Sequence[bytes], node: str) -> None:
    """See `SessionIndex.forget`."""
    lost: dict[int, tuple[int, int]] = {}
    for block in hashes:
        found = tree.find(op, ns, block)
        if found is None:
            continue
        run, depth = found
        if run.id not in lost and len(lost) >= L.FORGET_RUNS_MAX:
            continue
        low, high = lost.get(run.id, (depth, depth))
        lost[run.id] = min(low, depth), max(high, depth)
    for run_id, (low, high) in lost.items():
        _lose(op, op.s.runs[run_id], (low, high), node)


def _lose(op: Op, run: Run, depths: tuple[int, int], name: str) -> None:
    """The blocks low..high of a run are gone from a node."""
    low, high = depths
    for copy in list(run.copies):
        holder = tree.current(op, copy.node, copy.epoch)
        if holder is not None and name in ("", holder.name):
            room.uncopy(op, run, holder, low - 1)
    home = tree.current(op, run.node, run.epoch)
    if home is None or name not in ("", home.name):
        return
    op.s.count("blocks_lost", high - low + 1)
    if low - 1 > run.start:
        _, run = tree.split(op, run, low - 1)
    if high < run.stop:
        run, _ = tree.split(op, run, high)
    _lay_waste(op, run, home)


def _lay_waste(op: Op, run: Run, home: Node) -> None:
    """A whole run is lost: what may be left of its objects dies, its blocks lie nowhere."""
    blocks = run.stop - run.start
    home.stored -= blocks * run.block_bytes
    home.blocks -= blocks
    for block in reversed(run.hashes):
        tree.bury(op, home, run.ns, block, (run.block_bytes, run.ranks))
    tree.leave(op, run)
    run.node = run.epoch = 0
    op.s.place(0, 0).runs.add(run.id, op.now + L.DEAD_GRACE_MS)
    op.s.dead.add((0, 0), 0)
    tree.settle(op, run)


def register(op: Op, name: str, incarnation: bytes, capacity: int) -> None:
    """See `SessionIndex.register_node`."""
    s = op.s
    node = s.nodes.get(name)
    if node is None:
        node = s.nodes[name] = Node(len(s.by_idx) + 1, name, incarnation)
        s.by_idx.append(node)
    elif node.incarnation != incarnation:
        s.dead.discard((node.idx, node.epoch))
        place = s.place(node.idx, node.epoch)
        s.dead.add((node.idx, node.epoch), op.now + L.DEAD_GRACE_MS if place.runs else op.now)
        node.incarnation = incarnation
        node.epoch += 1
        node.stored = node.copies = node.granted = node.dying = node.blocks = 0
        node.dying_blocks, node.dying_order, node.promised = {}, Zset(), {}
        s.count("nodes_lost")
    else:
        s.dead.discard((node.idx, node.epoch))
    node.up, node.capacity = True, capacity


def down(op: Op, name: str) -> None:
    """See `SessionIndex.node_down`."""
    node = op.s.nodes.get(name)
    if node is not None and node.up:
        node.up = False
        op.s.dead.add((node.idx, node.epoch), op.now + L.DOWN_GRACE_MS)
