"""/metrics: counters of the front end, of the engine (`shim_`), of the connector (`session_kv_`).

Numbers are counters, and get `_total`, but for those that `is_gauge` knows. `NAME_bin{le=...}` with
`NAME_seconds_sum`, as `connector.stats.Stats.observe` counts them, become one histogram. No label
carries an id.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from connector.stats import GAUGE, LATENCY_EDGES_S, split_key
from engine_shim.frontend.state import connector_stats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ENGINE_PREFIX = "shim_"
CONNECTOR_PREFIX = "session_kv_"
GAUGES = frozenset(
    {"free_blocks", "cached_blocks", "session_blocks", "open_sessions", "open_jobs"}
)
GAUGE_PREFIX = "num_"
BIN, SUM = "_bin", "_seconds_sum"

Samples = dict[str, dict[tuple[str, str], float]]
"""Name -> (label name, label value) -> number; both label parts empty without a label."""


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
    """Metric families of an engine's stats, sorted by name. What is no number is left out."""
    own = {name: value for name, value in stats.items() if name != "connector"}
    found: list[Metric] = []
    for prefix, part in ((ENGINE_PREFIX, own), (CONNECTOR_PREFIX, connector_stats(stats))):
        samples = grouped(part)
        for name in sorted(samples):
            family = _family(prefix, name, samples)
            if family is not None:
                found.append(family)
    return found


def grouped(stats: Mapping[str, object]) -> Samples:
    """Numbers by name and label. A mapping of numbers gives one sample per entry, label `kind`."""
    samples: Samples = {}
    for key, value in stats.items():
        name, label, label_value = split_key(key)
        nested = value if isinstance(value, Mapping) else {label_value: value}
        label = "kind" if isinstance(value, Mapping) else label
        for entry, number in nested.items():
            if isinstance(number, int | float):
                samples.setdefault(name, {})[(label, str(entry))] = float(number)
    return samples


def _family(prefix: str, name: str, samples: Samples) -> Metric | None:
    """The family that `name` stands for; None for the sum of a histogram, which has its own."""
    stem = name.removesuffix(BIN)
    if name.endswith(BIN) and stem + SUM in samples:
        return _histogram(prefix + stem, samples[name], samples[stem + SUM])
    if name.endswith(SUM) and name.removesuffix(SUM) + BIN in samples:
        return None
    kind = GaugeMetricFamily if is_gauge(name) else CounterMetricFamily
    values = samples[name]
    label = next(iter(values))[0]
    plain = name.removeprefix(GAUGE).removesuffix("_total")
    family = kind(
        prefix + plain,
        plain.replace("_", " ").capitalize() + ".",
        labels=[label] if label else [],
    )
    for (label_name, label_value), number in values.items():
        if label_name == label:
            family.add_metric([label_value] if label else [], number)
    return family


def is_gauge(name: str) -> bool:
    """True for a level, False for a count."""
    return name.startswith((GAUGE, GAUGE_PREFIX)) or name in GAUGES


def _histogram(
    name: str, bins: Mapping[tuple[str, str], float], total: Mapping[tuple[str, str], float]
) -> Metric:
    """Bins of our own count apart; Prometheus wants each to hold all before it."""
    counts = {value: number for (_, value), number in bins.items()}
    buckets, sum_so_far = [], 0.0
    for edge in [f"{edge:g}" for edge in LATENCY_EDGES_S] + ["inf"]:
        sum_so_far += counts.get(edge, 0.0)
        buckets.append(("+Inf" if edge == "inf" else edge, sum_so_far))
    family = HistogramMetricFamily(
        f"{name}_seconds", f"{name.replace('_', ' ').capitalize()}, in seconds."
    )
    family.add_metric([], buckets=buckets, sum_value=sum(total.values()))
    return family
