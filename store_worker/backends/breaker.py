"""Stops everybody from waiting for a node that can't be reached.

One breaker per node, shared by all connections of a process to it. Any thread.
"""

from __future__ import annotations

import threading

from connector.clock import Clock
from connector.errors import StoreUnavailable

FIRST_PAUSE_S = 0.1
PAUSE_MAX_S = 2.0


class Breaker:
    """Closed until an attempt to connect fails; then refuses for a pause that doubles each time.

    After the pause one caller is let through (the probe) while the others are still refused; its
    success closes the breaker, its failure starts the next pause. A probe that never reports (its
    thread was stopped) counts as failed after `probe_s`.
    """

    def __init__(self, name: str, clock: Clock, probe_s: float) -> None:
        """probe_s: how long one attempt may take, `connect_timeout_s`."""
        self._name, self._clock, self._probe_s = name, clock, probe_s
        self._lock = threading.Lock()
        self._pause_s = 0.0  # 0: closed
        self._next_try = 0.0
        self._why = ""

    def enter(self) -> None:
        """Ask before connecting. Raises StoreUnavailable while the node is known to be away."""
        with self._lock:
            if not self._pause_s:
                return
            wait_s = self._next_try - self._clock.now()
            if wait_s > 0:
                raise StoreUnavailable(
                    f"{self._name} is away ({self._why}); next attempt in {wait_s:.1f} s"
                )
            self._next_try = self._clock.now() + self._pause_s + self._probe_s

    def succeeded(self) -> None:
        """The attempt has worked."""
        with self._lock:
            self._pause_s = 0.0

    def failed(self, why: str) -> None:
        """The attempt has failed."""
        with self._lock:
            doubled = min(2 * self._pause_s, PAUSE_MAX_S)
            self._pause_s = doubled or FIRST_PAUSE_S
            self._next_try = self._clock.now() + self._pause_s
            self._why = why

    @property
    def open(self) -> bool:
        """True while attempts are refused or one is being made after a failure."""
        with self._lock:
            return self._pause_s > 0
