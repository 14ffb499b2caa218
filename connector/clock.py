"""The only place where time is read.

Leaf module: standard library only. A `Clock` may be used from any thread.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic and wall time."""

    def now(self) -> float:
        """Monotonic seconds; only differences mean anything."""

    def wall_ms(self) -> int:
        """Milliseconds since the Unix epoch."""


class SystemClock:
    """The machine's clocks."""

    def now(self) -> float:
        return time.monotonic()

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000


class ManualClock:
    """Virtual time for tests, the simulation and the replay: moves only when told to."""

    def __init__(self, start_s: float = 0.0, wall_ms: int = 1_700_000_000_000) -> None:
        self._now_s = start_s
        self._wall_origin_ms = wall_ms - round(start_s * 1000)

    def now(self) -> float:
        return self._now_s

    def wall_ms(self) -> int:
        return self._wall_origin_ms + round(self._now_s * 1000)

    def advance(self, seconds: float) -> None:
        """Move forward. Raises ValueError on a negative step: both clocks are monotone."""
        if seconds < 0:
            raise ValueError(f"a clock can't go back ({seconds} s)")
        self._now_s += seconds
