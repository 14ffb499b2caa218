"""Connections of a thread, the breaker that its threads share, and the names of nodes."""

from __future__ import annotations

import pytest

from connector.clock import ManualClock
from connector.config import parse_config
from connector.errors import ConfigError, StoreUnavailable
from connector.ids import NodeId
from store_worker.backends.breaker import FIRST_PAUSE_S, PAUSE_MAX_S, Breaker
from store_worker.backends.factory import node_id, open_node
from store_worker.connections import Connections


def refused(breaker: Breaker) -> bool:
    try:
        breaker.enter()
    except StoreUnavailable:
        return True
    return False


def test_a_closed_breaker_lets_everybody_through() -> None:
    breaker = Breaker("n", ManualClock(), 1.0)
    assert not any(refused(breaker) for _ in range(5))
    assert not breaker.open


def test_after_a_failure_one_probe_per_pause() -> None:
    clock = ManualClock()
    breaker = Breaker("n", clock, 1.0)
    breaker.enter()
    breaker.failed("refused")
    assert breaker.open and refused(breaker)
    clock.advance(FIRST_PAUSE_S)
    assert not refused(breaker), "the probe"
    assert refused(breaker) and refused(breaker), "nobody beside it"
    breaker.succeeded()
    assert not refused(breaker) and not refused(breaker)


def test_pauses_double_up_to_a_limit() -> None:
    clock = ManualClock()
    breaker = Breaker("n", clock, 1.0)
    pauses = []
    for _ in range(8):
        breaker.failed("x")
        waited = 0.0
        while refused(breaker):
            clock.advance(1 / 64)
            waited += 1 / 64
        pauses.append(waited)
    want = [0.1, 0.2, 0.4, 0.8, 1.6, PAUSE_MAX_S, PAUSE_MAX_S, PAUSE_MAX_S]
    assert pauses == pytest.approx(want, abs=1 / 32)
    breaker.succeeded()
    breaker.failed("x")
    clock.advance(FIRST_PAUSE_S + 0.001)
    assert not refused(breaker), "after a success it begins anew"


def test_a_probe_that_never_reports_is_followed_by_another() -> None:
    clock = ManualClock()
    breaker = Breaker("n", clock, 1.0)
    breaker.failed("x")
    clock.advance(FIRST_PAUSE_S)
    assert not refused(breaker)
    clock.advance(1.0)
    assert refused(breaker)
    clock.advance(FIRST_PAUSE_S)
    assert not refused(breaker)


def test_the_refusal_says_why_and_when() -> None:
    breaker = Breaker("host:1/0", ManualClock(), 1.0)
    breaker.failed("connection refused")
    with pytest.raises(StoreUnavailable, match=r"host:1/0 is away \(connection refused\).*0\.1 s"):
        breaker.enter()


class Node:
    """Counts how often it was closed."""

    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1

    def drain_counters(self) -> dict[str, int]:
        return {"connects": 2}


def test_a_node_is_opened_once_per_thread() -> None:
    opened: list[NodeId] = []

    def open_one(name: NodeId) -> Node:
        opened.append(name)
        return Node()

    connections = Connections(open_one)  # type: ignore[arg-type]
    one = connections.node(NodeId("a"))
    assert connections.node(NodeId("a")) is one
    assert connections.node(NodeId("b")) is not one
    assert opened == ["a", "b"]
    assert connections.drain_counters() == {"connects": 4}


def test_interrupt_breaks_what_is_under_way_and_lets_nothing_begin() -> None:
    node = Node()
    connections = Connections(lambda name: node)  # type: ignore[arg-type, return-value]
    connections.node(NodeId("a"))
    connections.interrupt()
    assert node.closed == 1
    for name in ("a", "b"):
        with pytest.raises(StoreUnavailable, match="shutting down"):
            connections.node(NodeId(name))


@pytest.mark.parametrize(
    ("urls", "name"),
    [
        (["redis://h", "redis://h:6379/0", "rediss://u:p@h:6379", "redis://h?db=0"], "h:6379/0"),
        (["redis://h:7000/3", "redis://:pw@h:7000?db=3"], "h:7000/3"),
        (["unix:///run/v.sock", "unix://u:p@/run/v.sock?db=0"], "/run/v.sock/0"),
        (["unix:///run/v.sock?db=2"], "/run/v.sock/2"),
        (["memory://m", "memory://m?bytes=5"], "memory:m"),
        (["mooncake://m:50051?protocol=tcp", "mooncake://m:50051"], "mooncake:m:50051"),
    ],
)
def test_a_node_has_one_name(urls: list[str], name: str) -> None:
    assert {node_id(url) for url in urls} == {name}


def test_a_bad_url_is_a_config_error_when_it_is_opened() -> None:
    config = parse_config({"store": "redis://h"})
    for url in ("http://h", "redis://h?ssl_cert_reqs=maybe&socket_timeout=x"):
        with pytest.raises(ConfigError, match=r"store\.data"):
            open_node(url, config)
