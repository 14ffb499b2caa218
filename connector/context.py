"""What the parts of the scheduler half share.

Core module. Owned by the scheduler thread.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field

from connector.clock import Clock
from connector.config import Config
from connector.ids import Namespace, RequestId
from connector.ledger import Ledger
from connector.lookup import IndexOp
from connector.planner import Engine
from connector.ports import LookupPort
from connector.stats import Stats
from connector.tracker import RequestTracker

RATE_SAMPLES = 16


class Rate:
    """Median of the last 16 samples of a rate; None before the first. Robust against one stall."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=RATE_SAMPLES)

    def add(self, amount: float, seconds: float) -> None:
        """One measurement; nonsense is ignored."""
        if amount > 0 and seconds > 0:
            self._samples.append(amount / seconds)

    @property
    def median(self) -> float | None:
        """Units per second."""
        if not self._samples:
            return None
        return sorted(self._samples)[len(self._samples) // 2]


@dataclass
class Context:
    """Ports, limits and tables. `trackers` holds live requests only; a finished request lives on
    in its open jobs."""

    engine: Engine
    config: Config
    clock: Clock
    index: LookupPort
    ledger: Ledger
    stats: Stats
    namespace: Namespace
    trackers: dict[RequestId, RequestTracker] = field(default_factory=dict)
    tickets: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    load_rate: Rate = field(default_factory=Rate)
    compute_rate: Rate = field(default_factory=Rate)

    def post(self, op: IndexOp) -> bool:
        """Hand an operation to the index client; a full queue is counted, never waited for."""
        if self.index.post(op):
            return True
        self.stats.add("index_queue_full")
        return False
