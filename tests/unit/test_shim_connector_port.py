"""What the engine promises a connector, with a small connector in memory and two ranks."""

from __future__ import annotations

import random

import pytest

from engine_shim.connector_port import MatchResult, WorkerReport
from engine_shim.engine import EngineCore
from engine_shim.errors import ConnectorContractError
from engine_shim.protocol import FinishReason
from engine_shim.request import RequestStatus
from engine_shim.scheduler_output import ReportMerger
from tests.shim_kit import (
    Driver,
    Faults,
    PatternRunner,
    ToyConnector,
    expected_tokens,
    request,
    small_config,
)

MODES = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])


def prompt_of(length: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(32, 127) for _ in range(length)]


class World:
    """An engine with a toy connector, whose own cache is empty and whose store has one turn."""

    def __init__(self, async_scheduling: bool = False, stored: int = 40, **changes: object) -> None:
        config = small_config(tp_size=2, async_scheduling=async_scheduling, **changes)
        self.faults = Faults()
        self.connector = ToyConnector(config, self.faults)
        self.runner = PatternRunner(config)
        self.driver = Driver(EngineCore(config, self.connector.bundle(), self.runner))
        self.prompt = prompt_of(stored)
        self.driver.add(request("seed", self.prompt, 2))
        self.driver.run()
        assert self.driver.core.reset_prefix_cache()
        self.connector.log.clear()

    def ask(self, name: str = "a", extra: int = 3, tokens: int = 8):  # type: ignore[no-untyped-def]
        self.turn = self.prompt + prompt_of(extra, 9)
        return self.driver.add(request(name, self.turn, tokens))

    def calls(self, kind: str) -> list[tuple[object, ...]]:
        return [entry for entry in self.connector.log if entry[0] == kind]


@MODES
def test_async_load(async_scheduling: bool) -> None:
    world = World(async_scheduling)
    world.faults.load_steps = 3
    outcome = world.ask()
    world.driver.step()
    waiting = world.driver.core.scheduler.requests["a"]
    assert waiting.status is RequestStatus.WAITING_FOR_REMOTE_KV
    assert world.driver.core.must_poll
    world.driver.run()
    assert outcome.tokens == expected_tokens(world.turn, 8)
    usage = outcome.last.usage
    assert (usage.local_cached_tokens, usage.external_cached_tokens) == (0, 40)
    # Only the blocks of the hit at first; then the full table and nothing to load.
    assert world.calls("alloc") == [("alloc", "a", 10, 40), ("alloc", "a", 11, 0)]
    assert len(world.calls("match")) == 1
    world.driver.assert_at_rest()


def test_loaded_blocks_are_in_the_prefix_cache() -> None:
    world = World()
    world.ask("a")
    world.driver.run()
    again = world.ask("b")
    world.driver.run()
    assert again.last.usage.local_cached_tokens == 40
    assert again.last.usage.external_cached_tokens == 0


def test_ask_again_lets_others_go_first() -> None:
    world = World()
    world.faults.ask_again = 5
    late = world.ask("late")
    other = world.driver.add(request("other", prompt_of(9, 4), 2))
    world.connector.asked["other"] = 99
    world.driver.step(2)
    assert other.last is not None and late.last is None
    world.driver.run()
    assert late.tokens == expected_tokens(world.turn, 8)
    assert late.last.usage.external_cached_tokens == 40
    assert len(world.calls("match")) == 6 + 1


def test_abort_while_asked_again() -> None:
    world = World()
    world.faults.ask_again = 1000
    outcome = world.ask()
    world.driver.step(3)
    world.driver.core.abort(["a"])
    world.driver.run()
    assert outcome.last.finish_reason is FinishReason.ABORT
    assert world.calls("finished") == [("finished", "a", True)]
    world.driver.assert_at_rest()


@MODES
@pytest.mark.parametrize("first_lost", [0, 1, 9])
def test_failed_blocks_are_computed(async_scheduling: bool, first_lost: int) -> None:
    world = World(async_scheduling)
    probe = world.driver.core.scheduler
    outcome = world.ask()
    world.faults.lost = {probe.requests["a"].block_hashes[first_lost]}
    world.driver.run()
    assert outcome.tokens == expected_tokens(world.turn, 8)
    assert outcome.last.usage.external_cached_tokens == 4 * first_lost
    # With nothing left the connector is asked again; it must remember what failed.
    assert len(world.calls("match")) == (2 if first_lost == 0 else 1)
    assert world.driver.core.stats()["failed_loads"] == 1
    world.driver.assert_at_rest()


@MODES
@pytest.mark.parametrize("first_lost", [None, 0, 5])
def test_synchronous_load(async_scheduling: bool, first_lost: int | None) -> None:
    world = World(async_scheduling)
    world.faults.synchronous = True
    outcome = world.ask()
    if first_lost is not None:
        hashes = world.driver.core.scheduler.requests["a"].block_hashes
        world.faults.lost = {hashes[first_lost]}
        # The pattern runner would see the lost block before the engine hears of it.
        world.runner.checking = False
    world.driver.run()
    assert outcome.tokens == expected_tokens(world.turn, 8)
    good = 40 if first_lost is None else 4 * first_lost
    assert outcome.last.usage.external_cached_tokens == good
    world.driver.assert_at_rest()


@MODES
def test_abort_during_a_load_keeps_the_blocks(async_scheduling: bool) -> None:
    world = World(async_scheduling)
    world.faults.load_steps = 4
    outcome = world.ask()
    world.driver.step()
    world.driver.core.abort(["a"])
    world.driver.step()
    assert outcome.last.finish_reason is FinishReason.ABORT
    held = world.driver.core.stats()
    assert held["num_blocks"] - held["free_blocks"] == 10  # type: ignore[operator]
    assert world.driver.core.must_poll
    world.driver.run()
    # What a dead request loaded is not trusted.
    assert world.driver.core.stats()["cached_blocks"] == 0
    world.driver.assert_at_rest()


@MODES
def test_saves_hold_their_blocks(async_scheduling: bool) -> None:
    world = World(async_scheduling, stored=20)
    world.faults.save_steps = 12
    outcome = world.driver.add(request("b", prompt_of(100, 2), 2))
    while outcome.last is None:
        world.driver.step()
    assert world.connector.has_pending_work()
    assert not world.driver.core.reset_prefix_cache()
    # Another request wants nearly all blocks; those of the save are not among them.
    third = world.driver.add(request("c", prompt_of(110, 3), 2))
    world.driver.run()
    assert third.tokens == expected_tokens(prompt_of(110, 3), 2)
    world.driver.assert_at_rest()
    assert world.driver.core.reset_prefix_cache()
    again = world.driver.add(request("d", prompt_of(100, 2), 2))
    world.driver.run()
    assert again.tokens == expected_tokens(prompt_of(100, 2), 2)
    assert again.last is not None and again.last.usage is not None
    assert again.last.usage.external_cached_tokens == 96


@MODES
def test_preempted_requests_load_again(async_scheduling: bool) -> None:
    world = World(async_scheduling, num_blocks=32)
    world.faults.load_steps = 2
    outcomes = {
        name: (world.driver.add(request(name, prompt_of(20, i), 60)), prompt_of(20, i))
        for i, name in enumerate("abcdef")
    }
    world.driver.run()
    assert world.driver.core.stats()["preemptions"] > 0  # type: ignore[operator]
    assert world.driver.core.stats()["external_loaded_tokens"] > 0  # type: ignore[operator]
    for outcome, prompt in outcomes.values():
        assert outcome.tokens == expected_tokens(prompt, 60)
    assert world.calls("preempted")
    assert len(world.calls("finished")) == 6
    world.driver.assert_at_rest()


def test_delayed_free() -> None:
    world = World()
    world.faults.delay_free_steps = 3
    outcome = world.ask()
    while outcome.last is None:
        world.driver.step()
    assert outcome.last.kv_transfer_params == {"tokens": len(world.turn) + 8}
    assert world.driver.core.stats()["free_blocks"] != world.driver.core.stats()["num_blocks"]
    world.driver.run()
    world.driver.assert_at_rest()


def test_close_session_and_reset_reach_the_connector() -> None:
    world = World()
    world.driver.core.close_session("s", "salt")
    assert world.connector.closed == [("s", "salt")]
    assert world.driver.core.reset_prefix_cache(reset_external=True)
    outcome = world.ask()
    world.driver.run()
    assert outcome.last.usage.external_cached_tokens == 0


def test_session_is_seen_by_the_connector() -> None:
    world = World()
    world.driver.add(request("a", prompt_of(9), session_id="conversation"))
    world.driver.run()
    assert world.connector.sessions_seen == {"seed": None, "a": "conversation"}


class TestBreaches:
    """A connector that breaks the contract is stopped, not obeyed."""

    @pytest.mark.parametrize(
        "promise",
        [
            MatchResult(5, True),
            MatchResult(-4, True),
            MatchResult(48, True),
            MatchResult(44, False),
        ],
        ids=["part of a block", "negative", "beyond the prompt", "nothing left to compute"],
    )
    def test_impossible_promise(self, promise: MatchResult) -> None:
        world = World()
        world.faults.promise = lambda request, local: promise
        world.ask(extra=4)
        with pytest.raises(ConnectorContractError, match="promised"):
            world.driver.step()

    def test_whole_prompt_may_be_loaded(self) -> None:
        world = World()
        world.faults.promise = lambda request, local: MatchResult(40 - local, True)
        outcome = world.ask(extra=0)
        world.driver.run()
        assert outcome.tokens == expected_tokens(world.prompt, 8)

    def test_end_of_a_load_never_issued(self) -> None:
        world = World()
        merged = ReportMerger(1).merge([WorkerReport(finished_loads=frozenset({"ghost"}))])
        with pytest.raises(ConnectorContractError, match="ghost"):
            for request_id in merged.finished_loads:
                world.driver.core.scheduler.load_ended(request_id)

    def test_two_reports_of_one_rank(self) -> None:
        merger = ReportMerger(2)
        report = WorkerReport(finished_loads=frozenset({"a"}))
        assert merger.merge([report, WorkerReport()]).finished_loads == []
        with pytest.raises(ConnectorContractError, match="twice"):
            merger.merge([report, WorkerReport()])

    def test_all_ranks_make_an_end(self) -> None:
        merger = ReportMerger(2)
        report = WorkerReport(finished_loads=frozenset({"a"}), failed_blocks=frozenset({3}))
        first = merger.merge([WorkerReport(), report])
        assert first.finished_loads == [] and first.failed_blocks == {3}
        assert merger.merge([report, WorkerReport()]).finished_loads == ["a"]
