"""Time to first token in the shim: store hit, own prefix cache, recompute; and what hooks cost.

    .venv/bin/python -m tests.bench.bench_shim [--rounds 5] [--tokens 1000,4000,7000] [--json]

Sketch: the default model caches 8 KiB per token, so 7,000 tokens are 55 MiB: at 1 to 3 GB/s over a
unix socket 20 to 60 ms, against a recompute of seconds. All cases of one length in turns, round by
round, in an order that changes, on one engine in this process and a real server beside it.
"""

from __future__ import annotations

import argparse
import random
import threading
import time
from collections import defaultdict
from typing import Any

from connector.meta import StepMeta
from engine_shim.config import EngineConfig
from engine_shim.connector_port import Connector
from engine_shim.wiring import SchedulerHalf, WorkerHalf, parse_flag
from tests.bench.report import Row, show
from tests.integration.conversation_kit import Shim, some_tokens
from tests.servers import Server

WAIT_S = 0.001
"""What the engine process waits when a step brought nothing."""
_PAUSE = threading.Event()
CASES = ("recompute", "own prefix cache", "store")


class TimedScheduler:
    """A scheduler half, with the seconds spent in its hooks."""

    HOOKS = (
        "on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "build_step",
        "on_worker_reports", "request_finished",
    )  # fmt: skip

    def __init__(self, half: SchedulerHalf) -> None:
        self._half = half
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._half, name)
        if name not in self.HOOKS:
            return found

        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return found(*args)
            finally:
                self.seconds += time.perf_counter() - began

        return timed


class TimedWorker(WorkerHalf):
    """A worker half that remembers how long it kept the forward thread with each save."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.saves: list[float] = []

    def start_step(self, meta: object | None) -> None:
        self._saving = isinstance(meta, StepMeta) and bool(meta.saves)
        super().start_step(meta)

    def end_step(self) -> None:
        began = time.perf_counter()
        super().end_step()
        if self._saving:
            self.saves.append(time.perf_counter() - began)


def engine(url: str) -> tuple[Shim, TimedScheduler, TimedWorker]:
    """One engine with the default model and room for the longest prompt."""
    flag = {
        "kv_connector": "SessionKVConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"store": url},
    }
    config = EngineConfig(num_blocks=1200, kv_transfer_config=flag)
    parsed = parse_flag(flag)
    scheduler: Any = TimedScheduler(SchedulerHalf(parsed, config))
    worker = TimedWorker(parsed, config, 0)
    return Shim(config, False, Connector(scheduler, (worker,))), scheduler, worker


def first_token(shim: Shim, name: str, prompt: list[int], session: str | None) -> float:
    """Seconds from the request to its only token; saves are finished afterwards, untimed."""
    began = time.perf_counter()
    answer = shim.ask(name, prompt, 1, session=session)
    while not answer.finished:
        if not shim.step():
            _PAUSE.wait(WAIT_S)
    took = time.perf_counter() - began
    shim.run_all()
    return took


def measure(url: str, tokens: int, rounds: int, chance: random.Random) -> list[Row]:
    """All cases of one prompt length, in turns."""
    shim, scheduler, worker = engine(url)
    plain = Shim(EngineConfig(num_blocks=1200), False)
    prompt = some_tokens(f"bench {tokens}", tokens)
    for number in range(2):  # once more: what saves may hold at a time is bounded
        shim.core.reset_prefix_cache()
        first_token(shim, f"fill {number}", prompt, "bench")
    times: dict[str, list[float]] = defaultdict(list)
    hooks: list[float] = []
    for number in range(rounds):
        for case in chance.sample(CASES, len(CASES)):
            name = f"{case} {number}"
            for each in (shim, plain):
                each.core.reset_prefix_cache()
            if case == "own prefix cache":
                first_token(plain, f"warm {number}", prompt, None)
            scheduler.seconds = 0.0
            took = first_token(shim if case == "store" else plain, name, prompt, "bench")
            times[case].append(took * 1e3)
            if case == "store":
                hooks.append(scheduler.seconds * 1e3)
                loaded, full = shim.answers[name].loaded, (tokens - 1) // 16 * 16
                assert loaded == full, f"{loaded} of {full} tokens loaded, {scheduler.stats()}"
    rows = [Row(f"first token, {tokens} tokens", case, "ms", times[case]) for case in CASES]
    rows.append(Row(f"scheduler hooks, {tokens} tokens", "store", "ms per request", hooks))
    saves = [s * 1e3 for s in worker.saves]
    rows.append(Row(f"forward thread per save, {tokens} tokens", "store", "ms", saves))
    shim.core.shutdown()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", default="1000,4000,7000")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    chance, rows = random.Random(0), []
    with Server(memory="2gb") as server:
        for tokens in map(int, options.tokens.split(",")):
            rows += measure(server.url, tokens, options.rounds, chance)
    show(rows, options.json)


if __name__ == "__main__":
    main()
