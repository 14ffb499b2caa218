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

import importlib
import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from connector.errors import ConfigError

TIMES_MIN = (1, 2, 4, 7)
TOKENS_MIN = (0, 2048, 8192, 32768)
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


LRU_TABLE = ScoreTable(TIMES_MIN, TOKENS_MIN, (0,), ((0.0,),) * NUM_CLASSES)
"""Every score is equal, so order of use decides and no save is declined. It has the default
classes, so that a store with blocks in it can change its policy."""


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
"""Idle bins double from 8 s to 18 h; what is absent for longer is counted up to there."""
STEPS_PER_BIN = 4
"""Finer bins of the published table, between which hazards are interpolated."""
FIT_INTERVAL_MS = 30_000
"""How often to publish: a table is a few milliseconds of work."""
ABSENT_MAX = 65_536
TURNS_MAX = 50_000
"""What was learnt is halved when it is worth more turns than this, so that habits may change."""
PRIOR_CHAINS = 16.0
"""What a wider class's hazards count for in a narrower one: so many chains that passed each bin."""
PRIOR_RETURNS = 8.0
"""What "as often as the wider class" counts for: so many returns."""
PRIOR_RATE, PRIOR_FLAT_MS = 0.3, 30_000.0
"""Prior hazard: 0.3 / idle time, flat below 30 s. Falling and equal for all: it is LRU."""


class ReturnPolicy:
    """Keep what will come back soonest for its space: a Gittins index of the return gap.

    A turn that finds a chain again is a return after a gap; a chain that is still absent is a gap
    that has not ended (censored): both add to the time at risk of the idle bins they passed, and
    hazard = returns / time at risk, a branch that takes only a part of the blocks again counting as
    that part of a return. The hazards of all chains start from a prior that is LRU; those of a
    times-used row start from all chains', times the row's rate; those of a class from its row's,
    times the rate of its new-tokens column and its own. The score at an idle time is the best
    ratio, over horizons, of P(returns by then) to the expected residence until then: exactly what
    one block of space earns per millisecond if it is given up at the best moment.
    """

    def __init__(self) -> None:
        self._bins = _doubling(BIN_FIRST_MS, BIN_LAST_MS, 1)
        self._edges = _doubling(BIN_FIRST_MS // 4, BIN_LAST_MS, STEPS_PER_BIN)
        self._returns = [[0.0] * len(self._bins) for _ in range(NUM_CLASSES)]
        self._at_risk_ms = [[0.0] * len(self._bins) for _ in range(NUM_CLASSES)]
        self._turns = 0.0
        # (class, last use) -> chains. An OrderedDict, since its oldest item goes in constant time.
        self._absent: OrderedDict[tuple[int, int], int] = OrderedDict()
        self._serial = 0

    def observe(self, event: Turn | Ended) -> None:
        """See Policy. Classes that the default table does not have are ignored."""
        if not 0 <= event.cls < NUM_CLASSES:
            return
        if isinstance(event, Ended):
            self._take(event.cls, event.last_use_ms)
            return
        if event.previous >= 0 and self._take(event.previous, event.at_ms - event.gap_ms):
            ended_in = _pass(self._at_risk_ms[event.previous], self._bins, event.gap_ms)
            self._returns[event.previous][ended_in] += min(1.0, max(0.0, event.kept))
        key = (event.cls, event.at_ms)
        self._absent[key] = self._absent.get(key, 0) + 1
        self._turns += 1
        if len(self._absent) > ABSENT_MAX:
            (cls, since_ms), chains = self._absent.popitem(last=False)
            _pass(self._at_risk_ms[cls], self._bins, event.at_ms - since_ms, chains)

    @property
    def absent(self) -> int:
        """Uses whose chains are waited for: at most ABSENT_MAX."""
        return len(self._absent)

    def _take(self, cls: int, last_use_ms: int) -> bool:
        """One chain of those is absent no more; False if none was known."""
        left = self._absent.pop((cls, last_use_ms), 0)
        if left > 1:
            self._absent[cls, last_use_ms] = left - 1
        return left > 0

    def fit(self, now_ms: int) -> ScoreTable:
        """See Policy."""
        waiting: list[list[int]] = [[] for _ in range(NUM_CLASSES)]
        for (cls, since_ms), chains in self._absent.items():
            waiting[cls] += [since_ms] * chains
        at_risk = [
            _with_waiting(row, self._bins, sorted(since), now_ms)
            for row, since in zip(self._at_risk_ms, waiting, strict=True)
        ]
        hazards = _class_hazards(self._returns, at_risk, self._bins)
        scores = tuple(
            _gittins(self._edges, _interpolate(self._bins, row, self._edges)) for row in hazards
        )
        if self._turns > TURNS_MAX:
            self._turns /= 2
            for row in (*self._returns, *self._at_risk_ms):
                row[:] = [value / 2 for value in row]
        self._serial += 1
        return ScoreTable(TIMES_MIN, TOKENS_MIN, self._edges, scores, serial=self._serial)


def _doubling(first: int, last: int, steps: int) -> tuple[int, ...]:
    count = steps * round(math.log2(last / first))
    return (0, *(round(first * 2 ** (k / steps)) for k in range(count + 1)))


def _widths(edges: Sequence[int]) -> list[float]:
    """The last bin is open: it counts as wide as its lower edge."""
    return [float(b - a) for a, b in zip(edges, (*edges[1:], 2 * edges[-1]), strict=True)]


def _pass(row: list[float], bins: Sequence[int], gap_ms: int, chains: int = 1) -> int:
    """Add the time that `chains` spent in each bin during a gap; the bin in which it ends."""
    gap_ms = min(max(0, gap_ms), 2 * bins[-1])
    last = bisect_right(bins, gap_ms) - 1
    for k in range(last):
        row[k] += chains * (bins[k + 1] - bins[k])
    row[last] += chains * (gap_ms - bins[last])
    return last


def _with_waiting(
    row: Sequence[float], bins: Sequence[int], since_ms: Sequence[int], now_ms: int
) -> list[float]:
    """`row` and what `_pass` would add for absences since those times (ascending) until now, whole
    bins at a time."""
    total = list(row)
    for k, (low, width) in enumerate(zip(bins, _widths(bins), strict=True)):
        passed = bisect_right(since_ms, now_ms - low - width)
        entered = bisect_right(since_ms, now_ms - low)
        inside = (entered - passed) * (now_ms - low) - sum(since_ms[passed:entered])
        total[k] += passed * width + inside
    return total


def _columns(rows: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) for column in zip(*rows, strict=True)]


def _rate(returns: Sequence[float], at_risk: Sequence[float], expected: Sequence[float]) -> float:
    """How many times more often than `expected` hazards say, drawn to 1."""
    awaited = sum(h * x for h, x in zip(expected, at_risk, strict=True))
    return (sum(returns) + PRIOR_RETURNS) / (awaited + PRIOR_RETURNS)


def _drawn(
    returns: Sequence[float], at_risk: Sequence[float], prior: Sequence[float], bins: Sequence[int]
) -> list[float]:
    """Hazards per bin, drawn to `prior`."""
    weights = [PRIOR_CHAINS * width for width in _widths(bins)]
    return [
        (r + h * w) / (x + w) for r, x, h, w in zip(returns, at_risk, prior, weights, strict=True)
    ]


def _class_hazards(
    returns: Sequence[Sequence[float]], at_risk: Sequence[Sequence[float]], bins: Sequence[int]
) -> list[list[float]]:
    """Returns per millisecond, [class][bin]: all, then rows, then columns, then classes."""
    columns = len(TOKENS_MIN)
    prior = [PRIOR_RATE / max(1.5 * edge, PRIOR_FLAT_MS) for edge in bins]
    overall = _drawn(_columns(returns), _columns(at_risk), prior, bins)
    rows: list[list[float]] = []
    for first in range(0, NUM_CLASSES, columns):
        seen = _columns(returns[first : first + columns])
        risk = _columns(at_risk[first : first + columns])
        rate = _rate(seen, risk, overall)
        rows.append(_drawn(seen, risk, [rate * h for h in overall], bins))
    rates: list[float] = []
    for column in range(columns):
        part = range(column, NUM_CLASSES, columns)
        seen = [sum(returns[c]) for c in part]
        awaited = [
            sum(h * x for h, x in zip(rows[c // columns], at_risk[c], strict=True)) for c in part
        ]
        rates.append((sum(seen) + PRIOR_RETURNS) / (sum(awaited) + PRIOR_RETURNS))
    hazards: list[list[float]] = []
    for cls in range(NUM_CLASSES):
        expected = [rates[cls % columns] * h for h in rows[cls // columns]]
        rate = _rate(returns[cls], at_risk[cls], expected)
        hazards.append(_drawn(returns[cls], at_risk[cls], [rate * h for h in expected], bins))
    return hazards


def _interpolate(
    bins: Sequence[int], hazards: Sequence[float], edges: Sequence[int]
) -> list[float]:
    """Hazards of the finer bins, log-log linear between the middles of the wide ones."""
    middles = [math.log(bins[1] / 2), *(math.log(edge * math.sqrt(2)) for edge in bins[1:])]
    levels = [math.log(h) for h in hazards]
    fine: list[float] = []
    for edge, width in zip(edges, _widths(edges), strict=True):
        at = math.log(edge + width / 2)
        k = bisect_right(middles, at)
        if k in (0, len(middles)):
            fine.append(hazards[max(0, k - 1)])
            continue
        share = (at - middles[k - 1]) / (middles[k] - middles[k - 1])
        fine.append(math.exp(levels[k - 1] * (1 - share) + levels[k] * share))
    return fine


def _gittins(edges: Sequence[int], hazards: Sequence[float]) -> tuple[float, ...]:
    """Per bin, the best over later horizons of P(return by then) / expected residence."""
    stay = [math.exp(-h * w) for h, w in zip(hazards, _widths(edges), strict=True)]
    time = [(1.0 - q) / h for q, h in zip(stay, hazards, strict=True)]
    scores: list[float] = []
    for first in range(len(edges)):
        absent, residence_ms, best = 1.0, 0.0, 0.0
        for k in range(first, len(edges)):
            residence_ms += absent * time[k]
            absent *= stay[k]
            ratio = (1.0 - absent) / residence_ms
            if ratio > best:
                best = ratio
        scores.append(best)
    return tuple(scores)


POLICIES: dict[str, Callable[[], Policy]] = {"lru": LruPolicy, "return": ReturnPolicy}


def make_policy(name: str) -> Policy:
    """A policy by its name, or, as `module:Class`, one of somebody else's; it is called without
    arguments. Raises ConfigError."""
    if name in POLICIES:
        return POLICIES[name]()
    module, _, attribute = name.partition(":")
    try:
        made: Policy = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        known = f"{', '.join(POLICIES)} or module:Class"
        raise ConfigError("policy", name, known, str(error)) from error
    return made
