"""Counters and latency histograms of the connector; plain data that merges over ranks and steps.

Leaf module. One `Stats` belongs to one thread; `drain()` hands its content on as a plain dict.
Metrics never raise: a negative or absurd value is clamped. No label carries a session id.
"""

from __future__ import annotations

from collections.abc import Mapping

LATENCY_EDGES_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""Upper edges of the latency histograms' bins, in seconds; one more bin lies above the last."""

Data = dict[str, int | float]
"""Flat: a counter's name, optionally with one label as `name{label=value}`, to its increase. A name
that begins with `gauge:` is a level instead: the last value counts."""

GAUGE = "gauge:"


class Stats:
    """Accumulates; `drain` empties."""

    def __init__(self) -> None:
        self._data: Data = {}

    def add(self, name: str, value: int | float = 1, **label: str) -> None:
        """Increase a counter. At most one label, whose values come from a small fixed set."""
        if value <= 0:
            return
        key = name
        for label_name, label_value in label.items():
            key = f"{name}{{{label_name}={label_value}}}"
        self._data[key] = self._data.get(key, 0) + value

    def observe(self, name: str, seconds: float) -> None:
        """Put one latency into `name`'s histogram."""
        seconds = max(0.0, seconds)
        edge = next((e for e in LATENCY_EDGES_S if seconds <= e), None)
        self.add(f"{name}_bin", 1, le="inf" if edge is None else f"{edge:g}")
        self.add(f"{name}_seconds_sum", max(seconds, 1e-9))

    def drain(self) -> Data:
        """Everything since the last drain."""
        data, self._data = self._data, {}
        return data

    def peek(self) -> Data:
        """A copy of what `drain` would return."""
        return dict(self._data)


def merge(into: Data, more: Mapping[str, int | float]) -> Data:
    """Add `more` to `into`, which is returned; levels are replaced."""
    for key, value in more.items():
        into[key] = value if key.startswith(GAUGE) else into.get(key, 0) + value
    return into


def split_key(key: str) -> tuple[str, str, str]:
    """`name{label=value}` into (name, label, value); the last two empty without a label."""
    name, brace, rest = key.partition("{")
    if not brace:
        return name, "", ""
    label, _, value = rest.rstrip("}").partition("=")
    return name, label, value
