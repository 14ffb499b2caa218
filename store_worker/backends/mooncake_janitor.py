"""The thread that keeps a Mooncake client alive: nobody else waits for what it does.

It makes the client's life, replaces it when it is broken, keeps the list of segments fresh and
removes what could not be removed at once. Thread: `mooncake-janitor`, one per client.
"""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import TYPE_CHECKING

from connector.errors import StoreError
from store_worker.backends import mooncake_ops as ops
from store_worker.backends.mooncake_calls import Asked, Call, Life
from store_worker.backends.mooncake_codes import Meaning, meaning
from store_worker.backends.mooncake_library import Library, close_library

if TYPE_CHECKING:
    from store_worker.backends.mooncake_client import MooncakeClient

logger = logging.getLogger(__name__)

TICK_S = 0.1
REFRESH_S = 1.0
RETRY_FIRST_S = 0.2
RETRY_MAX_S = 5.0
REBUILD_EVERY_S = 30.0
REMOVE_DEADLINE_S = 5.0
RETIRED_MAX = 2
"""Clients that were replaced and are not closed yet: closing one costs a second of everybody's
time (see `mooncake_library`). Those that lend memory are closed at once all the same."""

_unclosed: list[Life] = []
"""Of clients that ended while the master was away. Kept to the end of the process: the library may
still write into their memory."""


class Janitor:
    """The client's own thread."""

    def __init__(self, client: MooncakeClient) -> None:
        self._client = client
        self._retired: list[Life] = []  # at most RETIRED_MAX + 1
        self._removing: tuple[list[str], Call[list[int]]] | None = None
        self._retry_s = RETRY_FIRST_S
        self._next: dict[str, float] = {}

    def run(self) -> None:
        """Until the client is closed and no call is under way any more."""
        client = self._client
        while True:
            try:
                self._tick()
            except StoreError as error:
                logger.debug("Mooncake: %s", error)
            except Exception:
                logger.exception("Mooncake: housekeeping failed")
            if client.pause(TICK_S):
                break
        life = client.end_life()
        self._retired += [life] if life is not None else []
        while self._retired:
            self._bury(0)
            if self._retired:
                threading.Event().wait(TICK_S)
            _unclosed.extend(life for life in self._retired if life.idle())
            self._retired = [life for life in self._retired if not life.idle()]

    def _tick(self) -> None:
        self._bury(0 if self._client.lending else RETIRED_MAX)
        life = self._client.current()
        if life is None:
            if self._due("life", self._retry_s) and len(self._retired) <= RETIRED_MAX:
                self._client.make_life()
                made = self._client.current() is not None
                self._retry_s = RETRY_FIRST_S if made else min(2 * self._retry_s, RETRY_MAX_S)
            return
        if self._spent(life) and self._due("rebuild", REBUILD_EVERY_S):
            self._client.count("mooncake_rebuilds")
            logger.warning("Mooncake: the client is replaced")
            ended = self._client.end_life()
            self._retired += [ended] if ended is not None else []
            return
        self._remove()
        if self._due("segments", REFRESH_S):
            self._client.cluster.segments()
            self._client.forget_gates()

    def _spent(self, life: Life) -> bool:
        return life.broken() or self._client.blamed() or self._client.outdated(life)

    def _due(self, what: str, every_s: float) -> bool:
        now = self._client.now()
        if now < self._next.get(what, -1e9):
            return False
        self._next[what] = now + every_s
        return True

    def _bury(self, keep: int) -> None:
        """Close what is idle, the oldest first, until `keep` are left."""
        for life in [life for life in self._retired if life.idle()]:
            if len(self._retired) <= keep:
                return
            life.stop_threads()
            if close_library(life.library, self._client.url):
                self._retired.remove(life)

    def _remove(self) -> None:
        """Removals that were refused before, one call at a time."""
        removals = self._client.removals
        if self._removing is not None:
            keys, call = self._removing
            if not call.ended:
                return
            self._removing = None
            codes = call.result()  # raises if the client was replaced meanwhile
            wait = (Meaning.LEASED, Meaning.UNFINISHED, Meaning.MASTER)
            removals.discard(
                key for key, code in zip(keys, codes, strict=True) if meaning(code) not in wait
            )
        due = removals.due()
        if due:
            deadline = self._client.now() + REMOVE_DEADLINE_S
            call = self._client.ask(partial(_remove, keys=due), deadline)
            self._removing = (due, call)


def _remove(library: Library, asked: Asked, keys: list[str]) -> list[int]:
    return ops.remove(library, keys)
