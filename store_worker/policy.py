"""Which stored conversations are worth their space: the score table and the policies that fit it.

The index reads a `ScoreTable` and nothing else; a policy is Python that watches `Turn`s and
publishes tables. Pure: no I/O, no clock. One owner thread per policy; a table is frozen.

What the index does with a table. A leaf's class is `table.class_of(times_used, new_tokens)`, fixed
when its chain was last used. Victim: among both ends of every class list (in order of use) the
leaf with the lowest `table.score(class, idle_ms)`, the least recently used where scores are equal.
A save of class c is worth `table.score(c, 0)`; it is declined only where every possible victim
scores strictly more.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol

import msgspec

TIMES_MIN = (1, 2, 3, 4, 6, 9)
TOKENS_MIN = (0, 1024, 2048, 4096, 8192, 16384, 32768)
NUM_CLASSES = len(TIMES_MIN) * len(TOKENS_MIN)
TABLE_VERSION = 1


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """A chain was used. The index logs one per turn, in order of time.

    at_ms: when. cls: the class it has from now on.
    previous: the class it had until now, -1 if it was not known; gap_ms: since that use.
    kept: the share (0..1) of the blocks of that use, past the shared part, that this turn has
    again: a branch takes only some of them.
    """

    at_ms: int
    cls: int
    previous: int = -1
    gap_ms: int = 0
    kept: float = 1.0


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """A chain of class `cls`, last used at `last_use_ms`, will not be used again: it is neither a
    return nor an absence."""

    cls: int
    last_use_ms: int


class ScoreTable(msgspec.Struct, frozen=True, array_like=True):
    """What the index reads: class × idle bin.

    times_min, tokens_min: ascending lower bounds of the two parts of a class; the class of
    (i-th times, j-th tokens) is i * len(tokens_min) + j. Values below the first bound count as it.
    edges_ms: ascending lower edges of the idle bins, the first is 0.
    scores: [class][bin], expected hits per block and millisecond of residence; only their order
    matters. version: of the format. serial: counts the tables a policy has published.
    """

    times_min: tuple[int, ...]
    tokens_min: tuple[int, ...]
    edges_ms: tuple[int, ...]
    scores: tuple[tuple[float, ...], ...]
    version: int = TABLE_VERSION
    serial: int = 0

    @property
    def num_classes(self) -> int:
        return len(self.times_min) * len(self.tokens_min)

    def class_of(self, times_used: int, new_tokens: int) -> int:
        """times_used: turns through the chain's first non-shared block, this one included; of a
        chain that is wholly shared, any large number. new_tokens: of the last turn's prompt, past
        what the turn before had (past the shared part in a first turn)."""
        times = max(0, bisect_right(self.times_min, times_used) - 1)
        tokens = max(0, bisect_right(self.tokens_min, new_tokens) - 1)
        return times * len(self.tokens_min) + tokens

    def score(self, cls: int, idle_ms: int) -> float:
        """A negative idle time (clocks differ) counts as 0."""
        return self.scores[cls][max(0, bisect_right(self.edges_ms, idle_ms) - 1)]


def class_of(times_used: int, new_tokens: int) -> int:
    """The class in the default classes (`TIMES_MIN` × `TOKENS_MIN`)."""
    times = max(0, bisect_right(TIMES_MIN, times_used) - 1)
    tokens = max(0, bisect_right(TOKENS_MIN, new_tokens) - 1)
    return times * len(TOKENS_MIN) + tokens


LRU_TABLE = ScoreTable(times_min=(1,), tokens_min=(0,), edges_ms=(0,), scores=((0.0,),))
"""One class, one bin: every score is equal, so order of use decides and no save is declined."""


class Policy(Protocol):
    """Watches turns, publishes tables."""

    def observe(self, event: Turn | Ended) -> None:
        """Learn from one event. Events come in order of time; constant work."""

    def fit(self, now_ms: int) -> ScoreTable:
        """The table to publish now."""


class LruPolicy:
    """Least recently used, from the leaf upward. Learns nothing, declines nothing."""

    def observe(self, event: Turn | Ended) -> None:
        pass

    def fit(self, now_ms: int) -> ScoreTable:
        return LRU_TABLE


BIN_FIRST_MS, BIN_LAST_MS = 8_000, 65_536_000
STEPS_PER_BIN = 4
OUTSTANDING_MAX = 65_536
RETURNS_MAX = 20_000
PRIOR_RETURNS = 8.0
PRIOR_RATE = 0.3
PRIOR_FLAT_MS = 30_000.0


def _doubling(first: int, last: int, steps: int) -> tuple[int, ...]:
    count = steps * round(math.log2(last / first))
    return (0, *(round(first * 2 ** (k / steps)) for k in range(count + 1)))


class ReturnPolicy:
    """Keep what will come back soonest for its space: a Gittins index of the return gap.

    Per class and idle bin the hazard of a return is counted, absences included as exposure
    (censoring). A class's hazards are drawn to those of its times-used row, the row's to all, and
    all to a prior that falls with idle time, under which the policy is LRU. The score at an idle
    time is the best ratio, over horizons, of the chance to return by then to the expected
    residence until then.
    """

    def __init__(self) -> None:
        self._bins = _doubling(BIN_FIRST_MS, BIN_LAST_MS, 1)
        self._edges = _doubling(BIN_FIRST_MS // 4, BIN_LAST_MS, STEPS_PER_BIN)
        self._returns = [[0.0] * len(self._bins) for _ in range(NUM_CLASSES)]
        self._exposure_ms = [[0.0] * len(self._bins) for _ in range(NUM_CLASSES)]
        # (class, last use) -> chains; insertion order is order of time.
        self._absent: dict[tuple[int, int], int] = {}
        self._serial = 0

    def observe(self, event: Turn | Ended) -> None:
        if isinstance(event, Ended):
            self._leave(event.cls, event.last_use_ms)
            return
        if event.previous >= 0 and self._leave(event.previous, event.at_ms - event.gap_ms):
            reached = _expose(self._exposure_ms[event.previous], self._bins, event.gap_ms)
            self._returns[event.previous][reached] += event.kept
        key = (event.cls, event.at_ms)
        self._absent[key] = self._absent.get(key, 0) + 1
        if len(self._absent) > OUTSTANDING_MAX:
            (cls, start_ms), chains = next(iter(self._absent.items()))
            del self._absent[cls, start_ms]
            _expose(self._exposure_ms[cls], self._bins, event.at_ms - start_ms, chains)

    def _leave(self, cls: int, last_use_ms: int) -> bool:
        """Whether that chain was known to be absent; forgets it."""
        left = self._absent.pop((cls, last_use_ms), 0)
        if left > 1:
            self._absent[cls, last_use_ms] = left - 1
        return left > 0

    def fit(self, now_ms: int) -> ScoreTable:
        """A few milliseconds per thousand absent chains."""
        exposure = [list(row) for row in self._exposure_ms]
        for (cls, start_ms), chains in self._absent.items():
            _expose(exposure[cls], self._bins, max(0, now_ms - start_ms), chains)
        self._serial += 1
        scores = tuple(_gittins(self._edges, self._spread(row)) for row in self._hazards(exposure))
        return ScoreTable(TIMES_MIN, TOKENS_MIN, self._edges, scores, serial=self._serial)

    def _hazards(self, exposure: list[list[float]]) -> list[list[float]]:
        """Per class and bin, returns per millisecond."""
        bins = self._bins
        prior = [PRIOR_RATE / max(1.5 * edge, PRIOR_FLAT_MS) for edge in bins]
        everything = _posterior(_sum(self._returns), _sum(exposure), prior, bins)
        rows: list[list[float]] = []
        for first in range(0, NUM_CLASSES, len(TOKENS_MIN)):
            part = range(first, first + len(TOKENS_MIN))
            row = _posterior(
                _sum([self._returns[c] for c in part]),
                _sum([exposure[c] for c in part]),
                everything,
                bins,
            )
            rows += [_posterior(self._returns[c], exposure[c], row, bins) for c in part]
        return rows

    def _spread(self, hazards: Sequence[float]) -> list[float]:
        """Hazards of the fit bins on the finer bins of the table."""
        return [hazards[bisect_right(self._bins, edge) - 1] for edge in self._edges]


def _widths(edges: Sequence[int]) -> list[float]:
    return [float(b - a) for a, b in zip(edges, [*edges[1:], 2 * edges[-1]], strict=True)]


def _expose(row: list[float], bins: Sequence[int], gap_ms: int, chains: int = 1) -> int:
    """Add a stay of gap_ms to the bins it passed; the bin that it ended in."""
    last = bisect_right(bins, gap_ms) - 1
    for k in range(last):
        row[k] += chains * (bins[k + 1] - bins[k])
    row[last] += chains * (gap_ms - bins[last])
    return last


def _sum(rows: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) for column in zip(*rows, strict=True)]


def _posterior(
    returns: Sequence[float], exposure: Sequence[float], prior: Sequence[float], bins: Sequence[int]
) -> list[float]:
    """Hazards drawn to `prior`, which counts as PRIOR_RETURNS chains that passed each bin."""
    weights = [PRIOR_RETURNS * width for width in _widths(bins)]
    return [
        (r + p * w) / (x + w) for r, x, p, w in zip(returns, exposure, prior, weights, strict=True)
    ]


def _gittins(edges: Sequence[int], hazards: Sequence[float]) -> tuple[float, ...]:
    """Per bin, the best over later horizons of P(return by then) / expected residence."""
    stay = [math.exp(-h * w) for h, w in zip(hazards, _widths(edges), strict=True)]
    scores: list[float] = []
    for first in range(len(edges)):
        absent, residence_ms, best = 1.0, 0.0, 0.0
        for k in range(first, len(edges)):
            residence_ms += absent * (1.0 - stay[k]) / hazards[k]
            absent *= stay[k]
            best = max(best, (1.0 - absent) / residence_ms)
        scores.append(best)
    return tuple(scores)


POLICIES: dict[str, type[LruPolicy] | type[ReturnPolicy]] = {
    "lru": LruPolicy,
    "return": ReturnPolicy,
}
