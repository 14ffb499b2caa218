"""Calls of Mooncake's library that somebody waits for with a deadline.

The library's calls can't be cancelled. So each runs as a `Call` on a thread of a `Life`, and
whoever asked waits until the deadline and then leaves: the call is *abandoned*, and what it still
uses is given back by its own thread when it returns, or never if it took so long that the library
may write there even later.

A `Life` is one client of the library with its threads and its memory. It ends as a whole: when
its last call has returned.
"""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from connector.clock import Clock, SystemClock
from connector.errors import StoreUnavailable
from store_worker.backends.mooncake_arena import Arena, Extent
from store_worker.backends.mooncake_library import MOST_WAIT_S, Library
from store_worker.executor import ThreadPool

logger = logging.getLogger(__name__)

THREADS = 12
CALLS_MAX = 256
BROKEN_S = 30.0
"""A client with a call that is under way for this long is replaced."""

EXIT_WAIT_S = 10.0
"""A process that ends while a call is under way would crash: it waits for it this long."""

T = TypeVar("T")


class Asked(Protocol):
    """A call as its own work sees it."""

    @property
    def abandoned(self) -> bool:
        """Nobody waits any more: do not make anything visible."""

    def pause(self, seconds: float) -> bool:
        """Wait; True at once when the call is abandoned."""

    def left_s(self) -> float:
        """Seconds until the deadline."""


def _nothing() -> None:
    """The default of `Use.late`."""


class Use(NamedTuple):
    """What a call uses. extents: staging memory. late: told, on the call's thread, when a call
    that was abandoned has returned."""

    extents: Sequence[Extent] = ()
    late: Callable[[], None] = _nothing


NO_USE = Use()


class Call(Generic[T]):
    """One piece of work on the library, once."""

    def __init__(
        self,
        work: Callable[[Library, Asked], T],
        clock: Clock,
        deadline: float,
        use: Use = NO_USE,
    ) -> None:
        self._work, self._clock, self._deadline = work, clock, deadline
        self._use = use
        self._lock = threading.Lock()
        self._abandoned = threading.Event()
        self._ended = False  # guarded by _lock
        self._done = threading.Event()  # ended or abandoned
        self._began: float | None = None  # None: waits for a thread
        self._result: T | None = None
        self._error: BaseException | None = None

    # ---- the one who asked ---------------------------------------------------------------------

    def wait(self) -> bool:
        """Until the call has ended or the deadline has passed; False: it is abandoned. Then its
        memory is not the asker's any more."""
        self._done.wait(max(0.0, self._deadline - self._clock.now()))
        with self._lock:
            if not self._ended:
                self._abandoned.set()
            return not self._abandoned.is_set()

    def abandon(self) -> None:
        """Wait no longer. Any thread."""
        with self._lock:
            if self._ended:
                return
            self._abandoned.set()
        self._done.set()

    def result(self) -> T:
        """Of a call that has ended and was not abandoned. Raises StoreUnavailable if its work
        raised anything."""
        assert self._ended and not self.abandoned
        if self._error is not None:
            what = f"Mooncake: {type(self._error).__name__}: {self._error}"
            raise StoreUnavailable(what) from self._error
        assert self._result is not None
        return self._result

    def release(self) -> None:
        """The asker is done with the memory of a call that has ended."""
        for extent in self._use.extents:
            extent.release()

    @property
    def ended(self) -> bool:
        with self._lock:
            return self._ended

    # ---- its work ------------------------------------------------------------------------------

    @property
    def abandoned(self) -> bool:
        return self._abandoned.is_set()

    def pause(self, seconds: float) -> bool:
        return self._abandoned.wait(max(0.0, seconds))

    def left_s(self) -> float:
        return self._deadline - self._clock.now()

    # ---- its thread ----------------------------------------------------------------------------

    def run(self, library: Library) -> None:
        """Raises nothing."""
        self._began = self._clock.now()
        try:
            if not self.abandoned:
                self._result = self._work(library, self)
        except BaseException as error:
            self._error = error
        self.end(None)

    def end(self, error: BaseException | None) -> None:
        """It has returned, or will never run (`error`)."""
        took_s = self.running_s(self._clock.now())
        with self._lock:
            self._error = error or self._error
            self._ended = True
            left = self._abandoned.is_set()
        if left and took_s < MOST_WAIT_S:
            self.release()
        if left:
            self._use.late()
        self._done.set()

    def running_s(self, now: float) -> float:
        """Since when a thread has been at it; 0 if none has begun."""
        return 0.0 if self._began is None else now - self._began


class _Hands:
    """A call thread keeps nothing."""

    def interrupt(self) -> None:
        """A call of the library can't be broken."""

    def close(self) -> None:
        """Nothing to give back."""


class _Task:
    """A call as a pool's task."""

    def __init__(self, call: Call, life: Life) -> None:
        self._call, self._life = call, life

    def run(self, state: _Hands) -> None:
        self._call.run(self._life.library)
        self._life.gone(self._call)

    def failed(self, error: BaseException) -> None:
        self._call.end(error)
        self._life.gone(self._call)

    def dropped(self) -> None:
        self.failed(RuntimeError("the Mooncake client is being closed"))


class Life:
    """One client of the library: threads, staging memory, calls under way."""

    def __init__(self, library: Library, arena_bytes: int, clock: Clock) -> None:
        self.library, self._clock = library, clock
        self.arena = Arena(arena_bytes, clock)
        self.incarnations: dict[str, bytes] = {}  # of segments, as first seen; the janitor's
        self._lock = threading.Lock()
        self._calls: set[Call] = set()  # guarded by _lock; at most CALLS_MAX + THREADS
        self._ending = False  # guarded by _lock
        self._pool: ThreadPool[_Hands] = ThreadPool(
            "mooncake-call", THREADS, _Hands, tasks_max=CALLS_MAX, bytes_max=1
        )
        _lives.add(self)

    def submit(self, call: Call) -> bool:
        """False if too many are waiting, or the life is ending."""
        with self._lock:
            if self._ending:
                return False
            self._calls.add(call)
        if self._pool.submit(_Task(call, self)):
            return True
        self.gone(call)
        return False

    def gone(self, call: Call) -> None:
        """It uses the library no more (a call thread)."""
        with self._lock:
            self._calls.discard(call)

    def broken(self) -> bool:
        """A call is under way for so long that the client had better be replaced."""
        now = self._clock.now()
        with self._lock:
            return any(call.running_s(now) > BROKEN_S for call in self._calls)

    def retire(self) -> None:
        """Take no more calls; those that wait for a thread fail."""
        with self._lock:
            self._ending = True
        self._pool.stop(0.0)

    def idle(self) -> bool:
        """No call is in the library any more, and after `retire` none will be."""
        with self._lock:
            return not self._calls

    def stop_threads(self) -> None:
        """Once `retire` was called and it is idle."""
        self._pool.stop(1.0)


_lives: weakref.WeakSet[Life] = weakref.WeakSet()


def wait_for_calls(timeout_s: float = EXIT_WAIT_S) -> bool:
    """Until no call is in any library; True if none is. Runs by itself when the process ends."""
    clock = SystemClock()
    end = clock.now() + timeout_s
    for life in list(_lives):
        life.retire()
        while not life.idle():
            if clock.now() >= end:
                logger.warning("Mooncake: a call is still under way at the end of the process")
                return False
            threading.Event().wait(0.02)
    return True


atexit.register(wait_for_calls)
