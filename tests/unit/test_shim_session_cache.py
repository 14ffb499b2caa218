"""Sessions in the engine's prefix cache: tags, closing, generations."""

from __future__ import annotations

import random

import pytest

from engine_shim.protocol import FinishReason
from engine_shim.session_cache import LEAVES_MAX
from tests.shim_kit import Driver, expected_tokens, pattern_engine, request, small_config


def prompt_of(length: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(32, 127) for _ in range(length)]


@pytest.fixture
def driver() -> Driver:
    return Driver(pattern_engine(small_config(enable_session_cache=True)))


def turn(driver: Driver, name: str, prompt: list[int], session: str | None, **more: object):  # type: ignore[no-untyped-def]
    outcome = driver.add(request(name, prompt, 5, session, **more))  # type: ignore[arg-type]
    driver.run()
    return outcome


def cached(driver: Driver, prompt: list[int]) -> int:
    """Tokens a prompt would find."""
    probe = turn(driver, f"probe{len(driver.outcomes)}", prompt, None)
    return probe.last.usage.local_cached_tokens


def test_close_frees_the_sessions_own_blocks(driver: Driver) -> None:
    turn(driver, "a", prompt_of(20), "s")
    turn(driver, "b", prompt_of(20, 1), "other")
    result = driver.core.close_session("s")
    # 20 + 5 tokens, the last without KV: 6 whole blocks.
    assert (result.existed, result.freed_tokens, result.pending) == (True, 24, False)
    assert driver.core.stats()["cached_blocks"] == 6
    assert cached(driver, prompt_of(20)) == 0
    assert cached(driver, prompt_of(20, 1)) == 16
    assert driver.core.check_integrity() == []


def test_close_of_an_unknown_session(driver: Driver) -> None:
    assert not driver.core.close_session("nobody").existed


def test_turns_of_a_conversation_have_one_leaf(driver: Driver) -> None:
    prompt = prompt_of(20)
    for index in range(4):
        outcome = turn(driver, f"t{index}", prompt, "s")
        prompt = prompt + outcome.tokens + prompt_of(3, index)
    session = driver.core.scheduler.sessions.session("s", None)
    assert session is not None and len(session.leaves) == 1
    freed = driver.core.close_session("s").freed_tokens
    assert freed == (len(prompt) - 3 - 1) // 4 * 4
    assert driver.core.stats()["cached_blocks"] == 0


def test_shared_prefix_stays_for_the_other_session(driver: Driver) -> None:
    system = prompt_of(16)
    turn(driver, "a", system + prompt_of(8, 1), "one")
    turn(driver, "b", system + prompt_of(8, 2), "two")
    freed = driver.core.close_session("one").freed_tokens
    assert freed == 28 - 16
    assert cached(driver, system + prompt_of(8, 2)) == 20
    assert driver.core.close_session("two").freed_tokens == 28
    assert driver.core.check_integrity() == []


def test_chain_that_another_one_extends_stays(driver: Driver) -> None:
    first = turn(driver, "a", prompt_of(20), "s")
    longer = prompt_of(20) + first.tokens + prompt_of(8, 3)
    turn(driver, "b", longer, None)
    assert driver.core.close_session("s").freed_tokens == 0
    assert cached(driver, longer) == 32


def test_close_during_a_turn(driver: Driver) -> None:
    first = turn(driver, "a", prompt_of(20), "s")
    second = driver.add(request("b", prompt_of(20) + first.tokens, 9, "s"))
    driver.step(2)
    result = driver.core.close_session("s")
    assert (result.existed, result.freed_tokens, result.pending) == (True, 0, True)
    assert driver.core.stats()["session_blocks"] == 6
    driver.run()
    assert second.last is not None and second.last.finish_reason is FinishReason.LENGTH
    assert second.tokens == expected_tokens(prompt_of(20) + first.tokens, 9)
    # The late turn tags nothing, and everything of the session goes with its end.
    stats = driver.core.stats()
    assert (stats["session_blocks"], stats["cached_blocks"], stats["open_sessions"]) == (0, 0, 0)


def test_reopened_session_has_a_new_generation(driver: Driver) -> None:
    late = driver.add(request("a", prompt_of(20), 30, "s"))
    driver.step(2)
    old = driver.core.scheduler.sessions.session("s", None)
    driver.core.close_session("s")
    turn_two = driver.add(request("b", prompt_of(12, 7), 5, "s"))
    driver.step(1)
    new = driver.core.scheduler.sessions.session("s", None)
    assert old is not None and new is not None and new.generation > old.generation
    driver.run()
    assert late.last is not None and turn_two.last is not None
    # The old generation's turn ended last and left nothing; the new one's blocks are tagged.
    assert not old.leaves and len(new.leaves) == 1
    assert driver.core.stats()["cached_blocks"] == 4
    assert driver.core.close_session("s").freed_tokens == 16


def test_aborted_turn_tags_nothing(driver: Driver) -> None:
    driver.add(request("a", prompt_of(20), 50, "s"))
    driver.step(4)
    driver.core.abort(["a"])
    driver.run()
    assert driver.core.stats()["session_blocks"] == 0
    assert driver.core.stats()["open_sessions"] == 0


def test_salt_is_part_of_the_name(driver: Driver) -> None:
    turn(driver, "a", prompt_of(20), "s", cache_salt="one")
    assert not driver.core.close_session("s").existed
    assert not driver.core.close_session("s", "two").existed
    assert driver.core.close_session("s", "one").freed_tokens == 24


def test_sessions_blocks_are_reused_last(driver: Driver) -> None:
    turn(driver, "old", prompt_of(40), "s")
    for index in range(5):
        turn(driver, f"x{index}", prompt_of(60, 10 + index), None)
    assert driver.core.stats()["evicted_blocks"] > 0  # type: ignore[operator]
    assert cached(driver, prompt_of(40)) == 36


def test_session_survives_the_eviction_of_its_leaf() -> None:
    config = small_config(enable_session_cache=True, num_blocks=32)
    driver = Driver(pattern_engine(config))
    turn(driver, "old", prompt_of(40), "s")
    turn(driver, "big", prompt_of(100, 1), "t")
    session = driver.core.scheduler.sessions.session("s", None)
    assert session is not None and len(session.leaves) == 1
    (leaf,) = session.leaves
    assert leaf.depth < 11
    assert driver.core.check_integrity() == []
    assert driver.core.close_session("s").freed_tokens == leaf.depth * 4


def test_a_session_that_lost_everything_is_forgotten() -> None:
    config = small_config(enable_session_cache=True, num_blocks=32)
    driver = Driver(pattern_engine(config))
    turn(driver, "old", prompt_of(20), "s")
    turn(driver, "big", prompt_of(124, 1), None)
    assert driver.core.stats()["open_sessions"] == 0
    assert not driver.core.close_session("s").existed


def test_leaves_are_limited(driver: Driver) -> None:
    sessions = driver.core.scheduler.sessions
    pool = driver.core.scheduler.pool
    assert pool.num_blocks >= LEAVES_MAX  # one block each
    for index in range(LEAVES_MAX + 10):
        message = request(f"r{index}", prompt_of(4, index), 1, "s")
        driver.add(message)
        driver.run()
    session = sessions.session("s", None)
    assert session is not None and len(session.leaves) <= LEAVES_MAX
    assert driver.core.check_integrity() == []


def test_children_share_the_session(driver: Driver) -> None:
    prompt = prompt_of(21)
    for index in range(3):
        message = request(f"{index}_a", prompt, 5 + index, "s")
        driver.add(message)
    driver.run()
    session = driver.core.scheduler.sessions.session("s", None)
    assert session is not None and session.running == 0
    assert driver.core.close_session("s").freed_tokens == driver.core.scheduler.pool.block_size * 6
    assert driver.core.stats()["cached_blocks"] == 0


def test_disabled_tags_nothing() -> None:
    driver = Driver(pattern_engine(small_config()))
    turn(driver, "a", prompt_of(20), "s")
    stats = driver.core.stats()
    assert (stats["session_blocks"], stats["open_sessions"]) == (0, 0)
    assert not driver.core.close_session("s").existed
    assert driver.core.stats()["cached_blocks"] == 6


def test_reset_forgets_tags_and_sessions(driver: Driver) -> None:
    turn(driver, "a", prompt_of(20), "s")
    assert driver.core.reset_prefix_cache()
    assert driver.core.stats()["open_sessions"] == 0
    assert driver.core.check_integrity() == []
