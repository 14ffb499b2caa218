"""How a lookup finds the longest stored prefix (DESIGN section 5).

A known session: its boundaries are compared with the request's own chain, so the work is the same
for a 1k and a 128k prompt: `recall`, `acquire`. Otherwise what is listed is monotone in depth (I1),
so a k-ary search with 128 probes a trip finds the end of 16k blocks in two trips.

Thread: the index client's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from connector.ids import NO_GENERATION, BlockHash, Namespace, SessionKey
from connector.indexmsg import BLOCKS_PER_CALL_MAX, Acquired, Boundary, Recalled
from connector.lookup import LookupOutcome
from store_worker.index.base import SessionIndex

CANDIDATES_MAX = 16
NEXT = 7

Candidates = list[tuple[BlockHash, int]]


class Found(NamedTuple):
    """What a lookup found. round_trips: calls to the index. turn_start: depth that the session's
    turn before had on this chain, stored or not; of a first turn, what others have stored."""

    recalled: Recalled
    acquired: Acquired
    outcome: LookupOutcome
    round_trips: int
    turn_start: int = 0


def find(
    index: SessionIndex,
    namespace: Namespace,
    session: SessionKey,
    hashes: Sequence[BlockHash],
    lease_s: float,
) -> Found:
    """The longest usable prefix of the chain `hashes`, leased for `lease_s` seconds."""
    trips = 0
    recalled = Recalled(generation=NO_GENERATION, home=None)
    if session:
        recalled = index.recall(namespace, session)
        trips += 1
    best = best_boundary(recalled.boundaries, hashes)
    if best is not None:
        acquired = index.acquire(namespace, candidates(best.depth, hashes), lease_s, session)
        trips += 1
        if acquired.depth:
            return Found(recalled, acquired, LookupOutcome.HIT_TIP, trips, best.depth)
    depth, probes = search(index, namespace, hashes)
    trips += probes
    start = depth if best is None else best.depth
    if not depth and not recalled.home:
        return Found(recalled, Acquired(depth=0), LookupOutcome.MISS, trips, start)
    acquired = index.acquire(namespace, candidates(depth, hashes), lease_s, session)
    outcome = LookupOutcome.HIT_SHARED if acquired.depth else LookupOutcome.MISS
    return Found(recalled, acquired, outcome, trips + 1, start)


def best_boundary(
    boundaries: Sequence[Boundary], hashes: Sequence[BlockHash]
) -> Boundary | None:
    """The deepest boundary that lies on the chain: one equal hash proves all blocks above it."""
    on_chain = (b for b in boundaries if b.depth <= len(hashes) and hashes[b.depth - 1] == b.hash)
    return max(on_chain, key=lambda b: b.depth, default=None)


def candidates(found: int, hashes: Sequence[BlockHash]) -> Candidates:
    """Depths to try in one `acquire`, deepest first: `found`, which is thought to be listed, and up
    to 15 beyond it: the next 7, which a save under way may be about to list, and others evenly
    spread up to the last, for a turn that was stored but did not end (a retry)."""
    beyond = len(hashes) - found
    depths = set(range(found + 1, found + 1 + min(beyond, NEXT)))
    spread = min(beyond, CANDIDATES_MAX - 1 - NEXT)
    depths |= {len(hashes) - i * beyond // spread for i in range(spread)}
    if found:
        depths.add(found)
    return [(hashes[d - 1], d) for d in sorted(depths, reverse=True)]


def search(
    index: SessionIndex, namespace: Namespace, hashes: Sequence[BlockHash]
) -> tuple[int, int]:
    """(depth up to which the chain is listed, probes needed)."""
    low, high, probes = 0, len(hashes) + 1, 0
    while high - low > 1:
        step = -(-(high - low - 1) // BLOCKS_PER_CALL_MAX)
        depths = list(range(low + step, high, step))
        listed = index.probe(namespace, [hashes[d - 1] for d in depths])
        probes += 1
        known = sum(1 for _ in _prefix(listed))
        if known < len(depths):
            high = depths[known]
        if known:
            low = depths[known - 1]
    return low, probes


def _prefix(listed: Sequence[bool]) -> Sequence[bool]:
    end = next((i for i, there in enumerate(listed) if not there), len(listed))
    return listed[:end]
