"""A conversation moves between engines: the same text, and nothing that is stored is computed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from engine_shim.protocol import FinishReason
from tests.integration.conversation_kit import Fleet, Gate, Talk, need, some_tokens
from tests.servers import Server
from tests.shim_kit import request
from tests.waiting import eventually


@pytest.fixture(params=["memory", "redis"])
def store(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A store of each kind, empty; None: a memory store."""
    if request.param == "memory":
        yield None
    else:
        with Server() as server:
            yield server.url


MODES = pytest.mark.parametrize("mode", ["sync", "async"])


def test_what_a_turn_must_not_compute() -> None:
    # 20 and 5 tokens leave 24 with KV: 6 blocks of 4, as far as one token of the prompt is left.
    assert [need(4, 20, 5, prompt) for prompt in (24, 25, 26, 100)] == [20, 24, 24, 24]
    assert need(4, 20, 4, 100) == 20


@MODES
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", ["model", "pattern"])
def test_alternating_turns(store: Any, kind: str, tp: int, mode: str) -> None:
    with Fleet(store, kind == "pattern", tp, {"async_scheduling": mode == "async"}) as fleet:
        engines = [fleet.engine(), fleet.engine()]
        talk = Talk(fleet, "s", 5 * fleet.engine_config().block_size + 3)
        for turn in range(5):
            shim = engines[turn % 2]
            before = shim.counters().get("load_bytes", 0)
            answer = talk.turn(shim)
            moved = shim.counters().get("load_bytes", 0) - before
            assert moved == answer.loaded // shim.block * fleet.payload_bytes()
        second = talk.turns[1]
        assert second.usage.local_cached_tokens == 0 and second.loaded >= 5 * shim.block
        assert fleet.listed(talk.history[:-11]) == (len(talk.history) - 12) // shim.block


@pytest.mark.parametrize("kind", ["model", "pattern"])
def test_the_engine_that_has_lost_its_own_cache_loads(kind: str) -> None:
    with Fleet(pattern=kind == "pattern") as fleet:
        shim = fleet.engine()
        talk = Talk(fleet, "s", 70)
        talk.turn(shim)
        assert shim.core.reset_prefix_cache()
        again = talk.turn(shim)
        assert again.loaded >= 64 and again.usage.local_cached_tokens == 0


def test_what_the_engine_has_is_not_loaded() -> None:
    with Fleet() as fleet:
        one, other = fleet.engine(), fleet.engine()
        talk = Talk(fleet, "s", 40)
        talk.turn(one)
        talk.turn(other)
        third = talk.turn(one)
        assert third.usage.local_cached_tokens >= 40
        # Only what the other engine has added comes from the store.
        assert [load.hashes[0] for load in one.loads()] == [fleet.chain(third.prompt)[12]]


def test_the_session_id_may_change_or_be_missing_between_turns(store: Any) -> None:
    with Fleet(store) as fleet:
        engines = [fleet.engine() for _ in range(3)]
        talk = Talk(fleet, None, 30)
        for turn, session in enumerate((None, "a", "b", None, "a", "a")):
            talk.session = session
            talk.turn(engines[turn % 3])
        assert sum(shim.counters().get("lookups{by=hit_shared}", 0) for shim in engines) >= 3


def test_others_prompts_are_found_without_a_session(store: Any) -> None:
    system = some_tokens("system", 41)
    with Fleet(store) as fleet:
        writer, reader = fleet.engine(), fleet.engine()
        Talk(fleet, "one", 9, shared=system).turn(writer)
        other = Talk(fleet, "two", 9, shared=system).turn(reader)
        assert other.loaded == 40


def test_fault_22_another_salt_reads_nothing(store: Any) -> None:
    with Fleet(store) as fleet:
        writer, reader = fleet.engine(), fleet.engine()
        talk = Talk(fleet, "s", 41, salt="tenant-a")
        talk.turn(writer)
        history = talk.history
        for number, salt in enumerate((None, "tenant-b", "tenant-a")):
            answer = reader.answer(f"r{number}", history, session="s", salt=salt)
            fleet.check(answer)
            # Equal tokens under another salt are found neither in the store nor in the engine.
            assert (answer.cached > 0) == (salt == "tenant-a")


@MODES
def test_a_template_that_rewrites_the_last_turn(store: Any, mode: str) -> None:
    """Reasoning is stripped from earlier turns: the prompt is found up to the last prompt's end,
    by the session's own boundaries."""
    with Fleet(store, engine={"async_scheduling": mode == "async"}) as fleet:
        engines = [fleet.engine(), fleet.engine()]
        kept, before = some_tokens("rewritten", 43), 0
        for turn in range(4):
            answer = engines[turn % 2].answer(f"t{turn}", kept, 25, session="s")
            fleet.check(answer)
            assert answer.cached == before // fleet.engine_config().block_size * 4
            before = len(kept)
            kept = kept + answer.tokens[17:] + some_tokens(f"more-{turn}", 9)
        assert sum(shim.counters().get("lookups{by=hit_tip}", 0) for shim in engines) == 3


@pytest.mark.parametrize("blocks", [1, 2, 7, 12])
@MODES
def test_fault_06_53_a_full_hit_leaves_one_token(blocks: int, mode: str) -> None:
    with Fleet(engine={"async_scheduling": mode == "async"}) as fleet:
        writer, reader = fleet.engine(), fleet.engine()
        prompt = some_tokens("exact", blocks * reader.block)
        writer.answer("w", prompt, 4, session="s")
        assert fleet.listed(prompt) == blocks
        answer = reader.answer("r", prompt, 4, session="s")
        fleet.check(answer)
        assert answer.cached == (blocks - 1) * reader.block
        # One number on both sides: the job covers what was promised, and nothing more.
        assert [len(load.blocks) for load in reader.loads()] == [blocks - 1] * (blocks > 1)


def test_fault_10_promises_are_whole_blocks() -> None:
    with Fleet() as fleet:
        writer, reader = fleet.engine(), fleet.engine()
        whole = some_tokens("lengths", 33)
        writer.answer("w", whole, 2, session="s")
        for length in range(1, 4 * reader.block + 2):
            assert reader.core.reset_prefix_cache()
            answer = reader.answer(f"r{length}", whole[:length], 3, session="s")
            fleet.check(answer)
            assert answer.loaded == (length - 1) // reader.block * reader.block


def test_a_prompt_that_fills_the_pool(store: Any) -> None:
    with Fleet(store) as fleet:
        writer = fleet.engine()
        reader = fleet.engine({"num_blocks": 16, "max_model_len": 64})
        prompt = some_tokens("long", 63)
        writer.answer("w", prompt, 1, session="s")
        answer = reader.answer("r", prompt, 1, session="s")
        fleet.check(answer)
        assert answer.loaded == 60
        refused = reader.answer("x", [*prompt, 40], 1, session="s")
        assert refused.last is not None and refused.last.finish_reason is FinishReason.ERROR
        assert "64" in str(refused.last.error)
        fleet.check(reader.answer("y", prompt[:50], 5, session="s"))


def test_one_request_id_again_and_again() -> None:
    """The next request of an id comes while the last one's saves are still on their way."""
    with Fleet() as fleet:
        shim, other = fleet.engine(), fleet.engine()
        prompts = [some_tokens(f"same-id-{turn}", 25 + turn) for turn in range(4)]
        with Gate(fleet.data, "put") as gate:
            for prompt in prompts:
                answer = shim.ask("same", prompt, 6, session="s")
                shim.run_until(lambda answer=answer: answer.finished, "the answer")  # type: ignore[misc]
                fleet.check(answer)
            assert gate.reached() and shim.counters()["open_jobs"]
        shim.run_all()
        for number, prompt in enumerate(prompts):
            answer = other.answer(f"o{number}", prompt, 6, session="s")
            fleet.check(answer)
            assert answer.loaded == (len(prompt) - 1) // 4 * 4


def test_a_live_request_id_is_not_taken_over() -> None:
    with Fleet() as fleet:
        shim = fleet.engine()
        first = shim.ask("id", some_tokens("first", 20), 8, session="s")
        shim.step()
        (refused,) = shim.refuse(request("id", some_tokens("second", 20), session_id="s"))
        assert "is running" in str(refused.error)
        shim.run_all()
        fleet.check(first)


def test_closing_a_session_in_mid_turn(store: Any) -> None:
    with Fleet(store) as fleet:
        shim, other = fleet.engine(), fleet.engine()
        prompt = some_tokens("closed", 20)
        answer = shim.ask("a", prompt, 40, session="s")
        shim.run_until(lambda: len(answer.tokens) > 12, "some of the answer")
        shim.core.close_session("s")
        shim.run_until(lambda: shim.counters().get("sessions_closed"), "the close")
        there = fleet.listed(prompt + answer.tokens)
        shim.run_all()
        fleet.check(answer)
        # What a save hangs from at that moment may stay for a while; nothing is added to it.
        assert fleet.listed(prompt + answer.tokens) <= there, "it became visible after the close"
        after = other.answer("b", prompt + answer.tokens, 4, session="s")
        fleet.check(after)
        assert after.loaded <= there * other.block


def test_a_closed_conversation_is_gone() -> None:
    with Fleet(load_deadline_s=1.0) as fleet:
        shim, other = fleet.engine(), fleet.engine()
        talk = Talk(fleet, "s", 30)
        talk.turn(shim)
        talk.turn(other)
        other.core.close_session("s")
        other.run_until(lambda: other.counters().get("sessions_closed"), "the close")
        # A lease that a lookup has taken ends within the load's deadline and a margin.
        eventually(lambda: fleet.listed(talk.history) == 0, 20.0, "its blocks to be freed")
        assert shim.core.reset_prefix_cache() and other.core.reset_prefix_cache()
        assert talk.turn(shim, must_hit=False).loaded == 0


@pytest.mark.parametrize("by", ["itself", "another"])
def test_a_save_that_is_late_for_its_session_never_becomes_visible(by: str) -> None:
    with Fleet() as fleet:
        shim, other = fleet.engine(), fleet.engine()
        prompt = some_tokens("late", 30)
        with Gate(fleet.data, "put") as gate:
            answer = shim.ask("a", prompt, 4, session="s")
            shim.run_until(lambda: answer.finished and gate.reached(), "a save on its way")
            closer = shim if by == "itself" else other
            closer.core.close_session("s")
            other.run_all()
            if by == "itself":
                shim.run_until(lambda: shim.counters().get("sessions_closed"), "the close")
        fleet.run_all()
        assert fleet.listed(prompt) == 0
        assert shim.saves() and shim.counters().get("tokens_saved", 0) == 0
        # The next turn begins a new life of the session.
        shim.answer("b", prompt, 4, session="s")
        assert other.answer("c", prompt, 4, session="s").loaded == 28


@MODES
def test_a_reset_of_the_prefix_cache_in_mid_save(mode: str) -> None:
    with Fleet(engine={"async_scheduling": mode == "async"}) as fleet:
        shim = fleet.engine(hold_share_max=0.25)
        prompt = some_tokens("reset", 40)
        with Gate(fleet.data, "put") as gate:
            answer = shim.ask("a", prompt, 4, session="s")
            shim.run_until(lambda: answer.finished and gate.reached(), "a save on its way")
            assert shim.held > 0
            assert shim.core.reset_prefix_cache(), "the save's references are in the way"
            assert shim.held == 0
            # What the save is reading is overwritten by others, so it must not be committed.
            for number in range(3):
                other = shim.ask(f"o{number}", some_tokens(f"other-{number}", 120), 4)
                shim.run_until(lambda other=other: other.finished, "the others")  # type: ignore[misc]
                fleet.check(other)
        shim.run_all()
        assert fleet.listed(prompt) == 0
        again = shim.answer("b", prompt, 4, session="s")
        fleet.check(again)
        assert again.cached == 0 and fleet.listed(prompt) == 10
