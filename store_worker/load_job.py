"""Loading: objects on data nodes become pages of the cache. Runs on a load thread.

A page is reported OK only when its bytes were verified; the pages of other blocks may hold anything
by then, which is why they are all named as failed.
"""

from __future__ import annotations

from connector.errors import StoreTimeout
from connector.meta import BlockOutcome, JobResult
from store_worker.backends.base import DataNode, GetItem
from store_worker.codec import HEADER_BYTES
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
from store_worker.paged.copy import Landing


def run_load(ticket: Ticket, context: JobContext) -> JobResult:
    """Fill every page of a load; raises nothing, and the result names every block."""
    return run_job(ticket, context, _load_slice)


def _load_slice(piece: Slice, ticket: Ticket, context: JobContext, outcomes: Outcomes) -> None:
    if not lives(context.node(piece.node), piece, ticket.end):
        # The node has lost what was listed there.
        outcomes.fill(piece, BlockOutcome.MISSING)
        return
    for landing in context.mover.write(piece.blocks, ticket.after):
        if context.clock.now() >= ticket.end:
            raise StoreTimeout("the load's deadline has passed")
        found = _load_batch(context.node(piece.node), landing, piece, ticket, context)
        outcomes.put(piece.start + landing.start, found)
        verdict = node_verdict(found)
        if verdict is not None:
            # Blocks are used up to the first that is not there: no use in waiting for more.
            outcomes.fill(piece, verdict)
            return


def _load_batch(
    node: DataNode, landing: Landing, piece: Slice, ticket: Ticket, context: JobContext
) -> list[BlockOutcome]:
    codec = codec_of(ticket, context)
    scratch = memoryview(bytearray(HEADER_BYTES * len(landing.parts)))
    headers = [
        scratch[at : at + HEADER_BYTES] for at in range(0, len(scratch), HEADER_BYTES)
    ]
    hashes = piece.hashes[landing.start : landing.start + len(landing.parts)]
    items = [
        GetItem(key_of(ticket, codec, hash), [header, *parts])
        for hash, header, parts in zip(hashes, headers, landing.parts, strict=True)
    ]
    good: list[int] = []

    def landed(index: int) -> None:
        # At once, while the bytes are still in the processor's cache and others on their way.
        parts = landing.parts[index]
        if codec.verify(headers[index], hashes[index], parts, context.checksums):
            good.append(index)

    found = node.get(items, ticket.end, landed)
    landing.keep(sorted(good))
    verified = set(good)
    return [
        BlockOutcome.CORRUPT
        if outcome is BlockOutcome.OK and index not in verified
        else outcome
        for index, outcome in enumerate(found)
    ]
