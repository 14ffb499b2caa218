"""Pools: bounds, one end per task, threads that survive, and the deterministic twin."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from store_worker.executor import InlinePool, Loop, ThreadPool
from tests.waiting import eventually

WAIT_S = 20.0


class Kept:
    """A thread's state."""

    def __init__(self) -> None:
        self.interrupted = threading.Event()
        self.closed = threading.Event()
        self.thread = threading.current_thread().name

    def interrupt(self) -> None:
        self.interrupted.set()

    def close(self) -> None:
        assert threading.current_thread().name == self.thread
        self.closed.set()


class Job:
    """Records how it ended."""

    def __init__(self, work: Callable[[Kept], None] = lambda kept: None) -> None:
        self._work = work
        self.ends: list[str] = []
        self.thread = ""

    def run(self, kept: Kept) -> None:
        self.thread = threading.current_thread().name
        self._work(kept)
        self.ends.append("run")

    def failed(self, error: BaseException) -> None:
        self.ends.append(f"failed {error}")

    def dropped(self) -> None:
        self.ends.append("dropped")


def fails(kept: Kept) -> None:
    raise RuntimeError("on purpose")


def pool(threads: int = 1, tasks: int = 8, size: int = 1000) -> ThreadPool[Kept]:
    return ThreadPool("test", threads, Kept, tasks, size)


def ended(job: Job) -> list[str]:
    return eventually(lambda: job.ends, WAIT_S)


def test_tasks_run_in_order_on_named_threads() -> None:
    order: list[int] = []
    work = pool()
    jobs = [Job(lambda kept, i=i: order.append(i)) for i in range(8)]
    assert all(work.submit(job) for job in jobs)
    assert ended(jobs[-1]) == ["run"]
    assert order == list(range(8))
    assert {job.thread for job in jobs} == {"test-0"}
    assert work.stop(WAIT_S)


def test_several_threads_each_with_its_own_state() -> None:
    meet = threading.Barrier(3, timeout=WAIT_S)
    states: list[Kept] = []

    def work(kept: Kept) -> None:
        states.append(kept)
        meet.wait()

    threads = pool(3)
    jobs = [Job(work) for _ in range(3)]
    assert all(threads.submit(job) for job in jobs)
    for job in jobs:
        assert ended(job) == ["run"]
    assert len({id(state) for state in states}) == 3
    assert threads.stop(WAIT_S)
    assert all(state.closed.is_set() for state in states)


def test_a_failure_is_the_tasks_own() -> None:
    work = pool()
    bad, good = Job(fails), Job()
    assert work.submit(bad) and work.submit(good)
    assert ended(good) == ["run"]
    assert bad.ends == ["failed on purpose"]
    assert bad.thread == good.thread
    assert work.stop(WAIT_S)


def test_a_task_that_can_not_even_fail_leaves_the_thread_alive() -> None:
    class Worse(Job):
        def failed(self, error: BaseException) -> None:
            raise SystemExit("worse")

    work = pool()
    good = Job()
    assert work.submit(Worse(fails)) and work.submit(good)
    assert ended(good) == ["run"]
    assert work.stop(WAIT_S)


def test_a_state_that_can_not_be_made_fails_the_task_and_is_tried_again() -> None:
    tries: list[int] = []

    def make() -> Kept:
        tries.append(1)
        if len(tries) == 1:
            raise RuntimeError("no state")
        return Kept()

    work: ThreadPool[Kept] = ThreadPool("test", 1, make, 8, 1000)
    first, second = Job(), Job()
    assert work.submit(first) and work.submit(second)
    assert ended(second) == ["run"]
    assert first.ends == ["failed no state"]
    assert work.stop(WAIT_S)


def test_the_count_is_bounded() -> None:
    go, begun = threading.Event(), threading.Event()

    def work(kept: Kept) -> None:
        begun.set()
        assert go.wait(WAIT_S)

    threads = pool(tasks=2)
    first = Job(work)
    assert threads.submit(first)
    assert begun.wait(WAIT_S)
    jobs = [Job() for _ in range(3)]
    assert [threads.submit(job) for job in jobs] == [True, True, False]
    assert threads.waiting() == 2
    go.set()
    assert ended(jobs[1]) == ["run"]
    assert jobs[2].ends == []
    assert threads.stop(WAIT_S)


def test_the_bytes_are_bounded_until_a_task_has_ended() -> None:
    go = threading.Event()
    threads = pool(size=1000)
    first = Job(lambda kept: go.wait(WAIT_S) and None)
    assert threads.submit(first, 600)
    assert not threads.submit(Job(), 401)
    assert threads.submit(Job(), 400)
    assert not threads.submit(Job(), 1)
    assert threads.submit(Job(), 0)
    go.set()
    eventually(lambda: threads.bytes_in_flight() == 0, WAIT_S)
    big = Job()
    assert threads.submit(big, 5000), "alone, a task may be larger than the limit"
    assert ended(big) == ["run"]
    assert threads.stop(WAIT_S)


def test_stop_drops_what_waits_and_lets_the_rest_end() -> None:
    go, begun = threading.Event(), threading.Event()

    def work(kept: Kept) -> None:
        begun.set()
        go.wait(WAIT_S)

    threads = pool()
    running, waiting = Job(work), Job()
    assert threads.submit(running) and threads.submit(waiting)
    assert begun.wait(WAIT_S)
    stopped: list[bool] = []
    stopper = threading.Thread(target=lambda: stopped.append(threads.stop(WAIT_S)))
    stopper.start()
    assert ended(waiting) == ["dropped"]
    assert not threads.submit(Job())
    go.set()
    stopper.join(WAIT_S)
    assert stopped == [True]
    assert running.ends == ["run"]


def test_stop_interrupts_what_is_stuck() -> None:
    states: list[Kept] = []

    def stuck(kept: Kept) -> None:
        states.append(kept)
        assert kept.interrupted.wait(WAIT_S)

    threads = pool()
    job = Job(stuck)
    assert threads.submit(job)
    eventually(lambda: states, WAIT_S)
    assert threads.stop(1.0)
    assert job.ends == ["run"] and states[0].closed.is_set()


def test_stop_tells_when_a_thread_does_not_end() -> None:
    go, begun = threading.Event(), threading.Event()

    def work(kept: Kept) -> None:
        begun.set()
        go.wait(WAIT_S)

    threads = pool()
    assert threads.submit(Job(work))
    assert begun.wait(WAIT_S)
    assert not threads.stop(0.05)
    go.set()
    assert threads.stop(WAIT_S)


def test_inline_tasks_run_when_told_to() -> None:
    work: InlinePool[Kept] = InlinePool(Kept, 3, 1000)
    jobs = [Job(), Job(fails), Job()]
    assert all(work.submit(job, 100) for job in jobs)
    assert not work.submit(Job(), 0)
    assert [job.ends for job in jobs] == [[], [], []]
    assert work.step() and work.step()
    assert [job.ends for job in jobs] == [["run"], ["failed on purpose"], []]
    assert (work.waiting(), work.bytes_in_flight()) == (1, 100)
    assert work.stop(0)
    assert jobs[2].ends == ["dropped"]
    assert not work.step() and not work.submit(Job())


def test_inline_state_failure() -> None:
    def make() -> Kept:
        raise RuntimeError("no state")

    work: InlinePool[Kept] = InlinePool(make, 3, 1000)
    job = Job()
    work.submit(job)
    assert work.step()
    assert job.ends == ["failed no state"]


@pytest.mark.parametrize("error", [None, RuntimeError("on purpose")])
def test_a_loop_runs_once_and_can_be_joined(error: Exception | None) -> None:
    go = threading.Event()

    def body() -> None:
        assert go.wait(WAIT_S)
        if error is not None:
            raise error

    loop = Loop("test-loop", body)
    assert not loop.join(0.01)
    go.set()
    assert loop.join(WAIT_S)
