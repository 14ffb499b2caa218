"""How a lookup finds the end of what is stored, and how often it asks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.ids import BlockHash, Namespace, NodeId, SessionKey
from connector.indexmsg import BLOCKS_PER_CALL_MAX, Acquired, Boundary, Recalled
from connector.lookup import LookupOutcome
from store_worker.index import search
from store_worker.index.base import SessionIndex

NS = Namespace(b"n" * 16)
SESSION = SessionKey(b"s" * 16)


def chain(length: int, salt: str = "") -> list[BlockHash]:
    return [BlockHash(f"{salt}{i}".encode()) for i in range(1, length + 1)]


class Listed:
    """An index that lists a prefix of one chain, and remembers one session's boundaries."""

    def __init__(self, hashes: Sequence[BlockHash], boundaries: Sequence[int] = ()) -> None:
        self.listed = {h: d for d, h in enumerate(hashes, 1)}
        self.boundaries = tuple(
            Boundary(depth=d, hash=BlockHash(hashes[d - 1])) for d in boundaries
        )
        self.calls: list[str] = []

    def recall(self, ns: Namespace, session: SessionKey, now_ms: int = 0) -> Recalled:
        self.calls.append("recall")
        home = NodeId("n") if self.listed else None
        return Recalled(generation=cast(Any, 3), home=home, boundaries=self.boundaries)

    def probe(self, ns: Namespace, hashes: Sequence[BlockHash]) -> tuple[bool, ...]:
        assert len(hashes) <= BLOCKS_PER_CALL_MAX
        self.calls.append("probe")
        return tuple(h in self.listed for h in hashes)

    def acquire(
        self,
        ns: Namespace,
        candidates: Sequence[tuple[BlockHash, int]],
        lease_s: float,
        session: SessionKey,
        now_ms: int = 0,
    ) -> Acquired:
        assert len(candidates) <= search.CANDIDATES_MAX
        self.calls.append("acquire")
        for hash_, depth in candidates:
            if hash_ in self.listed:
                assert self.listed[hash_] == depth
                return Acquired(depth=depth)
        return Acquired(depth=0)


def find(index: Listed, hashes: Sequence[BlockHash], session: SessionKey = SESSION) -> search.Found:
    return search.find(cast(SessionIndex, index), NS, session, hashes, 1.0)


@pytest.mark.parametrize("blocks", [64, 8192])
def test_a_known_session_takes_two_trips_whatever_its_length(blocks: int) -> None:
    hashes = chain(blocks)
    index = Listed(hashes, boundaries=(blocks - 9, blocks - 10))
    found = find(index, hashes)
    assert index.calls == ["recall", "acquire"]
    assert (found.acquired.depth, found.outcome) == (blocks, LookupOutcome.HIT_TIP)


def test_a_rewritten_last_turn_still_hits_by_an_older_boundary() -> None:
    stored = chain(100)
    asked = stored[:61] + chain(60, salt="rewritten")
    index = Listed(stored, boundaries=(100, 99, 61, 60))
    assert find(index, asked).acquired.depth == 61
    assert index.calls == ["recall", "acquire"]


@pytest.mark.parametrize(("blocks", "trips"), [(1, 1), (128, 1), (129, 2), (16384, 2)])
def test_a_first_turn_is_searched_with_few_probes(blocks: int, trips: int) -> None:
    for listed in {0, 1, blocks // 2, blocks - 1, blocks}:
        index = Listed(chain(blocks)[:listed])
        depth, probes = search.search(cast(SessionIndex, index), NS, chain(blocks))
        assert depth == listed
        assert probes <= trips


@given(st.integers(0, 3000), st.integers(0, 3000))
def test_the_search_finds_exactly_the_end(blocks: int, listed: int) -> None:
    index = Listed(chain(blocks)[: min(listed, blocks)])
    depth, probes = search.search(cast(SessionIndex, index), NS, chain(blocks))
    assert depth == min(listed, blocks)
    assert probes <= 3


def test_a_session_whose_chain_was_evicted_falls_back_to_what_others_share() -> None:
    hashes = chain(50)
    index = Listed(hashes[:20])
    index.boundaries = (Boundary(depth=40, hash=hashes[39]),)
    found = find(index, hashes)
    assert (found.acquired.depth, found.outcome) == (20, LookupOutcome.HIT_SHARED)


def test_without_a_session_nothing_is_recalled() -> None:
    index = Listed(chain(5))
    found = find(index, chain(9), SessionKey(b""))
    assert found.acquired.depth == 5
    assert "recall" not in index.calls


def test_a_miss_asks_for_no_lease() -> None:
    index = Listed([])
    assert find(index, chain(9)).outcome is LookupOutcome.MISS
    assert "acquire" not in index.calls


def test_boundaries_of_another_branch_do_not_count() -> None:
    hashes = chain(10)
    other = Boundary(depth=4, hash=BlockHash(b"other"))
    assert search.best_boundary((other,), hashes) is None
    assert search.best_boundary((Boundary(depth=11, hash=hashes[9]),), hashes) is None


@given(st.integers(1, 200), st.integers(0, 200))
def test_candidates_are_few_deepest_first_and_end_with_the_boundary(at: int, beyond: int) -> None:
    hashes = chain(at + beyond)
    picks = search.candidates(at, hashes)
    depths = [depth for _, depth in picks]
    assert depths == sorted(set(depths), reverse=True)
    assert (depths[0], depths[-1]) == (at + beyond, at)
    assert len(depths) <= search.CANDIDATES_MAX
    assert all(hashes[d - 1] == h for h, d in picks)
