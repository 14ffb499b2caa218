"""Invariants of the index as code: I1, I5, I9b, and that every reference has its counterpart.

Pure; on a `State`, be it the reference's own or one read from a server.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from store_worker.index import limits as L
from store_worker.index.records import Grant, Node, Run, State


def check(s: State) -> list[str]:
    """Every violation, in words; empty when sound."""
    found: list[str] = []
    for part in (_entries, _runs, _holds, _lists, _grants, _accounting, _dying, _tenants):
        found += part(s)
    return found


def _entries(s: State) -> Iterator[str]:
    """Each listed block is in its run, at its depth, and the other way round."""
    count = 0
    for ns, entries in s.entries.items():
        for block, (run_id, depth) in entries.items():
            run = s.runs.get(run_id)
            if run is None or run.ns != ns or not run.start < depth <= run.stop:
                yield f"block {block.hex()} names run {run_id}, which has no depth {depth}"
            elif run.hash_at(depth) != block:
                yield f"block {block.hex()} is not what run {run_id} has at depth {depth}"
            count += 1
    blocks = sum(run.stop - run.start for run in s.runs.values())
    if blocks != count:
        yield f"{blocks} blocks in runs, {count} listed"


def _runs(s: State) -> Iterator[str]:
    """I1: every run but a root hangs from a listed block of another run that knows it."""
    for run in s.runs.values():
        if not run.start < run.stop <= run.start + L.BLOCKS_MAX or len(run.hashes) != (
            run.stop - run.start
        ):
            yield f"run {run.id} has bounds {run.start}..{run.stop}, {len(run.hashes)} hashes"
        if bool(run.parent) != bool(run.start):
            yield f"run {run.id} starts at {run.start} with parent {run.parent.hex()!r}"
        if run.parent:
            at = s.entries.get(run.ns, {}).get(run.parent)
            if at is None:
                yield f"I1: run {run.id} hangs from {run.parent.hex()}, which is not listed"
            elif at[1] != run.start or s.runs[at[0]].children.score(run.id) != run.start:
                yield f"run {run.id} is not a child at {run.start} of run {at[0]}"
        for child, score in run.children.items():
            if not run.start < score < run.stop + 1:
                yield f"run {run.id} has child {child} at {score}"
            if child > 0 and (child not in s.runs or s.runs[child].start != score):
                yield f"run {run.id} has child {child}, which is not there"
        if run.marks != sorted(run.marks) or any(
            a.at_ms <= b.at_ms for a, b in zip(run.marks, run.marks[1:], strict=False)
        ):
            yield f"run {run.id}: uses {run.marks} are not deeper and older"
        if any(not run.start < c.upto <= run.stop for c in run.copies):
            yield f"run {run.id}: copies {run.copies} outside {run.start}..{run.stop}"


def _holds(s: State) -> Iterator[str]:
    """Holds and holders are the two ends of one thing; what holds nothing is idle."""
    for session, record in s.sessions.items():
        for run_id in record.holds:
            if run_id not in s.runs or session not in s.runs[run_id].holders:
                yield f"session {session.hex()} holds run {run_id}, which does not know it"
        if (session in s.idle) == bool(record.holds):
            yield f"session {session.hex()}: idle {session in s.idle}, holds {len(record.holds)}"
        if s.by_seq.score(session) != record.seq:
            yield f"session {session.hex()} is not at {record.seq} in the order of sessions"
    for run in s.runs.values():
        for session in run.holders:
            known = s.sessions.get(session)
            if session and (known is None or run.id not in known.holds):
                yield f"run {run.id} is held by {session.hex()}, which does not know it"
        if len(run.holders) > L.HOLDERS_MAX:
            yield f"run {run.id} has {len(run.holders)} holders"


def _lists(s: State) -> Iterator[str]:
    """I9b: a run is in one list, the one it names, exactly while its last block is a leaf."""
    lists: dict[int, list[tuple[object, float]]] = defaultdict(list)
    for where, place in s.places.items():
        for key, zset in place.lists.items():
            for run_id, score in zset.items():
                lists[run_id].append(((where, key), score))
        for run_id in place.runs:
            run = s.runs.get(run_id)
            if run is None or (run.node, run.epoch) != where:
                yield f"place {where} has run {run_id}, which is not there"
        for run_id in place.copied:
            run = s.runs.get(run_id)
            if _on(s, *where) and (
                run is None or where not in {(c.node, c.epoch) for c in run.copies}
            ):
                yield f"place {where} has a copy of run {run_id}, which is not there"
    for run in s.runs.values():
        for copy in run.copies:
            there = s.places.get((copy.node, copy.epoch))
            if _on(s, copy.node, copy.epoch) and (there is None or run.id not in there.copied):
                yield f"run {run.id} has a copy that its place does not know: {copy}"
        leaf, inside = run.top_child() < run.stop, lists.pop(run.id, [])
        named = (run.node, run.epoch), run.where
        if len(inside) != leaf or (leaf and inside[0][0] != named):
            yield f"I9b: run {run.id} (leaf: {leaf}) is in {inside}, names {named}"
        elif leaf and run.where and run.where[0] >= 0 and inside[0][1] != run.marks[-1].at_ms:
            yield f"run {run.id} is at {inside[0][1]} in its list, used {run.marks[-1]}"
        if leaf and (not run.marks or run.marks[-1].depth != run.stop):
            yield f"run {run.id}: the leaf at {run.stop} has no use: {run.marks}"
        if run.id not in s.place(run.node, run.epoch).runs:
            yield f"run {run.id} is not among the runs of its place"
    if lists:
        yield f"lists name runs {sorted(lists)}, which are not there"


def _grants(s: State) -> Iterator[str]:
    """A running grant protects the block that it follows."""
    for grant in s.grants.values():
        if grant.id not in s.grant_ends:
            yield f"grant {grant.id} never ends"
        if grant.reply is not None or not grant.parent:
            continue
        at = s.entries.get(grant.ns, {}).get(grant.parent)
        if at is None:
            yield f"I1: grant {grant.id} follows {grant.parent.hex()}, which is not listed"
        elif s.runs[at[0]].children.score(-grant.id) != at[1] + 0.5:
            yield f"grant {grant.id} is not known to run {at[0]} at {at[1]}"
    for run in s.runs.values():
        for child in run.children:
            if child < 0 and (-child not in s.grants or s.grants[-child].reply is not None):
                yield f"run {run.id} waits for grant {-child}, which has ended"


def _accounting(s: State) -> Iterator[str]:
    """I5: a node's counters equal the sums over blocks, copies, grants and dying blocks."""
    stored: dict[int, int] = defaultdict(int)
    copies: dict[int, int] = defaultdict(int)
    blocks: dict[int, int] = defaultdict(int)
    for run in s.runs.values():
        if _on(s, run.node, run.epoch):
            stored[run.node] += (run.stop - run.start) * run.block_bytes
            blocks[run.node] += run.stop - run.start
        for copy in run.copies:
            if _on(s, copy.node, copy.epoch):
                copies[copy.node] += (copy.upto - run.start) * run.block_bytes
    for node in s.by_idx:
        granted = sum(_promised(g) for g in s.grants.values() if _of(g, node))
        granted += sum(
            size[0] for key, size in s.copying.items()
            if key[0] == node.idx and size[2] == node.epoch
        )  # fmt: skip
        sums = {
            "stored": stored[node.idx],
            "blocks": blocks[node.idx],
            "copies": copies[node.idx],
            "granted": granted,
            "dying": sum(d.bytes for d in node.dying_blocks.values()),
        }
        for name, value in sums.items():
            if getattr(node, name) != value:
                yield f"I5: node {node.name}: {name} {getattr(node, name)}, sum {value}"
        if node.capacity and node.used > node.capacity:
            yield f"I5: node {node.name}: {node.used} of {node.capacity} bytes"


def _on(s: State, idx: int, epoch: int) -> bool:
    return bool(idx) and s.node_at(idx).epoch == epoch


def _of(grant: Grant, node: Node) -> bool:
    return (grant.node, grant.epoch) == (node.idx, node.epoch) and grant.reply is None


def _promised(grant: Grant) -> int:
    return grant.block_bytes * len(grant.hashes)


def _dying(s: State) -> Iterator[str]:
    """Nothing on a node is listed there and dying at once."""
    for node in s.by_idx:
        if set(node.dying_blocks) != set(node.dying_order):
            yield f"node {node.name}: dying blocks and their order differ"
        promised: dict[tuple[bytes, bytes], int] = defaultdict(int)
        for grant in s.grants.values():
            for block in grant.hashes if _of(grant, node) else ():
                promised[grant.ns, block] += 1
        if node.promised != promised:
            yield f"node {node.name}: promised blocks are not those of the running grants"
        for ns, block in node.dying_blocks:
            at = s.entries.get(ns, {}).get(block)
            run = s.runs[at[0]] if at else None
            if run is not None and at is not None and _listed_on(run, at[1], node):
                yield f"node {node.name}: block {block.hex()} is listed there and dying"


def _listed_on(run: Run, depth: int, node: Node) -> bool:
    here = (node.idx, node.epoch)
    return (run.node, run.epoch) == here or any(
        (c.node, c.epoch) == here and c.upto >= depth for c in run.copies
    )


def _tenants(s: State) -> Iterator[str]:
    """Tenants' counters equal the sums over their sessions."""
    for name, tenant in s.tenants.items():
        own = [r for r in s.sessions.values() if r.tenant == name and r.counted]
        sums = len(own), sum(r.pin_bytes for r in own)
        if (tenant.sessions, tenant.pinned) != sums:
            yield f"tenant {name}: {tenant.sessions} sessions, {tenant.pinned} pinned; sums {sums}"
