"""Score tables, and what the policies learn from turns."""

from __future__ import annotations

import random
from collections import OrderedDict
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.errors import ConfigError
from store_worker.policy import (
    ABSENT_MAX,
    LRU_TABLE,
    NUM_CLASSES,
    TIMES_MIN,
    TOKENS_MIN,
    TURNS_MAX,
    Ended,
    LruPolicy,
    ReturnPolicy,
    ScoreTable,
    Turn,
    class_of,
    make_policy,
)

SECOND = 1_000
A, B = class_of(1, 0), class_of(2, 0)


class Life:
    """Feeds a policy with conversations of two turns, in order of time."""

    def __init__(self) -> None:
        self.policy = ReturnPolicy()
        self._events: list[Turn | Ended] = []

    def once(self, cls: int, at: int) -> Life:
        self._events.append(Turn(at, cls))
        return self

    def twice(self, cls: int, at: int, gap: int, kept: float = 1.0, then: int = B) -> Life:
        self._events += [Turn(at, cls), Turn(at + gap, then, cls, gap, kept)]
        return self

    def fit(self, now: int) -> ScoreTable:
        for event in sorted(self._events, key=time_of):
            self.policy.observe(event)
        return self.policy.fit(now)


def time_of(event: Turn | Ended) -> int:
    return event.at_ms if isinstance(event, Turn) else event.last_use_ms


def test_classes_are_rows_of_times_used_and_columns_of_new_tokens() -> None:
    assert class_of(1, 0) == 0
    assert class_of(0, -5) == 0, "below the first bounds counts as them"
    assert class_of(TIMES_MIN[-1], TOKENS_MIN[-1]) == class_of(10**9, 10**9) == NUM_CLASSES - 1
    assert class_of(2, TOKENS_MIN[1] - 1) == len(TOKENS_MIN)
    assert class_of(2, TOKENS_MIN[1]) == len(TOKENS_MIN) + 1
    for times in range(12):
        for tokens in (0, 1, 2047, 2048, 9000, 1 << 20):
            assert LRU_TABLE.class_of(times, tokens) == class_of(times, tokens)


def test_a_score_is_that_of_the_bin_that_has_begun() -> None:
    table = ScoreTable((1,), (0,), (0, 100, 200), ((1.0, 3.0, 2.0),))
    assert [table.score(0, idle) for idle in (-7, 0, 99, 100, 199, 200, 10**12)] == [
        1.0, 1.0, 1.0, 3.0, 3.0, 2.0, 2.0,
    ]  # fmt: skip
    assert table.num_classes == 1


def test_a_table_travels() -> None:
    table = ReturnPolicy().fit(0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(table), type=ScoreTable) == table
    assert table.num_classes == NUM_CLASSES == LRU_TABLE.num_classes
    assert list(table.edges_ms) == sorted(set(table.edges_ms))
    assert table.edges_ms[0] == 0
    assert {len(row) for row in table.scores} == {len(table.edges_ms)}


def test_lru_learns_nothing_and_gives_every_leaf_the_same_score() -> None:
    policy = LruPolicy()
    policy.observe(Turn(1, A))
    assert policy.fit(10**6) == LRU_TABLE
    assert {score for row in LRU_TABLE.scores for score in row} == {0.0}


def test_without_experience_order_of_use_decides() -> None:
    table = ReturnPolicy().fit(0)
    assert len(set(table.scores)) == 1, "all classes are equal"
    row = table.scores[0]
    assert all(a >= b * (1 - 1e-9) for a, b in pairwise(row)), "idle is worse"
    assert row[0] > row[-1]


def test_what_returns_is_worth_more_than_what_does_not() -> None:
    life = Life()
    for i in range(200):
        life.twice(A, i * SECOND, 60 * SECOND).once(B, i * SECOND)
    table = life.fit(2_000 * SECOND)
    for idle in (0, 10 * SECOND, 40 * SECOND):
        assert table.score(A, idle) > 5 * table.score(B, idle)


def test_worth_rises_toward_the_time_of_return_and_falls_beyond_it() -> None:
    life = Life()
    for i in range(400):
        life.twice(A, i * SECOND, 60 * SECOND)
    table = life.fit(3_000 * SECOND)
    fresh, due, late = (table.score(A, s * SECOND) for s in (0, 40, 400))
    assert due > 1.5 * fresh
    assert late < fresh / 5


def test_an_absence_counts_for_as_long_as_it_has_lasted() -> None:
    """Censoring: the same turns, looked at soon and late."""

    def score(now: int) -> float:
        life = Life()
        for i in range(100):
            life.twice(A, i * 10, 30 * SECOND).once(A, i * 10)
        return life.fit(now).score(A, 0)

    assert score(32 * SECOND) > 1.2 * score(3_000 * SECOND)


def test_a_finished_conversation_is_neither_return_nor_absence() -> None:
    def score(ended: bool) -> float:
        life = Life()
        for i in range(100):
            life.twice(A, i * 10, 30 * SECOND).once(A, 5_000 + i)
            if ended:
                life._events.append(Ended(A, 5_000 + i))
        return life.fit(900 * SECOND).score(A, 0)

    only = Life()
    for i in range(100):
        only.twice(A, i * 10, 30 * SECOND)
    assert score(ended=True) == pytest.approx(only.fit(900 * SECOND).score(A, 0))
    assert score(ended=False) < 0.8 * score(ended=True)


def test_a_branch_is_a_part_of_a_return() -> None:
    def score(kept: float) -> float:
        life = Life()
        for i in range(300):
            life.twice(A, i * SECOND, 60 * SECOND, kept)
        return life.fit(2_000 * SECOND).score(A, 0)

    assert score(0.0) < score(0.5) < score(1.0)
    assert score(7.0) == score(1.0)


def test_a_return_to_a_chain_that_was_not_known_teaches_nothing() -> None:
    policy, other = ReturnPolicy(), ReturnPolicy()
    for i in range(50):
        policy.observe(Turn(100_000 + i, B, A, 60 * SECOND))
        other.observe(Turn(100_000 + i, B))
    policy.observe(Ended(A, 77))
    assert policy.fit(10**6) == other.fit(10**6)


def test_classes_of_another_shape_are_ignored() -> None:
    policy = ReturnPolicy()
    for cls in (-1, NUM_CLASSES, 10**6):
        policy.observe(Turn(1, cls))
        policy.observe(Turn(2, A, cls, 1))
        policy.observe(Ended(cls, 1))
    assert policy.fit(10**6).scores == only_once(A, 2, 3).fit(10**6).scores


def only_once(cls: int, at: int, times: int) -> ReturnPolicy:
    policy = ReturnPolicy()
    for _ in range(times):
        policy.observe(Turn(at, cls))
    return policy


def test_without_memory_the_score_is_the_rate_of_return() -> None:
    """Exponential gaps: the best horizon does not matter, the ratio is the rate at any idle time.

    An independent check of the index: nothing of how it is computed enters here.
    """
    chance = random.Random(1)
    mean = 120 * SECOND
    life = Life()
    for i in range(20_000):
        life.twice(A, i * 100, max(1, round(chance.expovariate(1 / mean))), then=B)
    table = life.fit(20_000 * 100 + 3_600 * SECOND)
    for idle in (0, 20 * SECOND, 60 * SECOND, 200 * SECOND):
        assert table.score(A, idle) == pytest.approx(1 / mean, rel=0.2)


def test_a_new_habit_replaces_an_old_one() -> None:
    policy = ReturnPolicy()
    now = 0

    def day(turns: int, gap: int, returns: bool) -> ScoreTable:
        nonlocal now
        for i in range(turns):
            now += 100
            policy.observe(Turn(now, A))
            if i % 10_000 == 0:
                policy.fit(now)
            if returns:
                policy.observe(Turn(now + 1, B, A, 1))
        now += gap
        return policy.fit(now)

    before = day(TURNS_MAX // 2, 600 * SECOND, returns=True).score(A, 0)
    after = day(2 * TURNS_MAX, 600 * SECOND, returns=False).score(A, 0)
    assert after < before / 5


def test_what_is_waited_for_is_bounded() -> None:
    policy = ReturnPolicy()
    for i in range(ABSENT_MAX + 5_000):
        policy.observe(Turn(i, A))
    assert policy.absent == ABSENT_MAX


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 10**9), st.integers(0, NUM_CLASSES - 1), st.booleans(), st.floats(0, 1)
        ),
        max_size=80,
    ),
    st.integers(0, 10**10),
)
def test_any_history_gives_a_usable_table(
    history: list[tuple[int, int, bool, float]], now: int
) -> None:
    policies = ReturnPolicy(), ReturnPolicy()
    last: OrderedDict[int, tuple[int, int]] = OrderedDict()
    for at, cls, returns, kept in sorted(history):
        event = Turn(at, cls)
        if returns and last:
            _, (since, previous) = last.popitem(last=False)
            event = Turn(at, cls, previous, at - since, kept)
        last[len(last)] = at, cls
        for policy in policies:
            policy.observe(event)
    table = policies[0].fit(now)
    assert table == policies[1].fit(now), "the same history, the same table"
    assert all(0 < score < 1 for row in table.scores for score in row)


def test_each_table_has_its_number() -> None:
    policy = ReturnPolicy()
    assert [policy.fit(0).serial, policy.fit(1).serial] == [1, 2]


class Mine:
    """Somebody's own policy."""

    def observe(self, event: Turn | Ended) -> None:
        pass

    def fit(self, now_ms: int) -> ScoreTable:
        return LRU_TABLE


def test_a_policy_is_found_by_name_or_by_its_class() -> None:
    assert isinstance(make_policy("lru"), LruPolicy)
    assert isinstance(make_policy("return"), ReturnPolicy)
    assert type(make_policy(f"{__name__}:Mine")).__name__ == "Mine"


@pytest.mark.parametrize("name", ["", "clock", "no_such_module:X", "json:NoClass", ":", "json:"])
def test_a_policy_that_is_not_there_is_a_config_error(name: str) -> None:
    with pytest.raises(ConfigError, match=r"lru, return or module:Class"):
        make_policy(name)
