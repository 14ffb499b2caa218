"""Requests lose their blocks while these are being saved, and get others."""

from __future__ import annotations

import threading
import zlib
from collections import Counter
from collections.abc import Sequence

import pytest

from tests.integration.conversation_kit import Answer, Fleet, Gate, Shim, some_tokens

MODES = pytest.mark.parametrize("mode", ["sync", "async"])


def slow(operation: str, keys: Sequence[bytes]) -> None:
    """A store whose writes take their time, each another."""
    if operation == "put":
        threading.Event().wait(zlib.crc32(keys[0]) % 40 / 1000)


def crowd(shim: Shim, count: int, prompt: int, reply: int) -> list[Answer]:
    """So many requests at once, two of each session."""
    return [
        shim.ask(f"r{i}", some_tokens(f"crowd-{i}", prompt + i), reply, session=f"s{i // 2}")
        for i in range(count)
    ]


@MODES
@pytest.mark.parametrize(("pattern", "share"), [(True, 0.25), (True, 1.0), (False, 0.25)])
def test_fault_37_a_small_pool_under_slow_saves(mode: str, share: float, pattern: bool) -> None:
    block = 4 if pattern else 16
    size = {"num_blocks": 20, "max_model_len": 20 * block}
    with Fleet(
        pattern=pattern,
        engine={"async_scheduling": mode == "async", **size},
        hold_share_max=share,
    ) as fleet:
        shim = fleet.engine()
        fleet.data.hook = slow
        answers = crowd(shim, 8, 3 * block, 6 * block if pattern else 2 * block)
        shim.run_all()
        for answer in answers:
            fleet.check(answer)
        assert shim.core.stats()["preemptions"], "the pool was never short"
        # What became visible is right: another engine reads it.
        fleet.data.hook = None
        other = fleet.engine({"num_blocks": 64})
        for answer in answers:
            more = other.answer(f"{answer.id}-more", [*answer.prompt, *answer.tokens], 2)
            fleet.check(more)


@MODES
@pytest.mark.parametrize("reply", [35, 58], ids=["enough", "short"])
def test_fault_01_a_preempted_requests_save_keeps_its_bytes(mode: str, reply: int) -> None:
    """Checksums are off: the bytes themselves have to be right. The other request needs what the
    preempted one has given up, or ("short") even what is being saved of it."""
    with Fleet(
        engine={"async_scheduling": mode == "async", "num_blocks": 20, "max_model_len": 80},
        checksums=False,
    ) as fleet:
        shim, reader = fleet.engine(), fleet.engine()
        with Gate(fleet.data, "put") as gate:
            first = shim.ask("first", some_tokens("first", 20), reply)
            victim = shim.ask("victim", some_tokens("victim", 25), 30, session="v")
            shim.run_until(gate.reached, "a save on its way")
            state = shim.core.scheduler.requests["victim"]
            shim.run_until(lambda: state.num_preemptions, "the newer request to be preempted")
            (save,) = [save for save in shim.saves() if save.request == "victim"]
            for _ in range(200):
                shim.step()
            assert first.finished == (reply == 35)
            pool = shim.core.scheduler.pool
            assert all(pool.refs(block) for block in save.blocks)
        shim.run_all()
        fleet.check(first)
        fleet.check(victim)
        again = reader.answer("again", victim.prompt, 2, session="v")
        fleet.check(again)
        assert again.loaded == 24


@MODES
def test_fault_02_every_job_of_an_id_settles_once(mode: str) -> None:
    """Preempted and resumed many times, with puts that end out of order."""
    with Fleet(
        engine={"async_scheduling": mode == "async", "num_blocks": 16, "max_model_len": 64},
        io_threads=3,
    ) as fleet:
        shim = fleet.engine()
        fleet.data.hook = slow
        answers = crowd(shim, 6, 12, 24)
        shim.run_all()
        for answer in answers:
            fleet.check(answer)
        assert shim.core.stats()["preemptions"] >= 3
        jobs = [job.job for job in (*shim.saves(), *shim.loads())]
        assert len(set(jobs)) == len(jobs)
        assert Counter(result.job for result in shim.half.results) == Counter(jobs)


@MODES
def test_a_request_that_needs_what_saves_hold_is_not_kept_waiting(mode: str) -> None:
    """The store hangs for longer than anybody would wait."""
    with Fleet(
        engine={"async_scheduling": mode == "async", "num_blocks": 16, "max_model_len": 64},
        hold_share_max=0.5,
        save_deadline_s=50.0,
    ) as fleet:
        shim = fleet.engine()
        with Gate(fleet.data, "put") as gate:
            first = shim.ask("first", some_tokens("first", 30), 2)
            shim.run_until(lambda: first.finished and gate.reached(), "a save that hangs")
            assert shim.held == 7
            second = shim.ask("second", some_tokens("second", 60), 4)
            shim.run_until(lambda: second.finished, "the request that needs the blocks", 20.0)
            fleet.check(second)
            assert shim.counters()["saves_gave_way"] >= 1
        shim.run_all()
        assert fleet.listed(first.prompt) == 0, "what may have been overwritten became visible"


@MODES
def test_loads_again_after_a_preemption(mode: str) -> None:
    """A preempted request finds its own prompt in the store when it comes back. The engine keeps
    nothing itself, and each request knows of its hit before it runs: so nothing depends on time."""
    with Fleet(
        engine={"async_scheduling": mode == "async", "num_blocks": 20, "max_model_len": 80}
    ) as fleet:
        writer = fleet.engine()
        for number in range(6):
            prompt = some_tokens(f"crowd-{number}", 16 + number)
            writer.answer(f"w{number}", prompt, 1, session=f"s{number // 2}")
        shim = fleet.engine({"enable_prefix_caching": False})
        answers = crowd(shim, 6, 16, 30)
        shim.run_all()
        for answer in answers:
            fleet.check(answer)
        assert shim.core.stats()["preemptions"]
        loads = Counter(load.request for load in shim.loads())
        assert max(loads.values()) > 1, f"nothing was loaded again: {loads}"
