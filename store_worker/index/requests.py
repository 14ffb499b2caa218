"""What a caller may ask: checks of our own callers, so a breach is a ValueError."""

from __future__ import annotations

from collections.abc import Sequence

from connector.ids import BlockHash
from connector.indexmsg import PrepareRequest
from store_worker.index.limits import BLOCKS_MAX, CANDIDATES_MAX


def check_hashes(hashes: Sequence[BlockHash]) -> None:
    """At most 128."""
    if len(hashes) > BLOCKS_MAX:
        raise ValueError(f"{len(hashes)} hashes in one call, at most {BLOCKS_MAX}")


def check_candidates(candidates: Sequence[tuple[BlockHash, int]]) -> None:
    """At most 16."""
    if len(candidates) > CANDIDATES_MAX:
        raise ValueError(f"{len(candidates)} candidates in one call, at most {CANDIDATES_MAX}")


def check_prepare(request: PrepareRequest) -> None:
    """Between 1 and 128 hashes, all of one length, and sizes that make sense."""
    hashes = request.hashes
    check_hashes(hashes)
    if not hashes:
        raise ValueError("a save without blocks")
    size = len(hashes[0])
    if not size or any(len(h) != size for h in hashes) or len(request.parent) not in (0, size):
        raise ValueError("block hashes of different lengths in one chain")
    if bool(request.parent) != bool(request.start):
        raise ValueError(f"start {request.start} does not go with the parent given")
    if request.object_bytes <= 0 or request.ranks <= 0:
        raise ValueError("object_bytes and ranks must be above 0")
