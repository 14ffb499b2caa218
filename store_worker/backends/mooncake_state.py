"""Small state that a Mooncake client shares between threads: who is away, what is to be removed."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from connector.clock import Clock
from connector.errors import StoreUnavailable

PAUSE_FIRST_S = 1.0
PAUSE_MAX_S = 2.0
PROBE_S = 0.5
ABANDONED_MAX = 3
"""Calls to one segment that nobody waits for and that have not returned: then no more."""


class Gate:
    """Keeps callers from a segment, or from the master, that fails. Thread-safe.

    A failure closes it for a pause that doubles; then one caller is let through with little time,
    so that a peer which is away costs the others nothing. A success opens it.
    """

    def __init__(self, name: str, clock: Clock, closes: bool = True) -> None:
        """closes: False for what is no one peer, which then never keeps anybody out."""
        self._name, self._clock, self._closes = name, clock, closes
        self._lock = threading.Lock()
        self._pause_s = 0.0  # 0: open
        self._next_try = 0.0
        self._why = ""
        self._failures = 0
        self._abandoned = 0

    def enter(self, deadline: float) -> float:
        """The deadline that the caller has to keep. Raises StoreUnavailable while it is closed."""
        now = self._clock.now()
        with self._lock:
            if self._abandoned >= ABANDONED_MAX:
                raise StoreUnavailable(f"{self._name}: {self._abandoned} calls have not returned")
            if not self._pause_s:
                return deadline
            if now < self._next_try:
                wait_s = self._next_try - now
                raise StoreUnavailable(
                    f"{self._name} is away ({self._why}); next attempt in {wait_s:.1f} s"
                )
            self._next_try = now + PROBE_S + self._pause_s
            return min(deadline, now + PROBE_S)

    def check(self) -> None:
        """Like `enter`, but lets nobody through: whoever passes may still be refused there."""
        with self._lock:
            if self._pause_s and self._clock.now() < self._next_try:
                raise StoreUnavailable(f"{self._name} is away ({self._why})")

    def succeeded(self) -> None:
        """The peer did what it should."""
        with self._lock:
            self._pause_s, self._failures = 0.0, 0

    def failed(self, why: str) -> None:
        """The peer did not do what it should have."""
        if not self._closes:
            return
        with self._lock:
            self._failures += 1
            self._pause_s = min(2 * self._pause_s, PAUSE_MAX_S) or PAUSE_FIRST_S
            self._next_try = self._clock.now() + self._pause_s
            self._why = why

    def left(self, change: int) -> None:
        """One more (or less) call that nobody waits for is under way."""
        with self._lock:
            self._abandoned += change

    @property
    def open(self) -> bool:
        with self._lock:
            return not self._pause_s and self._abandoned < ABANDONED_MAX

    @property
    def failures(self) -> int:
        """In a row."""
        with self._lock:
            return self._failures


REMOVALS_MAX = 65_536
RETRY_S = 1.0
REMOVE_WITHIN_S = 60.0
REMOVALS_PER_CALL = 512


class Removals:
    """Objects that are deleted for us but that the master would not remove yet. Thread-safe.

    They are tried again until they are gone, or given up after a minute (then Mooncake's own
    eviction takes them). Writing such an object takes it off the list.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._keys: dict[str, tuple[float, float]] = {}  # key -> (next try, give up); bounded
        self.given_up = 0

    def add(self, keys: Iterable[str]) -> int:
        """How many were new; the rest are on the list, or there was no room for them."""
        now, added = self._clock.now(), 0
        with self._lock:
            for key in keys:
                if key in self._keys:
                    continue
                if len(self._keys) >= REMOVALS_MAX:
                    self.given_up += 1
                    continue
                self._keys[key] = (now + RETRY_S, now + REMOVE_WITHIN_S)
                added += 1
        return added

    def held(self, keys: Sequence[str]) -> set[str]:
        """Those of `keys` that are on the list."""
        with self._lock:
            return {key for key in keys if key in self._keys} if self._keys else set()

    def discard(self, keys: Iterable[str]) -> None:
        """They are gone, or wanted again."""
        with self._lock:
            for key in keys:
                self._keys.pop(key, None)

    def due(self) -> list[str]:
        """Some that are to be tried now; each is due again after a while."""
        now = self._clock.now()
        found: list[str] = []
        with self._lock:
            for key, (next_try, give_up) in list(self._keys.items()):
                if now >= give_up:
                    del self._keys[key]
                    self.given_up += 1
                elif now >= next_try and len(found) < REMOVALS_PER_CALL:
                    self._keys[key] = (now + RETRY_S, give_up)
                    found.append(key)
        return found

    def __len__(self) -> int:
        with self._lock:
            return len(self._keys)
