"""The one place where threads are made.

A `ThreadPool` runs tasks on named threads behind a queue that is bounded by count and by bytes; an
`InlinePool` is its deterministic twin for the simulation and for tests: a task runs when told to.

A task belongs to the pool from `submit` until exactly one of `run`, `failed` or `dropped` has ended
it: `failed` follows a `run` that raised, `dropped` comes instead of `run` when the pool stops. An
exception never ends a thread.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

logger = logging.getLogger(__name__)

S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)
S_contra = TypeVar("S_contra", contravariant=True)


class Task(Protocol[S_contra]):
    """One piece of work. `state` is what the thread keeps between tasks (its connections)."""

    def run(self, state: S_contra) -> None:
        """Do it. May raise."""

    def failed(self, error: BaseException) -> None:
        """`run` raised, or the thread's state could not be made. Must not raise."""

    def dropped(self) -> None:
        """The pool stopped before `run`. Must not raise."""


class State(Protocol):
    """What a thread of a pool keeps."""

    def interrupt(self) -> None:
        """Break a call that is stuck; called from another thread, at most once, when stopping."""

    def close(self) -> None:
        """Give everything back; called by the thread itself as its last act."""


StateT = TypeVar("StateT", bound=State)


class Pool(Protocol[S_co]):
    """What a worker needs of either pool. `submit` and `stop` are for the owner's thread."""

    def submit(self, task: Task[S_co], size_bytes: int = 0) -> bool:
        """Take the task, or False at the limit (or after `stop`); never blocks.

        A task larger than the byte limit is taken when nothing else is there, so that no size is
        refused for ever.
        """

    def waiting(self) -> int:
        """Tasks not yet begun."""

    def stop(self, timeout_s: float) -> bool:
        """Drop what has not begun, let what runs end, and interrupt it when half of `timeout_s`
        has passed. True if everything has ended. Later calls only wait again."""


class Bounds(Generic[S]):
    """The queue of a pool with its accounting; the caller holds the lock, if there is one."""

    def __init__(self, tasks_max: int, bytes_max: int) -> None:
        assert tasks_max > 0 and bytes_max > 0, (tasks_max, bytes_max)
        self._tasks_max, self._bytes_max = tasks_max, bytes_max
        # bounded: `admit` refuses at tasks_max
        self._queue: deque[tuple[Task[S], int]] = deque()
        self._running = 0
        self._bytes = 0

    def admit(self, task: Task[S], size_bytes: int) -> bool:
        """Bytes count from here until `done`."""
        assert size_bytes >= 0, size_bytes
        idle = not self._queue and not self._running
        over = self._bytes + size_bytes > self._bytes_max
        if len(self._queue) >= self._tasks_max or (over and not idle):
            return False
        self._bytes += size_bytes
        self._queue.append((task, size_bytes))
        return True

    def take(self) -> tuple[Task[S], int] | None:
        if not self._queue:
            return None
        self._running += 1
        return self._queue.popleft()

    def done(self, size_bytes: int) -> None:
        self._running -= 1
        self._bytes -= size_bytes
        assert self._running >= 0 and self._bytes >= 0, (self._running, self._bytes)

    def clear(self) -> list[Task[S]]:
        dropped = [task for task, _ in self._queue]
        self._bytes -= sum(size for _, size in self._queue)
        self._queue.clear()
        return dropped

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def bytes_in_flight(self) -> int:
        return self._bytes


def run_guarded(task: Task[S], state: S) -> None:
    """Run a task; whatever it raises becomes its own failure."""
    try:
        task.run(state)
    except BaseException as error:
        logger.warning("a task failed", exc_info=error)
        end(task.failed, error)


def end(call: Callable[..., None], *args: object) -> None:
    """Call what must not raise; if it does, that is logged and goes no further."""
    try:
        call(*args)
    except BaseException:
        logger.exception("a task could not be ended")


class ThreadPool(Generic[StateT]):
    """Threads `NAME-0`, `NAME-1`, ... each with a state of its own, made when first needed.

    The thread that fell idle last is woken first: its caches and its connection are warm (on calls
    of 8 MiB that was seen to halve their time). Daemon threads: a process that ends without `stop`
    is not held up by them.
    """

    def __init__(
        self,
        name: str,
        threads: int,
        make_state: Callable[[], StateT],
        tasks_max: int,
        bytes_max: int,
    ) -> None:
        assert threads > 0, threads
        self._make_state = make_state
        self._lock = threading.Lock()  # of what follows
        self._bounds: Bounds[StateT] = Bounds(tasks_max, bytes_max)
        self._stopping = False
        self._states: list[StateT] = []
        self._idle: list[threading.Lock] = []  # one per idle thread, held; released to wake it
        self._threads = [
            threading.Thread(target=self._loop, name=f"{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, task: Task[StateT], size_bytes: int = 0) -> bool:
        with self._lock:
            if self._stopping or not self._bounds.admit(task, size_bytes):
                return False
            if self._idle:
                self._idle.pop().release()
            return True

    def waiting(self) -> int:
        with self._lock:
            return self._bounds.waiting

    def bytes_in_flight(self) -> int:
        with self._lock:
            return self._bounds.bytes_in_flight

    def stop(self, timeout_s: float) -> bool:
        with self._lock:
            self._stopping = True
            dropped = self._bounds.clear()
            while self._idle:
                self._idle.pop().release()
        for task in dropped:
            end(task.dropped)
        if not self._join(timeout_s / 2):
            with self._lock:
                states = list(self._states)
            for state in states:
                end(state.interrupt)
        return self._join(timeout_s / 2)

    def _join(self, timeout_s: float) -> bool:
        # Each thread gets an equal part: reading no clock here keeps the pool free of one.
        for thread in self._threads:
            thread.join(timeout_s / len(self._threads))
        return not any(thread.is_alive() for thread in self._threads)

    def _loop(self) -> None:
        state: StateT | None = None
        woken = threading.Lock()
        woken.acquire()
        while taken := self._next(woken):
            task, size_bytes = taken
            try:
                state = state if state is not None else self._new_state()
            except BaseException as error:
                logger.warning("a thread's state could not be made", exc_info=error)
                end(task.failed, error)
            else:
                run_guarded(task, state)
            with self._lock:
                self._bounds.done(size_bytes)
        if state is not None:
            end(state.close)

    def _next(self, woken: threading.Lock) -> tuple[Task[StateT], int] | None:
        """A task to run, waiting for one; None when the pool stops."""
        while True:
            with self._lock:
                taken = self._bounds.take()
                if taken is not None or self._stopping:
                    return taken
                self._idle.append(woken)
            woken.acquire()

    def _new_state(self) -> StateT:
        state = self._make_state()
        with self._lock:
            self._states.append(state)
        return state


class InlinePool(Generic[StateT]):
    """No threads: tasks wait until `step` runs the first of them, on the caller's thread."""

    def __init__(
        self, make_state: Callable[[], StateT], tasks_max: int, bytes_max: int
    ) -> None:
        self._make_state = make_state
        self._state: StateT | None = None
        self._bounds: Bounds[StateT] = Bounds(tasks_max, bytes_max)
        self._stopped = False

    def submit(self, task: Task[StateT], size_bytes: int = 0) -> bool:
        return not self._stopped and self._bounds.admit(task, size_bytes)

    def waiting(self) -> int:
        return self._bounds.waiting

    def bytes_in_flight(self) -> int:
        return self._bounds.bytes_in_flight

    def step(self) -> bool:
        """Run the first waiting task to its end; False if there is none."""
        taken = self._bounds.take()
        if taken is None:
            return False
        task, size_bytes = taken
        try:
            if self._state is None:
                self._state = self._make_state()
        except BaseException as error:
            task.failed(error)
        else:
            run_guarded(task, self._state)
        self._bounds.done(size_bytes)
        return True

    def stop(self, timeout_s: float) -> bool:
        self._stopped = True
        for task in self._bounds.clear():
            task.dropped()
        state, self._state = self._state, None
        if state is not None:
            state.close()
        return True


class Loop:
    """One named daemon thread for a client with a loop of its own: `body` runs once, to its end,
    and the owner has its own way to end it."""

    def __init__(self, name: str, body: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=self._run, args=(body,), name=name, daemon=True)
        self._thread.start()

    @staticmethod
    def _run(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException:
            logger.exception("a thread ended by an error")

    def join(self, timeout_s: float) -> bool:
        """True if the thread has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()
