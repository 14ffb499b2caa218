"""Calls that nobody waits for any more, on a library that does what the test says."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from connector.clock import ManualClock, SystemClock
from connector.errors import StoreUnavailable
from connector.meta import BlockOutcome
from store_worker.backends import mooncake_ops as ops
from store_worker.backends.base import GetItem
from store_worker.backends.mooncake_bulk import BATCH_BYTES, Mover, get_all
from store_worker.backends.mooncake_calls import BROKEN_S, NO_USE, THREADS, Call, Life, Use
from store_worker.backends.mooncake_client import MooncakeClient
from store_worker.backends.mooncake_library import MOST_WAIT_S
from store_worker.backends.mooncake_ops import DIFFERENT, Shape
from store_worker.backends.mooncake_url import parse_mooncake_url
from tests.waiting import eventually

ARENA = 1 << 20


class Replica:
    """One of 99 bytes in memory."""

    size = 99

    def is_memory_replica(self) -> bool:
        return True

    def get_memory_descriptor(self) -> Replica:
        return self

    @property
    def buffer_descriptor(self) -> Replica:
        return self


class FakeLibrary:
    """Objects in a dict; `gate` blocks transfers until it is set."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self.log: list[str] = []
        self.objects: dict[str, str] = {}
        self.closed = False
        self.refuses = False  # transfers fail

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        return 0

    def batch_put_session_start(self, keys: list[str], sizes: list[int], config: Any) -> list[int]:
        self.log.append("start")
        return [-705 if key in self.objects else 0 for key in keys]

    def batch_put_from_multi_buffer_ranges(
        self, keys: list[str], ptrs: Any, sizes: list[list[int]], offsets: Any
    ) -> list[int]:
        self.log.append("send")
        self.entered.release()
        assert self.gate.wait(20)
        pairs = zip(keys, sizes, strict=True)
        return [-800 if key.startswith("bad") else sum(size) for key, size in pairs]

    def batch_put_session_end(self, keys: list[str]) -> list[int]:
        self.log.append("end " + ",".join(keys))
        self.objects.update(dict.fromkeys(keys, "whole"))
        return [0] * len(keys)

    def batch_put_session_revoke(self, keys: list[str]) -> list[int]:
        self.log.append("revoke " + ",".join(keys))
        return [0] * len(keys)

    def batch_get_into_multi_buffers(
        self, keys: list[str], ptrs: Any, sizes: list[list[int]]
    ) -> list[int]:
        self.log.append("get")
        return [-800 if self.refuses else sum(size) for size in sizes]

    def get_into_ranges(
        self, ptrs: Any, keys: list[list[str]], to: Any, of: Any, sizes: Any
    ) -> list[list[list[int]]]:
        codes = {"whole": 0, "unfinished": -703}
        return [[[codes.get(self.objects.get(k, ""), -704)]] for [k] in keys]

    def batch_get_replica_desc(self, keys: list[str]) -> dict[str, list[Any]]:
        return {key: [Replica()] for key in keys if self.objects.get(key) == "whole"}

    def close(self) -> int:
        self.closed = True
        return 0


@pytest.fixture
def library() -> Iterator[FakeLibrary]:
    fake = FakeLibrary()
    yield fake
    fake.gate.set()


@pytest.fixture
def life(library: FakeLibrary) -> Iterator[Life]:
    made = Life(library, ARENA, SystemClock())  # type: ignore[arg-type]
    yield made
    library.gate.set()
    made.retire()
    eventually(made.idle)
    made.stop_threads()


def put_call(life: Life, keys: list[str], deadline_s: float, use: Use = NO_USE) -> Call[list[int]]:
    clock = SystemClock()
    shapes = [Shape([0], [10], 10)] * len(keys)
    call = Call(
        lambda library, asked: ops.put_objects(library, asked, keys, shapes, lambda _: None),
        clock, clock.now() + deadline_s, use,
    )
    assert life.submit(call)
    return call


def test_a_put_that_is_waited_for_is_ended(library: FakeLibrary, life: Life) -> None:
    call = put_call(life, ["a", "bad", "c"], 10)
    assert call.wait()
    assert call.result() == [0, -800, 0]
    assert library.log == ["start", "send", "end a,c", "revoke bad"]


def test_an_abandoned_put_is_revoked_and_its_memory_comes_back_after_it(
    library: FakeLibrary, life: Life
) -> None:
    clock, late = SystemClock(), threading.Event()
    extent = life.arena.take(ARENA, clock.now())
    assert extent is not None
    library.gate.clear()
    call = put_call(life, ["a"], 0.05, Use((extent,), late.set))
    assert not call.wait()
    assert library.entered.acquire(timeout=10)
    assert life.arena.free_bytes() == 0 and not late.is_set()
    library.gate.set()
    eventually(life.idle)
    assert late.is_set()
    assert life.arena.free_bytes() == ARENA
    assert library.log == ["start", "send", "revoke a"] and not library.objects


def test_memory_of_a_call_that_took_too_long_is_never_used_again(library: FakeLibrary) -> None:
    clock = ManualClock()
    life = Life(library, ARENA, clock)  # type: ignore[arg-type]
    extent = life.arena.take(ARENA, clock.now() + 1)
    assert extent is not None
    library.gate.clear()
    shapes = [Shape([0], [10], 10)]
    call = Call(
        lambda lib, asked: ops.put_objects(lib, asked, ["a"], shapes, lambda _: None),
        clock, clock.now() + 0.05, Use((extent,)),
    )
    assert life.submit(call)
    assert library.entered.acquire(timeout=10)
    assert not call.wait()
    clock.advance(BROKEN_S + 1)
    assert life.broken()
    clock.advance(MOST_WAIT_S)
    library.gate.set()
    eventually(life.idle)
    assert life.arena.free_bytes() == 0
    life.retire()
    life.stop_threads()


def test_what_waits_for_a_thread_is_dropped_when_the_life_ends(
    library: FakeLibrary, life: Life
) -> None:
    library.gate.clear()
    stuck = [put_call(life, [f"s{i}"], 20) for i in range(THREADS)]
    for _ in stuck:
        assert library.entered.acquire(timeout=10)
    waiting = put_call(life, ["w"], 20)
    life.retire()
    assert waiting.wait()
    with pytest.raises(StoreUnavailable):
        waiting.result()
    assert not life.submit(waiting)
    assert not life.idle()
    library.gate.set()
    assert all(call.wait() for call in stuck)
    eventually(life.idle)


def test_an_error_of_the_library_is_a_store_error(life: Life) -> None:
    def work(library: Any, asked: Any) -> list[int]:
        raise TypeError("incompatible function arguments")

    clock = SystemClock()
    call = Call(work, clock, clock.now() + 10)
    assert life.submit(call) and call.wait()
    with pytest.raises(StoreUnavailable, match="incompatible"):
        call.result()


def test_abandoning_a_call_wakes_who_waits(library: FakeLibrary, life: Life) -> None:
    library.gate.clear()
    call = put_call(life, ["a"], 60)
    assert library.entered.acquire(timeout=10)
    call.abandon()
    assert not call.wait()


def test_an_object_that_somebody_else_is_writing(library: FakeLibrary, life: Life) -> None:
    library.objects["a"] = "unfinished"
    call = put_call(life, ["a"], 10)
    library.objects["a"] = "whole"
    assert call.wait()
    # There now, but of another length: it has to be written again.
    assert call.result() == [DIFFERENT]
    library.objects["b"] = "unfinished"
    call = put_call(life, ["b"], 0.2)
    assert not call.wait() or call.result() == [-703]


def test_a_client_that_is_stuck_is_replaced() -> None:
    made: list[FakeLibrary] = []

    def open_(url: Any) -> Any:
        made.append(FakeLibrary())
        return made[-1]

    clock = ManualClock()
    url = parse_mooncake_url("mooncake://127.0.0.1:1?admin=http://127.0.0.1:1")
    client = MooncakeClient(url, ARENA, clock, open_)
    first = eventually(client.current)
    made[0].gate.clear()
    shapes = [Shape([0], [10], 10)]
    call = client.ask(
        lambda lib, asked: ops.put_objects(lib, asked, ["a"], shapes, lambda _: None),
        clock.now() + 0.01,
    )
    assert made[0].entered.acquire(timeout=10)
    clock.advance(BROKEN_S + 1)
    second = eventually(lambda: client.current() if client.current() is not first else None)
    assert second is not None and len(made) == 2
    assert client.drain_counters()["mooncake_rebuilds"] == 1
    assert client.answer(lambda lib, _: lib is made[1], clock.now() + 60)
    made[0].gate.set()
    assert not call.wait() or call.result() == [0]
    eventually(first.idle)  # type: ignore[union-attr]
    assert not made[0].closed  # closing costs everybody a second: not before it must be
    client.close()
    assert client.closed(10)


def test_no_client_while_it_can_not_be_made() -> None:
    tries = threading.Semaphore(0)

    def open_(url: Any) -> Any:
        tries.release()
        raise StoreUnavailable("the master is away")

    clock = SystemClock()
    url = parse_mooncake_url("mooncake://127.0.0.1:1?admin=http://127.0.0.1:1")
    client = MooncakeClient(url, ARENA, clock, open_)
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="away"):
            client.life(clock.now() + 10)
    assert tries.acquire(timeout=5) and tries.acquire(timeout=5)  # it goes on trying
    client.close()
    assert client.closed(10)


def test_one_call_finds_out_whether_a_peer_is_back(library: FakeLibrary) -> None:
    """The first of a get's calls: those behind it wait for what it found, and go on."""
    clock = ManualClock()
    url = parse_mooncake_url("mooncake://127.0.0.1:1?admin=http://127.0.0.1:1")
    client = MooncakeClient(url, ARENA, clock, lambda _: library)  # type: ignore[arg-type,return-value]
    assert eventually(client.current)
    client.gate("s").failed("it was away")
    page = memoryview(bytearray(BATCH_BYTES))
    items = [GetItem(b"%d" % i, [page]) for i in range(3)]
    clock.advance(1.0)
    deadline = clock.now() + 100
    mover = Mover(client, "s", clock, deadline, lambda call: None)
    assert get_all(mover, items, None) == [BlockOutcome.OK] * 3 and client.gate("s").open
    assert library.log == ["get"] * 3
    client.gate("s").failed("it was away")
    clock.advance(1.0)
    library.refuses = True
    assert get_all(mover, items, None) == [BlockOutcome.FAILED] * 3
    assert library.log == ["get"] * 4  # the others were not asked for
    client.close()
    assert client.closed(10)
