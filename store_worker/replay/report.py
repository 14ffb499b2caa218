"""What a replay measures."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """One run. capacity_blocks: of all nodes together, split evenly. end_hints: share of the
    sessions whose last turn says that it is the last. lose: (node, seconds after the start)."""

    capacity_blocks: int
    nodes: int = 1
    placement: str = "session"
    policy: str = "return"
    tokens_per_block: int = 512
    end_hints: float = 0.0
    lose: tuple[int, float] | None = None
    seed: int = 0


class Spread(msgspec.Struct, frozen=True):
    """Nodes that one load touches, over the loads that hit."""

    mean: float
    p50: int
    p99: int


class Loss(msgspec.Struct, frozen=True):
    """Share of the hit blocks that could not have been loaded, with all that lies behind them, if
    one node had had no data at any load: over the nodes."""

    mean: float
    worst: float


class Lookups(msgspec.Struct, frozen=True):
    """exact_by_tip: lookups answered by one of the session's own boundaries. comparisons_mean:
    hashes compared per lookup, by the client and by the index. round_trips_mean: calls."""

    exact_by_tip: int
    comparisons_mean: float
    round_trips_mean: float


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One run's numbers. Blocks are whole prompt blocks.

    reusable_share: the hit rate of a store without a limit. blocks_behind_hole: the most found in
    walks over what the nodes held. blocks_declined: those that the policy, or want of room, did not
    let in. evicted: blocks that gave room; blocks freed by the end of a session are closed_blocks.
    stored_skew, read_skew: largest node over the mean, of blocks held (mean over the run) and of
    blocks read. seconds: that the run took.
    """

    setup: Setup
    requests: int
    sessions: int
    blocks_asked: int
    blocks_hit_usable: int
    usable_hit_rate: float
    reusable_share: float
    blocks_behind_hole: int
    blocks_written: int
    blocks_declined: int
    evicted: int
    closed_blocks: int
    copies_made: int
    nodes_per_load: Spread
    stored_skew: float
    read_skew: float
    hit_share_lost_on_node_loss: Loss
    lookups: Lookups
    stored_per_node: tuple[int, ...]
    read_per_node: tuple[int, ...]
    seconds: float


def spread(counts: dict[int, int]) -> Spread:
    """counts: nodes touched -> loads."""
    loads = sum(counts.values())
    if not loads:
        return Spread(0.0, 0, 0)
    mean = sum(nodes * n for nodes, n in counts.items()) / loads
    return Spread(mean, _quantile(counts, 0.5), _quantile(counts, 0.99))


def _quantile(counts: dict[int, int], q: float) -> int:
    left = q * sum(counts.values())
    for nodes, n in sorted(counts.items()):
        left -= n
        if left <= 0:
            return nodes
    return max(counts)


def loss(lost: Sequence[int], hit: int) -> Loss:
    """lost: blocks per node."""
    if not hit:
        return Loss(0.0, 0.0)
    return Loss(sum(lost) / len(lost) / hit, max(lost) / hit)
