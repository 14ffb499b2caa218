"""Saves: making one visible.

Functions on an `Op`, as in `tree`. The Lua twin is `lua/commit.lua`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from connector.indexmsg import CommitOutcome, CommitRequest, Committed, CopyStep, TurnEnd
from store_worker.index import copies, room, sessions, tree
from store_worker.index import limits as L
from store_worker.index.options import IndexOptions
from store_worker.index.records import Grant, Mark, Node, Run
from store_worker.index.tree import Op, Path


class _Arrival(NamedTuple):
    """A chain was used by a save or a touch. path: of its deepest listed block. new_tokens: of a
    turn that goes on; None keeps the class as it is."""

    ns: bytes
    session: bytes
    generation: int
    path: Path
    turn_end: TurnEnd | None
    new_tokens: int | None
    beyond: bytes


def commit(op: Op, request: CommitRequest, options: IndexOptions) -> Committed:
    """See `SessionIndex.commit`."""
    grant = op.s.grants.get(request.grant)
    if request.grant and grant is None:
        return Committed(CommitOutcome.EXPIRED)
    if grant is None:
        return _touch(op, request, options)
    if grant.reply is not None:
        return grant.reply
    outcome = CommitOutcome.OK
    already: tuple[int, ...] = ()
    node = tree.current(op, grant.node, grant.epoch)
    saved = grant.hashes[: max(0, request.saved)]
    parent = tree.find(op, grant.ns, grant.parent) if grant.parent else None
    if node is None:
        outcome = CommitOutcome.EXPIRED
    elif sessions.stale(op, grant.session, grant.generation):
        outcome = CommitOutcome.STALE_GENERATION
    elif grant.parent and (parent is None or tree.live_stop(op, parent[0]) < parent[1]):
        outcome = CommitOutcome.MISSING_PARENT
    elif any((grant.ns, h) in node.dying_blocks for h in saved):
        outcome = CommitOutcome.DYING
    elif saved:
        already = list_blocks(op, grant, node, saved)
    room.settle_promise(op, grant)
    copy: tuple[CopyStep, ...] = ()
    if outcome is CommitOutcome.OK:
        tip = saved[-1] if saved else grant.parent
        found = tree.find(op, grant.ns, tip) if tip else None
        path = (tree.walk(op, *found) or []) if found else []
        copy = arrive(op, _Arrival(grant.ns, grant.session, grant.generation, path,
                                   request.turn_end, grant.new_tokens, b""), options)  # fmt: skip
    reply = Committed(outcome, already, tuple(op.victims), copy)
    grant.reply, grant.hashes = reply, ()
    op.s.grant_ends.add(grant.id, op.now + L.REPLY_KEPT_MS)
    op.s.count(f"commit_{outcome.value}")
    return reply


def _touch(op: Op, request: CommitRequest, options: IndexOptions) -> Committed:
    path: Path = []
    if sessions.stale(op, request.session, request.generation):
        return Committed(CommitOutcome.STALE_GENERATION)
    if request.parent:
        found = tree.find(op, request.namespace, request.parent)
        path = (tree.walk(op, *found) or []) if found else []
        if not path:
            return Committed(CommitOutcome.MISSING_PARENT)
    if request.session:
        sessions.open_session(op, request.session, request.generation, options.tenant)
    arrival = _Arrival(request.namespace, request.session, request.generation, path,
                       request.turn_end, None, request.beyond)  # fmt: skip
    copy = arrive(op, arrival, options)
    return Committed(CommitOutcome.OK, (), tuple(op.victims), copy)


def list_blocks(
    op: Op, grant: Grant, node: Node, saved: Sequence[bytes]
) -> tuple[int, ...]:
    """Make saved blocks visible. Returns the indices of those that were already."""
    already: list[int] = []
    i = 0
    while i < len(saved):
        found = tree.find(op, grant.ns, saved[i])
        if found is None:
            break
        run, depth = found
        if tree.live_stop(op, run) >= depth:
            already.append(i)
            i += 1
            continue
        end = depth - 1
        while end < run.stop and i < len(saved) and run.hash_at(end + 1) == saved[i]:
            end += 1
            i += 1
        if depth - 1 > run.start:
            _, run = tree.split(op, run, depth - 1)
        if end < run.stop:
            run, _ = tree.split(op, run, end)
        _revive(op, run, grant, node)
    if i < len(saved):
        _attach(op, grant, node, (saved[i - 1] if i else grant.parent), saved[i:])
    node.blocks += len(saved) - i
    node.stored += (len(saved) - i) * grant.block_bytes
    op.s.count("blocks_committed", len(saved) - len(already))
    return tuple(already)


def _revive(op: Op, run: Run, grant: Grant, node: Node) -> None:
    """A run whose every copy was lost lies on `node` from now on."""
    s, blocks = op.s, run.stop - run.start
    old = tree.current(op, run.node, run.epoch)
    of = (run.block_bytes, run.ranks)
    if old is not None:
        old.stored -= blocks * run.block_bytes
        old.blocks -= blocks
        for block in reversed(run.hashes):
            tree.bury(op, old, run.ns, block, of)
    for copy in run.copies:
        copied_to = tree.current(op, copy.node, copy.epoch)
        if copied_to is not None:
            room.uncopy(op, run, copied_to, run.start)
    tree.leave(op, run)
    run.node, run.epoch = node.idx, node.epoch
    run.block_bytes, run.ranks, run.copies = grant.block_bytes, grant.ranks, []
    s.place(node.idx, node.epoch).runs.add(run.id, 0)
    node.stored += blocks * grant.block_bytes
    node.blocks += blocks
    s.count("blocks_replaced", blocks)
    tree.settle(op, run)


def _attach(
    op: Op, grant: Grant, node: Node, parent: bytes, hashes: Sequence[bytes]
) -> None:
    """List new blocks: longer the run that ends with `parent` if it may grow, else a new run."""
    found = tree.find(op, grant.ns, parent) if parent else None
    above, depth = found if found else (None, 0)
    s, entries = op.s, op.s.entries.setdefault(grant.ns, {})
    if above is not None and _may_grow(above, depth, grant, len(hashes)):
        run = above
        if depth < above.stop:
            run, _ = tree.split(op, above, depth)
            _note_shared(run, depth, 1)
    else:
        s.last_run += 1
        run = Run(s.last_run, grant.ns, parent, depth, depth, grant.node, grant.epoch,
                  grant.ranks, grant.block_bytes, [])  # fmt: skip
        s.runs[run.id] = run
        s.place(node.idx, node.epoch).runs.add(run.id, 0)
        if above is not None:
            above.children.add(run.id, depth)
            _note_shared(above, depth, int(depth < above.stop))
    for block in hashes:
        run.stop += 1
        entries[block] = (run.id, run.stop)
        run.hashes.append(block)
    tree.add_mark(run, Mark(run.stop, op.now, 0))  # `arrive` says the class
    if above is not None and above is not run and above.id in s.runs:
        tree.settle(op, above)
    tree.settle(op, run)


def _may_grow(run: Run, depth: int, grant: Grant, blocks: int) -> bool:
    """At its end, if nothing hangs there. Before its end, if the rest is what the same session
    had there before (a template that rewrites the last turn): the rest is cut off, so that the
    chain in use stays in few runs."""
    if (
        (run.node, run.epoch) != (grant.node, grant.epoch)
        or (run.ranks, run.block_bytes) != (grant.ranks, grant.block_bytes)
        or depth - run.start + blocks > L.BLOCKS_MAX
    ):
        return False
    if depth == run.stop:
        return run.children.count(depth, depth) == 0
    return bool(grant.session) and sessions.held_at(run, grant.session) == run.stop


def _note_shared(run: Run, depth: int, inside: int) -> None:
    """inside: 1 if the run itself goes on below the depth, or is about to."""
    children = run.children.count(depth, depth) + inside
    if children >= L.SHARED_CHILDREN and depth not in run.shared:
        run.shared.append(depth)


def arrive(op: Op, arrival: _Arrival, options: IndexOptions) -> tuple[CopyStep, ...]:
    """Move the hold, count the turn, mark the use. Returns what to copy."""
    ns, session, path, turn = arrival.ns, arrival.session, arrival.path, arrival.turn_end
    record = op.s.sessions.get(session) if session else None
    if session and record is None:
        record = sessions.open_session(op, session, arrival.generation, options.tenant)
    private = sessions.first_private(path, arrival.beyond)
    cls = None
    if turn is not None:
        cls = sessions.end_turn(op, ns, path, private, turn)
        if record is not None:
            record.turns += 1
            sessions.remember(record, ns, turn)
    elif arrival.new_tokens is not None:
        cls = sessions.class_now(op, ns, private[0], arrival.new_tokens)
    if record is not None:
        sessions.used(op, session, record, options.engine)
    if not path:
        return ()
    run, depth = path[0]
    sessions.hold(op, session, path)
    run.free = False
    if cls is None:
        mark = tree.mark_at(run, depth)
        cls = mark.cls if mark else 0
    tree.add_mark(run, Mark(depth, op.now, cls))
    tree.settle(op, run)
    if record is not None and record.pin_until_ms > op.now:
        sessions.repin(op, session, record, options.pinned_bytes_max)
    return copies.plan(op, path, private[1])
