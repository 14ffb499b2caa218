"""Many conversations at once, in pools that are too small for them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.conversation_kit import Fleet, Talk, some_tokens
from tests.servers import Server


def rounds(fleet: Fleet, talks: list[Talk], turns: int, reply: int, more: int) -> int:
    """Every conversation takes a turn at once, each round on other engines. Tokens that were not
    computed from the second round on."""
    cached = 0
    for turn in range(turns):
        for number, talk in enumerate(talks):
            talk.ask(fleet.engines[(number + turn) % len(fleet.engines)], reply)
        fleet.run_all()
        for talk in talks:
            answer = talk.settle(more, must_hit=False)
            cached += answer.cached if turn else 0
    return cached


def test_32_conversations_with_the_model() -> None:
    with Fleet(pattern=False, engine={"num_blocks": 60, "max_model_len": 20 * 16}) as fleet:
        fleet.engine()
        fleet.engine()
        system = some_tokens("system", 35)
        talks = [Talk(fleet, f"s{i}", 5 + i % 7, shared=system) for i in range(32)]
        cached = rounds(fleet, talks, 2, 9, 14)
        assert cached > 32 * 32, "hardly anything was found again"


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("kind", ["memory", "redis"])
def test_fault_12_64_sessions_in_tiny_pools(kind: str, mode: str) -> None:
    server = Server().start() if kind == "redis" else None
    try:
        store: Any = server.url if server is not None else None
        engine = {"async_scheduling": mode == "async", "num_blocks": 48, "max_model_len": 160}
        with Fleet(store, engine=engine, io_threads=2) as fleet:
            fleet.engine()
            fleet.engine()
            talks = [Talk(fleet, f"s{i}", 9 + i % 11) for i in range(64)]
            cached = rounds(fleet, talks, 3, 9, 7)
            assert cached > 64 * 16
            assert sum(len(shim.loads()) for shim in fleet.engines) > 40
            assert sum(int(shim.core.stats()["preemptions"]) for shim in fleet.engines) > 0  # type: ignore[call-overload]
    finally:
        if server is not None:
            server.stop()
