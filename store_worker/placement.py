"""Where new blocks go: rendezvous hashing over the data nodes.

Each node's score for a key depends on that node and the key alone, so adding or losing a node moves
only the keys that it wins or had. Pure functions; any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import xxhash

from connector.ids import BlockHash, NodeId, SessionKey

CANDIDATES = 2


def ranked(key: bytes, nodes: Sequence[NodeId]) -> list[NodeId]:
    """All nodes, best first. The order of `nodes` does not matter."""
    return sorted(nodes, key=lambda node: (-_score(key, node), node))


def _score(key: bytes, node: NodeId) -> int:
    # The node enters as the seed: names that share a prefix must not have related scores.
    return xxhash.xxh3_64_intdigest(key, seed=xxhash.xxh3_64_intdigest(node.encode()))


def candidates(
    session: SessionKey,
    first_new: BlockHash,
    nodes: Sequence[NodeId],
    placement: Literal["session", "block"] = "session",
) -> tuple[NodeId, ...]:
    """Up to two nodes, best first, between which the index chooses a home.

    Without a session a run is placed by the hash of its first *new* block, never by the chain's
    first block, which all share. `block`: always by that hash, and one node, so that the index has
    no choice (the control policy: use it with runs of one block).
    """
    if placement == "block":
        return tuple(ranked(first_new, nodes)[:1])
    return tuple(ranked(session or first_new, nodes)[:CANDIDATES])
