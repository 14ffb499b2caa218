"""The engine core without a connector: batching, prefix cache, preemption, ends, input."""

from __future__ import annotations

import random

import pytest

from engine_shim.protocol import FinishReason
from engine_shim.request import RequestStatus
from engine_shim.scheduler_output import MergedReports
from tests.shim_kit import Driver, expected_tokens, pattern_engine, request, small_config

MODES = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])


def prompt_of(length: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(32, 127) for _ in range(length)]


@MODES
@pytest.mark.parametrize("length", [1, 3, 4, 5, 31, 32, 33, 100])
def test_one_request(async_scheduling: bool, length: int) -> None:
    driver = Driver(pattern_engine(small_config(async_scheduling=async_scheduling)))
    prompt = prompt_of(length)
    outcome = driver.add(request("a", prompt, 9))
    driver.run()
    assert outcome.tokens == expected_tokens(prompt, 9)
    assert outcome.last is not None and outcome.last.finish_reason is FinishReason.LENGTH
    assert outcome.last.usage is not None
    assert outcome.last.usage.prompt_tokens == length
    assert outcome.last.usage.output_tokens == 9
    assert outcome.outputs[0].usage is not None and outcome.outputs[1].usage is None
    driver.assert_at_rest()


@MODES
def test_many_requests_share_steps(async_scheduling: bool) -> None:
    driver = Driver(
        pattern_engine(small_config(async_scheduling=async_scheduling, num_blocks=256))
    )
    prompts = {f"r{i}": prompt_of(5 + 7 * i, i) for i in range(12)}
    for name, prompt in prompts.items():
        driver.add(request(name, prompt, 6))
    driver.step()
    assert len(driver.core.scheduler.running) > 1
    driver.run()
    for name, prompt in prompts.items():
        assert driver.outcomes[name].tokens == expected_tokens(prompt, 6)
    driver.assert_at_rest()


def test_step_keeps_to_the_token_budget() -> None:
    core = pattern_engine(small_config(max_num_batched_tokens=10))
    core.add_request(request("a", prompt_of(35)))
    core.add_request(request("b", prompt_of(8, 1)))
    sizes = []
    for _ in range(5):
        output, _ = core.scheduler.schedule()
        sizes.append(output.num_tokens)
        core.scheduler.update(output, core.runner.execute(output.work()), MergedReports())
    # a alone, three times; its last 5 beside 5 of b; then one new token of a and 3 of b.
    assert sizes == [10, 10, 10, 10, 4]


def test_running_requests_are_limited() -> None:
    driver = Driver(pattern_engine(small_config(max_num_seqs=2)))
    for i in range(5):
        driver.add(request(f"r{i}", prompt_of(4, i)))
    most = 0
    while driver.core.has_work:
        driver.step()
        most = max(most, len(driver.core.scheduler.running))
    assert most == 2
    assert all(outcome.last is not None for outcome in driver.outcomes.values())


@MODES
def test_prefix_is_found_again(async_scheduling: bool) -> None:
    driver = Driver(pattern_engine(small_config(async_scheduling=async_scheduling)))
    prompt = prompt_of(30)
    first = driver.add(request("a", prompt, 8))
    driver.run()
    turn = prompt + first.tokens + prompt_of(10, 5)
    second = driver.add(request("b", turn, 8))
    driver.run()
    assert second.tokens == expected_tokens(turn, 8)
    usage = second.last.usage  # type: ignore[union-attr]
    # The last sampled token has no KV: floor((30 + 8 - 1) / 4) whole blocks.
    assert usage is not None and usage.local_cached_tokens == 36
    assert usage.external_cached_tokens == 0


def test_full_hit_leaves_a_token_to_compute() -> None:
    driver = Driver(pattern_engine(small_config()))
    prompt = prompt_of(32)
    driver.add(request("a", prompt, 8))
    driver.run()
    again = driver.add(request("b", prompt, 8))
    driver.run()
    assert again.tokens == expected_tokens(prompt, 8)
    assert again.last.usage.local_cached_tokens == 28  # type: ignore[union-attr]


def test_salt_separates() -> None:
    driver = Driver(pattern_engine(small_config()))
    prompt = prompt_of(32)
    driver.add(request("a", prompt, cache_salt="one"))
    driver.run()
    other = driver.add(request("b", prompt, cache_salt="two"))
    same = driver.add(request("c", prompt, cache_salt="one"))
    driver.run()
    assert other.last.usage.local_cached_tokens == 0  # type: ignore[union-attr]
    assert same.last.usage.local_cached_tokens == 28  # type: ignore[union-attr]


def test_caching_off() -> None:
    driver = Driver(pattern_engine(small_config(enable_prefix_caching=False)))
    prompt = prompt_of(32)
    for name in ("a", "b"):
        driver.add(request(name, prompt))
        driver.run()
    assert driver.outcomes["b"].last.usage.local_cached_tokens == 0  # type: ignore[union-attr]
    assert driver.core.stats()["cached_blocks"] == 0


@MODES
def test_preempted_requests_answer_the_same(async_scheduling: bool) -> None:
    config = small_config(num_blocks=32, async_scheduling=async_scheduling)
    driver = Driver(pattern_engine(config))
    prompts = {f"r{i}": prompt_of(20, i) for i in range(8)}
    for name, prompt in prompts.items():
        driver.add(request(name, prompt, 40))
    driver.run()
    assert driver.core.stats()["preemptions"] > 0
    for name, prompt in prompts.items():
        assert driver.outcomes[name].tokens == expected_tokens(prompt, 40)
    driver.assert_at_rest()


def test_the_newest_is_preempted() -> None:
    driver = Driver(pattern_engine(small_config(num_blocks=32)))
    for i in range(4):
        driver.add(request(f"r{i}", prompt_of(24, i), 40))
    while not driver.core.stats()["preemptions"]:
        driver.step()
    waiting = driver.core.scheduler.waiting
    assert [r.request_id for r in waiting if r.status is RequestStatus.PREEMPTED] == ["r3"]


@MODES
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4])
def test_abort_at_any_point(async_scheduling: bool, steps: int) -> None:
    driver = Driver(pattern_engine(small_config(async_scheduling=async_scheduling)))
    prompt = prompt_of(50)
    gone = driver.add(request("a", prompt, 30))
    kept = driver.add(request("b", prompt_of(9, 1), 30))
    driver.step(steps)
    driver.core.abort(["a", "nobody"])
    driver.run()
    assert gone.last is not None and gone.last.finish_reason is FinishReason.ABORT
    assert gone.tokens == expected_tokens(prompt, len(gone.tokens))
    assert kept.tokens == expected_tokens(prompt_of(9, 1), 30)
    driver.assert_at_rest()


def test_abort_of_a_client() -> None:
    driver = Driver(pattern_engine(small_config()))
    driver.core.add_request(request("a", prompt_of(9)), b"one")
    driver.core.add_request(request("b", prompt_of(9, 1)), b"two")
    driver.core.abort_client(b"one")
    driver.run()
    assert driver.outcomes["a"].last.finish_reason is FinishReason.ABORT  # type: ignore[union-attr]
    assert driver.outcomes["b"].last.finish_reason is FinishReason.LENGTH  # type: ignore[union-attr]


def test_stop_token_and_length_of_the_context() -> None:
    driver = Driver(pattern_engine(small_config()))
    prompt = prompt_of(10)
    answer = expected_tokens(prompt, 20)
    message = request("a", prompt, 20)
    assert message.sampling_params is not None
    message.sampling_params.stop_token_ids = [answer[5]]
    stopped = driver.add(message)
    long = driver.add(request("b", prompt_of(120), 100))
    driver.run()
    assert stopped.tokens == answer[: answer.index(answer[5]) + 1]
    assert stopped.last.finish_reason is FinishReason.STOP  # type: ignore[union-attr]
    assert stopped.last.stop_reason == answer[5]  # type: ignore[union-attr]
    assert len(long.tokens) == 8  # 128 - 120
    assert long.last.finish_reason is FinishReason.LENGTH  # type: ignore[union-attr]


@MODES
def test_resumable_request_goes_on_with_new_input(async_scheduling: bool) -> None:
    driver = Driver(pattern_engine(small_config(async_scheduling=async_scheduling)))
    first, second = prompt_of(10), prompt_of(7, 1)
    outcome = driver.add(_piece("a", first))
    driver.run()
    assert outcome.tokens == expected_tokens(first, 5) and outcome.last is None
    assert outcome.outputs[-1].awaiting_input
    driver.add(_piece("a", second))
    driver.run()
    # The last token of an answer is replaced by the next input.
    whole = first + outcome.tokens[:4] + second
    assert outcome.tokens[5:] == expected_tokens(whole, 5)
    driver.add(_piece("a", [0], resumable=False))
    driver.run()
    assert outcome.last is not None and outcome.last.finish_reason is FinishReason.LENGTH
    driver.assert_at_rest()


@MODES
def test_resumable_input_that_waits_is_taken_in_order(async_scheduling: bool) -> None:
    driver = Driver(pattern_engine(small_config(async_scheduling=async_scheduling)))
    pieces = [prompt_of(6, i) for i in range(3)]
    for piece in pieces:
        outcome = driver.add(_piece("a", piece))
    driver.add(_piece("a", [0], resumable=False))
    driver.run()
    known: list[int] = []
    for index, piece in enumerate(pieces):
        known = known + piece
        answer = expected_tokens(known, 5)
        assert outcome.tokens[5 * index : 5 * index + 5] == answer
        known += answer[:4]
    assert outcome.last is not None
    driver.assert_at_rest()


def test_resumable_request_gives_its_blocks_up_under_pressure() -> None:
    driver = Driver(pattern_engine(small_config(num_blocks=32)))
    outcome = driver.add(_piece("a", prompt_of(60)))
    driver.run()
    driver.add(request("b", prompt_of(100, 1), 20))
    driver.run()
    assert driver.core.stats()["preemptions"] == 1
    driver.add(_piece("a", prompt_of(8, 2)))
    driver.run()
    whole = prompt_of(60) + outcome.tokens[:4] + prompt_of(8, 2)
    assert outcome.tokens[5:] == expected_tokens(whole, 5)
    driver.core.abort(["a"])
    driver.run()
    driver.assert_at_rest()


def _piece(name: str, tokens: list[int], resumable: bool = True):  # type: ignore[no-untyped-def]
    message = request(name, tokens, 5)
    message.resumable = resumable
    return message


def test_refusals_are_outputs_of_the_request() -> None:
    driver = Driver(pattern_engine(small_config(max_num_queued=2)))
    driver.add(request("a", prompt_of(9)))
    for message, why in (
        (request("a", prompt_of(9)), "running"),
        (request("b", prompt_of(500)), "context"),
        (request("c", [9999]), "vocabulary"),
        (request("d", []), "empty"),
    ):
        outputs = Driver(driver.core)
        if message.request_id == "a":
            driver.core.add_request(message, b"other")
            refused = [o for c, o in driver.core.scheduler.take_outputs() if c == b"other"]
        else:
            driver.core.add_request(message)
            refused = [o for _, o in driver.core.scheduler.take_outputs()]
        assert outputs.outcomes == {}
        assert refused[0].finish_reason is FinishReason.ERROR
        assert refused[0].error is not None and why in refused[0].error
    driver.add(request("e", prompt_of(9, 3)))
    full = driver.add(request("f", prompt_of(9, 4)))
    driver.run()
    assert full.last is not None and full.last.error is not None and "try later" in full.last.error


def test_reset_prefix_cache() -> None:
    driver = Driver(pattern_engine(small_config()))
    prompt = prompt_of(32)
    driver.add(request("a", prompt))
    driver.step()
    assert not driver.core.reset_prefix_cache()
    driver.run()
    assert driver.core.reset_prefix_cache()
    again = driver.add(request("b", prompt))
    driver.run()
    assert again.last.usage.local_cached_tokens == 0  # type: ignore[union-attr]


def test_abort_immediately() -> None:
    driver = Driver(pattern_engine(small_config()))
    message = request("a", prompt_of(9))
    message.abort_immediately = True
    outcome = driver.add(message)
    driver.run()
    assert outcome.last is not None and outcome.last.finish_reason is FinishReason.ABORT
    assert not outcome.tokens
    driver.assert_at_rest()
