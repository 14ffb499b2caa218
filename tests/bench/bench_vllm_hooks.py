"""What our connector costs vLLM's scheduler per request, and its worker per step.

    .venv-vllm/bin/python -m tests.bench.bench_vllm_hooks [--rounds 5] [--json]

vLLM's own Scheduler with our connector in both roles and a real server; each hook is timed where
vLLM calls it. Sketch: a lookup is posted and polled, so a request should cost microseconds per
hook plus a few per block for the copies of hash and block lists; a step's saves cost a queue put.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from tests.bench.report import Row, show
from tests.servers import Server
from tests.vllm.scheduler_kit import Engine, prompt
from tests.vllm.servers import transfer_config

SCHEDULER_HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "has_pending_push_work",
    "get_kv_connector_stats",
)
WORKER_HOOKS = (
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_save",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "get_kv_connector_stats",
    "build_connector_worker_meta",
)


class Timed:
    """A connector whose hooks are timed. spent: seconds of each call, by hook."""

    def __init__(self, inner: Any, hooks: tuple[str, ...]) -> None:
        self.spent: dict[str, list[float]] = defaultdict(list)
        self._inner, self._hooks = inner, frozenset(hooks)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return self._timed(name, found) if name in self._hooks else found

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.spent[name].append(time.perf_counter() - began)

        return timed

    def take(self) -> dict[str, list[float]]:
        spent, self.spent = self.spent, defaultdict(list)
        return spent


def measure(store: str, tokens: int, rounds: int) -> list[Row]:
    """One prompt length: a first request (saves), then the same again from the store (loads)."""
    totals: dict[str, list[float]] = defaultdict(list)
    with Engine(transfer_config(store), num_blocks=1024, tokens_per_step=2048) as engine:
        scheduler = Timed(engine.connector, SCHEDULER_HOOKS)
        worker = Timed(engine.worker, WORKER_HOOKS)
        engine.scheduler.connector, engine.worker = scheduler, worker  # type: ignore[assignment]
        for number in range(rounds):
            text = prompt(tokens * 1000 + number, tokens)
            for kind in ("first", "hit"):
                engine.run_all()
                assert engine.scheduler.reset_prefix_cache()
                scheduler.take(), worker.take()
                engine.answer(f"{kind}-{number}", text, 4, session_id=f"s{number}")
                engine.run_all()
                spent, steps = scheduler.take(), worker.take()
                totals[f"{kind}: all scheduler hooks"].append(sum(map(sum, spent.values())))
                totals[f"{kind}: calls"].append(sum(map(len, spent.values())) / 1e6)
                totals[f"{kind}: longest hook"].append(max(map(max, spent.values())))
                totals[f"{kind}: worker, longest start_load_kv"].append(max(steps["start_load_kv"]))
                per_step = [sum(parts) for parts in zip(*steps.values(), strict=False)]
                totals[f"{kind}: worker, longest step"].append(max(per_step))
    return [
        Row(f"{tokens} tokens", case, "" if case.endswith("calls") else "us",
            [v * 1e6 for v in values])
        for case, values in totals.items()
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", default="1000,4000,7000")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    with Server(memory="2gb") as server:
        for tokens in map(int, options.tokens.split(",")):
            rows += measure(server.url, tokens, options.rounds)
    show(rows, options.json)


if __name__ == "__main__":
    main()
