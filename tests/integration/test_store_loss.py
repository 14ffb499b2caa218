"""Real servers that die, come back empty, hang, or were never there. Requests end with the right
text, hits resume by themselves, nothing is held."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from connector.clock import SystemClock
from tests.integration.conversation_kit import Fleet, Talk, some_tokens
from tests.servers import Server
from tests.waiting import eventually

# What an operator would leave at its default, made short: a test waits for these.
QUICK: dict[str, Any] = {
    "lookup_deadline_s": 0.5,
    "index_timeout_s": 0.5,
    "connect_timeout_s": 0.5,
    "load_deadline_s": 1.0,
    "save_deadline_s": 2.0,
}
RESUME_S = 20.0


class Stores:
    """An index and a data server, which may be one."""

    def __init__(self, index: Server, data: Server) -> None:
        self.index, self.data = index, data

    @property
    def config(self) -> Any:
        if self.index is self.data:
            return self.index.url
        return {"index": self.index.url, "data": self.data.url}


@pytest.fixture
def one() -> Iterator[Stores]:
    """One server for both."""
    with Server() as server:
        yield Stores(server, server)


@pytest.fixture
def two() -> Iterator[Stores]:
    """A server for each."""
    with Server() as index, Server() as data:
        yield Stores(index, data)


def hits_resume(fleet: Fleet, name: str) -> None:
    """Within a few seconds a new conversation finds its last turn on the other engine."""
    tries = iter(range(1000))

    def loaded() -> int:
        talk = Talk(fleet, f"{name}-{next(tries)}", 30)
        talk.turn(fleet.engines[0], must_hit=False)
        return talk.turn(fleet.engines[1], must_hit=False).loaded

    eventually(loaded, RESUME_S, "hits to resume", again_s=0.1)


def in_mid_run(fleet: Fleet, what: Callable[[], None], steps: int) -> list[Talk]:
    """Conversations take turns; `what` happens after some steps of the second one."""
    talks = [Talk(fleet, f"mid-{i}", 20 + i) for i in range(6)]
    for turn in range(3):
        for number, talk in enumerate(talks):
            talk.ask(fleet.engines[(number + turn) % 2], 12)
        if turn == 1:
            for shim in fleet.engines * steps:
                shim.step()
            what()
        fleet.run_all()
        for talk in talks:
            talk.settle(must_hit=False)
    return talks


@pytest.mark.parametrize("steps", [0, 1, 3, 6])
def test_killed_and_restarted_empty_in_mid_run(one: Stores, steps: int) -> None:
    with Fleet(one.config, **QUICK) as fleet:
        fleet.engine()
        fleet.engine()

        def restart() -> None:
            one.data.kill()
            one.data.start()

        in_mid_run(fleet, restart, steps)
        hits_resume(fleet, "after")


def test_away_for_a_while_with_the_model(one: Stores) -> None:
    """Turns before, during and after, each compared with a cold engine's."""
    with Fleet(one.config, pattern=False, **QUICK) as fleet:
        first, second = fleet.engine(), fleet.engine()
        talk = Talk(fleet, "s", 60)
        talk.turn(first)
        assert talk.turn(second).loaded >= 64
        one.data.kill()
        talk.turn(first, must_hit=False)
        talk.turn(second, must_hit=False)
        one.data.start()
        hits_resume(fleet, "back")


@pytest.mark.parametrize("which", ["index", "data"])
def test_only_one_of_them_comes_back_empty(two: Stores, which: str) -> None:
    server: Server = getattr(two, which)
    with Fleet(two.config, **QUICK) as fleet:
        fleet.engine()
        fleet.engine()
        talk = Talk(fleet, "before", 30)
        talk.turn(fleet.engines[0])

        def restart() -> None:
            server.kill()
            server.start()

        in_mid_run(fleet, restart, 2)
        hits_resume(fleet, "after")
        # What was stored before is gone: no wrong text, and stored again by the next turn.
        talk.turn(fleet.engines[1], must_hit=False)


@pytest.mark.parametrize(("which", "deadline_s"), [("index", 0.5), ("data", 2.5)])
def test_a_server_that_accepts_and_never_answers(
    two: Stores, which: str, deadline_s: float
) -> None:
    """Requests end within the deadline of a lookup or a load, and the scheduler never waits."""
    server: Server = getattr(two, which)
    clock = SystemClock()
    slow = {**QUICK, "index_timeout_s": 20.0, "load_deadline_s": 2.5}
    with Fleet(two.config, **slow) as fleet:
        writer, reader = fleet.engine(), fleet.engine()
        talk = Talk(fleet, "s", 30)
        for shim in (writer, reader, writer):  # all connections are open now
            talk.turn(shim)
        with stopped(server):
            answer = talk.ask(reader)
            slowest, begun = 0.0, clock.now()
            while not answer.finished:
                before = clock.now()
                reader.step()
                slowest = max(slowest, clock.now() - before)
                assert clock.now() - begun < 15.0, "the request hangs"
            took = clock.now() - begun
            # One deadline is waited for, not one per block, node or try.
            assert deadline_s * 0.8 <= took < 2 * deadline_s + 2.0
            assert slowest < 1.5, f"a step took {slowest:.2f} s"
            talk.settle(must_hit=False)
        reader.run_all()
        hits_resume(fleet, "after")


@contextlib.contextmanager
def stopped(server: Server) -> Iterator[None]:
    server.pause()
    try:
        yield
    finally:
        server.resume()


def test_aborted_while_its_lookup_is_pending(two: Stores) -> None:
    with Fleet(two.config) as fleet:
        shim = fleet.engine()
        talk = Talk(fleet, "s", 30)
        talk.turn(shim)
        with stopped(two.index):
            for number in range(3):
                shim.ask(f"gone-{number}", talk.history, 4, session="s")
                shim.step()
                assert shim.half.asked_again[f"gone-{number}"] > 0
                shim.abort(f"gone-{number}")
                shim.step()
            assert shim.held == 0
        shim.run_all()
        shim.assert_idle()
        assert not shim.loads()
        talk.turn(shim)


def test_a_store_that_was_never_there(one: Stores) -> None:
    """Engines start without it, serve, and find it when it comes."""
    one.data.kill()
    with Fleet(one.config, **QUICK) as fleet:
        first, second = fleet.engine(), fleet.engine()
        talk = Talk(fleet, "s", 20)
        talk.turn(first, must_hit=False)
        talk.turn(second, must_hit=False)
        one.data.start()
        hits_resume(fleet, "there")


def test_a_full_data_node_is_no_failure(two: Stores) -> None:
    """Full beside our own accounting: writes are refused, nothing else happens."""
    with Fleet(two.config, **QUICK) as fleet:
        first, second = fleet.engine(), fleet.engine()
        talk = Talk(fleet, "s", 30)
        talk.turn(first)
        with two.data.client() as client:
            used = int(client.info("memory")["used_memory"])
            client.config_set("maxmemory", used // 2)
        refused = Talk(fleet, "t", 30)
        refused.turn(first)
        assert fleet.listed(some_tokens("t/None", 30)) == 0
        assert first.counters()["store_full"] > 0
        # What is stored can still be read.
        assert talk.turn(second).loaded >= 28
        with two.data.client() as client:
            client.config_set("maxmemory", 256 << 20)
        hits_resume(fleet, "room")


