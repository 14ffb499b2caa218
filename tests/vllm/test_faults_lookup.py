"""Faults around lookups, hand-offs, other connectors, and metrics.

vLLM's scheduler, our connector, real servers. The numbers are those of tests/faults.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from connector.clock import SystemClock
from connector.vllm_adapter import SessionKVConnector, SessionKVPromMetrics
from tests.servers import Server
from tests.vllm.conftest import Engines, Solo, Store
from tests.vllm.scheduler_kit import B, Engine, engine_config, prompt
from tests.vllm.servers import transfer_config
from tests.vllm.slow_loader import PARAM, Gate

LOOKUP_S = 0.5


@pytest.fixture
def gate() -> Iterator[type[Gate]]:
    """Closed; loads of the other connector end once it is open."""
    Gate.open = False
    yield Gate
    Gate.open = True


def beside_another(store: Store) -> dict[str, Any]:
    """MultiConnector: the other connector first, ours by its registered name second."""
    other = {
        "kv_connector": "SlowLoader",
        "kv_connector_module_path": "tests.vllm.slow_loader",
        "kv_role": "kv_both",
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [other, transfer_config(store.urls)]},
    }


def with_a_slow_load(engine: Engine, tokens: list[int], slow: int) -> None:
    """Ask; the other connector promises `slow` tokens and is stuck."""
    params = {"kv_transfer_params": {PARAM: slow}}
    engine.ask("a", tokens, 8, session_id="s", extra_args=params)
    engine.run_until(lambda: engine.held_blocks() >= slow // B, "blocks for the other's load")
    for _ in range(20):
        engine.step()


def test_fault_05_nothing_is_saved_below_anothers_unfinished_load(
    engines: Engines, store: Store, solo: Solo, gate: type[Gate]
) -> None:
    tokens = prompt(51, 6 * B + 3)
    engine = engines(transfer=beside_another(store))
    with_a_slow_load(engine, tokens, 4 * B)
    assert not engine.saves(), "those blocks hold nothing yet"
    gate.open = True
    engine.run_all()
    assert engine.texts["a"].tokens == solo(tokens, 8)
    engine.assert_empty()
    text = engines().answer("b", tokens, 8, session_id="s")
    assert (text.cached, text.tokens) == (6 * B, solo(tokens, 8))


def test_fault_05_an_abort_during_anothers_load_saves_nothing(
    engines: Engines, store: Store, solo: Solo, gate: type[Gate]
) -> None:
    tokens = prompt(52, 6 * B + 3)
    engine = engines(transfer=beside_another(store))
    with_a_slow_load(engine, tokens, 4 * B)
    engine.abort("a")
    for _ in range(20):
        engine.step()
    gate.open = True
    engine.run_all()
    assert not engine.saves(), "blocks that nobody ever filled"
    engine.assert_empty()
    text = engines().answer("b", tokens, 8, session_id="s")
    assert (text.cached, text.tokens) == (0, solo(tokens, 8))


def test_fault_33_under_multiconnector_anothers_load_is_not_reported_by_us(
    engines: Engines, store: Store, solo: Solo, gate: type[Gate]
) -> None:
    tokens = prompt(334, 5 * B)
    writer = engines()
    writer.answer("w", tokens, 2, session_id="s")
    writer.run_all()
    gate.open = True
    engine = engines(transfer=beside_another(store))
    # Both promise; the first in the list is chosen, so that ours must not load.
    params = {"kv_transfer_params": {PARAM: 2 * B}}
    text = engine.answer("a", tokens, 8, session_id="s", extra_args=params)
    engine.run_all()
    assert text.tokens == solo(tokens, 8)
    reported = [r for out in engine.outputs for r in out.finished_recving]
    assert reported.count("a") <= 1 + len(engine.loads())
    engine.assert_empty()


def test_fault_40_a_lookup_that_fails_once_is_a_miss_and_the_next_one_works(
    engines: Engines, store: Store, solo: Solo
) -> None:
    tokens = prompt(401, 4 * B + 1)
    writer = engines()
    writer.answer("w", tokens, 2, session_id="s")
    writer.run_all()
    reader = engines(lookup_deadline_s=LOOKUP_S)
    with store.index.client() as client:
        client.client_kill_filter(_type="normal", skipme=True)
    first = reader.answer("a", tokens, 4, session_id="s")
    assert first.tokens == solo(tokens)
    reader.run_all()
    assert reader.scheduler.reset_prefix_cache()

    def hit() -> bool:
        text = reader.answer(f"r{len(reader.texts)}", tokens, 4, session_id="s")
        assert text.tokens == solo(tokens)
        reader.run_all()
        assert reader.scheduler.reset_prefix_cache()
        return text.cached == 4 * B

    reader.run_until(hit, "a hit, after the connection was lost")


def test_fault_51_a_lookup_never_blocks_the_scheduler(
    engines: Engines, store: Store, solo: Solo
) -> None:
    clock = SystemClock()
    engine = engines(lookup_deadline_s=LOOKUP_S, index_timeout_s=30.0)
    store.index.pause()
    other = engine.ask("busy", prompt(511, B), 40, session_id="t")
    text = engine.ask("a", prompt(512, 4 * B), 4, session_id="s")
    began, times = clock.now(), []
    while not (text.finished and other.finished):
        before = clock.now()
        engine.begin_step()
        times.append(clock.now() - before)
        engine.finish_step()
        assert clock.now() - began < 20, "both requests go on without the index"
    waiting = sorted(times)
    assert len(times) > 50, "the engine kept stepping while the lookup was out"
    assert waiting[len(times) // 2] < 0.005, f"median step {waiting[len(times) // 2]:.4f} s"
    assert text.tokens == solo(prompt(512, 4 * B))
    store.index.resume()
    engine.run_all()
    engine.assert_empty()


def test_fault_46_one_stuck_node_of_two_costs_only_its_own_blocks(solo: Solo) -> None:
    with Server() as index, Server() as first, Server() as second:
        store = Store(index, [first, second])
        tokens = prompt(461, 2 * B)
        extra = transfer_config(store.urls, placement="block", load_deadline_s=1.0)
        with Engine(extra) as writer:
            for turn in range(12):
                text = writer.answer(f"w{turn}", tokens, 4, session_id="s")
                tokens = [*tokens, *text.tokens, *prompt(462 + turn, B)]
                writer.run_all()
        nodes = [placed.node for job in writer.saves() for placed in job.placed]
        assert len(set(nodes)) == 2, "both nodes hold a part of the chain"
        with Engine(extra) as reader:
            stuck = second if nodes[0].startswith(str(first.socket_path)) else first
            stuck.pause()
            text = reader.answer("a", tokens, 4, session_id="s")
            stuck.resume()
            reader.run_all()
            assert text.tokens == solo(tokens)
            assert sum(v for k, v in reader.stats.items() if k.startswith("tokens_loaded")) > 0
            reader.assert_empty()


def test_fault_60_decode_waits_for_the_hand_off_and_hits(
    engines: Engines, store: Store, solo: Solo
) -> None:
    tokens = prompt(601, 5 * B + 7)
    prefill = engines(pd_role="prefill", connect_timeout_s=30.0)
    store.pause_data()
    text = prefill.answer("p", tokens, 1, session_id="s")
    decode = engines(pd_role="decode", pd_wait_s=20.0, save_wait_s=0.0)
    params = {"kv_transfer_params": text.params}
    waiting = decode.ask("d", tokens, 8, session_id="s", extra_args=params)
    for _ in range(50):
        decode.step()
    assert not waiting.tokens, "it waits, since the hand-off's commit is still to come"
    store.data.resume()
    prefill.run_all()
    decode.run_until(lambda: waiting.finished, "the decode side")
    assert (waiting.cached, waiting.tokens) == (5 * B, solo(tokens, 8))


def test_fault_60_decode_falls_back_at_its_deadline(
    engines: Engines, store: Store, solo: Solo
) -> None:
    tokens = prompt(602, 5 * B + 7)
    prefill = engines(pd_role="prefill", connect_timeout_s=30.0)
    store.pause_data()
    text = prefill.answer("p", tokens, 1, session_id="s")
    decode = engines(pd_role="decode", pd_wait_s=1.0)
    params = {"kv_transfer_params": text.params}
    waiting = decode.answer("d", tokens, 8, session_id="s", extra_args=params)
    assert waiting.tokens == solo(tokens, 8)
    store.data.resume()
    for engine in (prefill, decode):
        engine.run_all()
        engine.assert_empty()


def test_fault_50_metrics_never_raise() -> None:
    registry = CollectorRegistry()
    own = partial(Counter, registry=registry)
    config = engine_config(transfer_config("memory://x"))
    types: dict[Any, Any] = {Counter: own, Gauge: Gauge, Histogram: Histogram}
    metrics = SessionKVConnector.build_prom_metrics(config, types, ["engine"], {0: ["0"]})
    assert isinstance(metrics, SessionKVPromMetrics)
    odd = {"loads": -3, "bytes": math.inf, "nan": math.nan, "late{by=x}": 2, "zero": 0, "a-b": 1}
    for _ in range(2):
        metrics.observe(dict(odd), 0)
        metrics.observe({"late": 1, "late{reason=y}": 1, "loads": 2}, 0)
    assert registry.get_sample_value("vllm:session_kv_loads_total", {"engine": "0"}) == 4
