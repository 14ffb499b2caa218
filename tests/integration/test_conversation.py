"""A conversation moves between engines: the same text, and nothing that is stored is computed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.conversation_kit import Fleet, Talk, some_tokens
from tests.servers import Server


@pytest.fixture(params=["memory", "redis"])
def store(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A store of each kind, empty; None: a memory store."""
    if request.param == "memory":
        yield None
    else:
        with Server() as server:
            yield server.url


def fleet_of(store: Any, pattern: bool, tp: int, async_scheduling: bool) -> Fleet:
    return Fleet(store, pattern, tp, {"async_scheduling": async_scheduling})


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("pattern", [False, True], ids=["model", "pattern"])
def test_alternating_turns(store: Any, pattern: bool, tp: int, async_scheduling: bool) -> None:
    with fleet_of(store, pattern, tp, async_scheduling) as fleet:
        engines = [fleet.engine(), fleet.engine()]
        talk = Talk(fleet, "s", 5 * fleet.engine_config().block_size + 3)
        for turn in range(5):
            shim = engines[turn % 2]
            before = shim.counters().get("load_bytes", 0)
            answer = talk.turn(shim)
            moved = shim.counters().get("load_bytes", 0) - before
            assert moved == answer.loaded // shim.block * fleet.payload_bytes()
        assert talk.turns[1].loaded >= 5 * shim.block and talk.turns[1].usage.local_cached_tokens == 0
        assert fleet.listed(talk.history[:-11]) == (len(talk.history) - 12) // shim.block
