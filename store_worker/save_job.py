"""Saving: pages of the cache become objects on data nodes. Runs on a save thread."""

from __future__ import annotations

from collections.abc import Sequence

from connector.errors import StoreTimeout, StoreUnavailable
from connector.meta import BlockOutcome, JobResult, SaveMeta
from store_worker.backends.base import DataNode, HintedNode, PutHints, PutItem
from store_worker.job import (
    JobContext,
    Outcomes,
    Slice,
    Ticket,
    codec_of,
    key_of,
    lives,
    node_verdict,
    run_job,
)


def run_save(ticket: Ticket, context: JobContext) -> JobResult:
    """Write every block of a save; raises nothing, and the result names every block."""
    return run_job(ticket, context, _save_slice)


def _save_slice(piece: Slice, ticket: Ticket, context: JobContext, outcomes: Outcomes) -> None:
    if not lives(context.node(piece.node), piece, ticket.end):
        # The room was granted in another life of the node: what we wrote could not be committed.
        raise StoreUnavailable(f"node {piece.node} has been restarted since the save was planned")
    codec = codec_of(ticket, context)
    for batch in context.mover.read(piece.blocks, ticket.after):
        context.give_way(ticket.end)
        if context.clock.now() >= ticket.end:
            raise StoreTimeout("the save's deadline has passed")
        items = []
        for index, parts in enumerate(batch.parts, batch.start):
            hash = piece.hashes[index]
            header = memoryview(codec.pack(hash, parts, context.checksums))
            items.append(PutItem(key_of(ticket, codec, hash), [header, *parts]))
        if context.revoked(ticket.meta.job):
            # The checksums may be of somebody else's bytes. Those made before are good, and what
            # is overwritten after this fails them.
            outcomes.fill(piece, BlockOutcome.DECLINED)
            return
        found = _put(context.node(piece.node), items, ticket, context)
        outcomes.put(piece.start + batch.start, found)
        verdict = node_verdict(found)
        if verdict is not None:
            # What follows a gap can't be committed: no use in trying.
            outcomes.fill(piece, verdict)
            return


def _put(
    node: DataNode, items: Sequence[PutItem], ticket: Ticket, context: JobContext
) -> list[BlockOutcome]:
    """A store that evicts by itself is told what belongs together."""
    meta = ticket.meta
    if isinstance(node, HintedNode) and isinstance(meta, SaveMeta) and meta.grouped:
        hints = PutHints(group=f"{meta.session.hex()}-{meta.generation}")
        return node.put_hinted(items, hints, ticket.end)
    return node.put(items, context.ttl_ms, ticket.end)
