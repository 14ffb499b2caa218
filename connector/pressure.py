"""When saves stand in the engine's way: the signs of a lack of blocks, as the core sees them.

A save holds blocks that its request may have given up long ago. That is bounded in share and time,
and ends early when the engine can't go on otherwise: when it takes a running request's blocks, or
when it schedules nothing although a request waits for room.

Core module. Owned by the scheduler thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from connector.ids import RequestId
from connector.tracker import RequestTracker


class Need(Enum):
    """How badly the engine needs blocks."""

    NONE = "none"
    SHORT = "short"  # it took a running request's blocks, and goes on
    STUCK = "stuck"  # nothing goes on


class Pressure:
    """What has happened since the last step was built."""

    def __init__(self) -> None:
        self._preempted = False
        self._offered: set[RequestId] = set()

    def preempted(self) -> None:
        """The engine took a request's blocks."""
        self._preempted = True

    def offered(self, request: RequestId) -> None:
        """A request has its answer: if there is room, the engine gives it blocks now."""
        self._offered.add(request)

    def placed(self, request: RequestId) -> None:
        """It has got them, or is gone."""
        self._offered.discard(request)

    def take(
        self, idle: bool, free_share: float, trackers: Iterable[RequestTracker]
    ) -> Need:
        """The need that this step has shown. idle: the step schedules nothing.

        Loads that are under way keep their blocks for a while, too, but they end soon.
        """
        preempted, waiting = self._preempted, bool(self._offered)
        self._preempted = False
        self._offered.clear()
        if preempted or not idle:
            return Need.SHORT if preempted else Need.NONE
        stuck = waiting
        for tracker in trackers:
            if tracker.loading is not None:
                return Need.NONE
            stuck = stuck or (free_share == 0 and bool(tracker.blocks))
        return Need.STUCK if stuck else Need.NONE
