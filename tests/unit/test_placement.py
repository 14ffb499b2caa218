"""Rendezvous hashing: even, stable, and indifferent to the order of the nodes."""

from __future__ import annotations

import random
from collections import Counter

from connector.ids import NO_SESSION, BlockHash, NodeId, SessionKey
from store_worker.placement import candidates, ranked

NODES = [NodeId(f"10.0.0.{i}:6379/0") for i in range(8)]
CHANCE = random.Random(7)
SESSIONS = [SessionKey(CHANCE.randbytes(16)) for _ in range(8000)]
HASH = BlockHash(bytes(32))


def test_the_order_of_the_nodes_does_not_matter() -> None:
    shuffled = CHANCE.sample(NODES, len(NODES))
    for session in SESSIONS[:200]:
        assert candidates(session, HASH, NODES) == candidates(session, HASH, shuffled)


def test_homes_are_even() -> None:
    homes = Counter(candidates(session, HASH, NODES)[0] for session in SESSIONS)
    assert set(homes) == set(NODES)
    assert max(homes.values()) < 1.15 * len(SESSIONS) / len(NODES)


def test_second_candidates_are_even_for_each_first() -> None:
    """The load of a node that is lost is spread over all others."""
    pairs = Counter(candidates(session, HASH, NODES) for session in SESSIONS)
    assert len(pairs) == 8 * 7
    assert max(pairs.values()) < 1.6 * len(SESSIONS) / len(pairs)


def test_losing_a_node_moves_only_its_own_sessions() -> None:
    left = NODES[:-1]
    for session in SESSIONS[:2000]:
        before, after = ranked(session, NODES), ranked(session, left)
        assert after == [node for node in before if node in left]


def test_two_different_candidates_or_all_there_are() -> None:
    for session in SESSIONS[:200]:
        first, second = candidates(session, HASH, NODES)
        assert first != second
    assert candidates(SESSIONS[0], HASH, NODES[:1]) == (NODES[0],)
    assert candidates(SESSIONS[0], HASH, []) == ()


def test_without_a_session_the_first_new_block_decides() -> None:
    hashes = [BlockHash(CHANCE.randbytes(32)) for _ in range(400)]
    homes = Counter(candidates(NO_SESSION, hash, NODES)[0] for hash in hashes)
    assert len(homes) == len(NODES)
    assert len({candidates(SESSIONS[0], hash, NODES) for hash in hashes}) == 1


def test_block_placement_ignores_the_session_and_leaves_no_choice() -> None:
    hashes = [BlockHash(CHANCE.randbytes(32)) for _ in range(400)]
    for hash in hashes:
        places = {candidates(session, hash, NODES, "block") for session in SESSIONS[:3]}
        assert len(places) == 1 and len(places.pop()) == 1
    assert len({candidates(NO_SESSION, hash, NODES, "block") for hash in hashes}) == len(NODES)
