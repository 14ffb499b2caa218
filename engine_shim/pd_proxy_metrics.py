"""The proxy's metrics. Labels are engines' names, paths and outcomes; never an id or a URL."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from connector.stats import LATENCY_EDGES_S
from engine_shim.pd_proxy_fleet import Fleet


class ProxyMetrics:
    """Event-loop thread only."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._registry = CollectorRegistry()
        prefix, registry = "session_kv_proxy", self._registry
        self._requests = Counter(
            f"{prefix}_requests", "Requests by outcome.", ["path", "outcome"], registry=registry
        )
        self._calls = Counter(
            f"{prefix}_engine_calls", "Calls of engines.", ["engine", "outcome"], registry=registry
        )
        self._waits = Counter(
            f"{prefix}_commit_waits", "Waits for a hand-off.", ["outcome"], registry=registry
        )
        self._kept = Counter(
            f"{prefix}_affinity", "Did a session stay on its engine?", ["role", "kept"],
            registry=registry,
        )  # fmt: skip
        self._seconds = Histogram(
            f"{prefix}_seconds", "Time of the parts of a request.", ["part"],
            registry=registry, buckets=LATENCY_EDGES_S,
        )  # fmt: skip
        self._in_flight = Gauge(
            f"{prefix}_in_flight", "Requests at an engine now.", ["engine"], registry=registry
        )
        self._healthy = Gauge(
            f"{prefix}_engine_healthy", "1 if an engine is up.", ["engine"], registry=registry
        )

    def request(self, path: str, outcome: str) -> None:
        """A request ended: ok, invalid, refused, no_engine, broken, cancelled."""
        self._requests.labels(path, outcome).inc()

    def call(self, engine: str, outcome: str) -> None:
        """A call of an engine ended: ok, client_error, server_error, unreachable, cancelled."""
        self._calls.labels(engine, outcome).inc()

    def wait(self, outcome: str, seconds: float) -> None:
        """A wait for a commit ended."""
        self._waits.labels(outcome).inc()
        self._seconds.labels("commit_wait").observe(seconds)

    def placed(self, role: str, before: str | None, now: str) -> None:
        """A session with an engine of its own was placed."""
        if before is not None:
            self._kept.labels(role, "yes" if before == now else "no").inc()

    def took(self, part: str, seconds: float) -> None:
        """prefill, decode_first (to the first byte)."""
        self._seconds.labels(part).observe(seconds)

    def render(self) -> bytes:
        """The text format."""
        for engine in self._fleet.all:
            self._in_flight.labels(engine.name).set(engine.in_flight)
            self._healthy.labels(engine.name).set(engine.healthy)
        return generate_latest(self._registry)
