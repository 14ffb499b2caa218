"""/metrics: counters of the front end, of the engine (`shim_`), of the connector (`session_kv_`).

No label carries an id. A name that ends in `_total` is a counter, any other a gauge.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from connector.stats import split_key
from engine_shim.frontend.state import connector_stats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ENGINE_PREFIX = "shim_"
CONNECTOR_PREFIX = "session_kv_"


class FrontendMetrics:
    """Requests by entrance and status. Event-loop thread only."""

    def __init__(self) -> None:
        self._requests: dict[tuple[str, int], int] = {}

    def count(self, entrance: str, status: int) -> None:
        """One request was answered."""
        key = (entrance, status)
        self._requests[key] = self._requests.get(key, 0) + 1

    def render(self, stats: Mapping[str, object]) -> bytes:
        """Everything in the text format. stats: what the engine's `stats()` gave."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Fixed([self._own(), *families(stats)]))
        return generate_latest(registry)

    def _own(self) -> Metric:
        family = CounterMetricFamily(
            "shim_http_requests", "Requests by entrance and status.", labels=["entrance", "status"]
        )
        for (entrance, status), count in self._requests.items():
            family.add_metric([entrance, str(status)], count)
        return family


class _Fixed(Collector):
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> Iterator[Metric]:
        return iter(self._metrics)


def families(stats: Mapping[str, object]) -> list[Metric]:
    """Metric families of an engine's stats, sorted by name."""
    found: dict[str, Metric] = {}
    for name, value in stats.items():
        if name != "connector":
            _add(found, ENGINE_PREFIX, name, value)
    for name, value in connector_stats(stats).items():
        _add(found, CONNECTOR_PREFIX, name, value)
    return [found[name] for name in sorted(found)]


def _add(found: dict[str, Metric], prefix: str, key: str, value: object) -> None:
    """A number; or a mapping of numbers: one sample per entry, its key as the label `kind`."""
    if isinstance(value, Mapping):
        for label, number in value.items():
            if isinstance(number, int | float):
                _sample(found, prefix + key, ("kind", str(label)), number)
    elif isinstance(value, int | float):
        name, label_name, label = split_key(key)
        _sample(found, prefix + name, (label_name, label), value)


def _sample(
    found: dict[str, Metric], name: str, label: tuple[str, str], number: int | float
) -> None:
    name = name.removeprefix(CONNECTOR_PREFIX) if name.count(CONNECTOR_PREFIX) > 1 else name
    labels = [label[0]] if label[0] else []
    family = found.get(name)
    if family is None:
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        stem = name.removesuffix("_total")
        family = found[name] = kind(stem, name.replace("_", " "), labels=labels)
    if list(getattr(family, "_labelnames", labels)) == labels:
        family.add_metric([label[1]] if labels else [], float(number))  # type: ignore[attr-defined]
