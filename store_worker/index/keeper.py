"""The keeper: one elected engine fits the eviction policy; all of them look at the store's levels.

Thread: the janitor's.
"""

from __future__ import annotations

import logging
import secrets

from connector.errors import StoreError
from store_worker.index.janitor import Desk, Job
from store_worker.policy import make_policy

logger = logging.getLogger(__name__)

LEAD_S = 30.0
TURNS_PER_CALL = 1000
CALLS_MAX = 64


class Keeper(Job):
    """Runs again and again; between runs it remembers how far it has read the log of turns.

    An engine that becomes the elected one later learns from what the bounded log still has.
    """

    def __init__(self, policy: str) -> None:
        """policy: see `make_policy`, which raises ConfigError."""
        self._name = secrets.token_hex(8)
        self._policy = make_policy(policy)
        self._read = 0

    def work(self, desk: Desk) -> None:
        self._look(desk)
        described = desk.describe()
        if described is not None:
            desk.index.describe(*described)
        if desk.index.lead(self._name, LEAD_S):
            self._learn(desk)
            desk.index.set_scores(self._policy.fit(desk.clock.wall_ms()))

    def _learn(self, desk: Desk) -> None:
        for _ in range(CALLS_MAX):
            self._read, events = desk.index.turns(self._read, TURNS_PER_CALL)
            for event in events:
                self._policy.observe(event)
            if len(events) < TURNS_PER_CALL:
                return

    def _look(self, desk: Desk) -> None:
        gauges: dict[str, float] = {f"store_{k}": v for k, v in desk.index.stats().items()}
        for state in desk.index.nodes():
            gauges[f"node_bytes{{node={state.node}}}"] = state.stored
            gauges[f"node_capacity_bytes{{node={state.node}}}"] = state.capacity
            gauges[f"node_up{{node={state.node}}}"] = int(state.up)
        desk.tell_gauges(gauges)

    def failed(self, error: BaseException) -> None:
        """The index is away, or refuses the table while another shape is in use."""
        level = logging.DEBUG if isinstance(error, StoreError) else logging.WARNING
        logger.log(level, "the policy was not fitted: %s", error)
