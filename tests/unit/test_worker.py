"""One rank's jobs: what is saved is what is loaded, every job ends once, every block is named."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import pytest

from connector.clock import ManualClock, SystemClock
from connector.errors import StoreUnavailable
from connector.ids import NO_SESSION, JobId, Namespace, NodeId
from connector.meta import BlockOutcome, JobKind, Placed, StepMeta
from connector.session import short
from store_worker import worker as worker_module
from store_worker.codec import HEADER_BYTES
from store_worker.worker import StoreWorker
from tests.unit.worker_kit import (
    CORRUPT,
    DECLINED,
    FAILED,
    MISSING,
    OK,
    SESSION,
    TIMED_OUT,
    Rig,
    names,
)

Change = Callable[[bytes], bytes]


def flip(at: int) -> Change:
    def change(data: bytes) -> bytes:
        changed = bytearray(data)
        changed[at] ^= 1
        return bytes(changed)

    return change


@pytest.mark.parametrize("inline", [True, False])
def test_saved_pages_come_back_in_other_pages(inline: bool) -> None:
    rig = Rig(inline=inline, clock=None if inline else SystemClock())
    rig.stored(range(10), 100)
    rig.load(range(30, 40), 100)
    [result] = rig.results(1)
    assert names(result.outcomes) == [OK] * 10
    assert all(rig.holds(30 + i, 100 + i) for i in range(10))
    assert (result.kind, result.rank, result.session) == (JobKind.LOAD, 0, SESSION)
    assert result.blocks == tuple(range(30, 40))
    assert result.bytes_moved == 10 * rig.cache.block_bytes
    assert rig.worker.close(5.0)


def test_an_empty_step_does_nothing() -> None:
    rig = Rig()
    rig.worker.submit(StepMeta())
    report = rig.worker.poll()
    assert (report.results, report.counters, rig.worker.pending()) == ((), {}, 0)


def test_ranks_namespaces_and_stores_do_not_meet() -> None:
    rig = Rig()
    rig.stored(range(3))
    rig.load(range(10, 13), namespace=Namespace(bytes(16)))
    assert rig.outcomes() == [MISSING] * 3
    rig.load(range(10, 13), store=b"otherone")
    assert rig.outcomes() == [MISSING] * 3
    other = Rig(rank=1)
    other.stores[0].values.update(rig.stores[0].values)
    other.load(range(3))
    assert other.outcomes() == [MISSING] * 3


# ---- what is found in the store ----------------------------------------------------------------


def test_fault_15_missing_and_broken_blocks_are_named_one_by_one() -> None:
    rig = Rig()
    rig.stored(range(6))
    rig.tamper(2, lambda data: None)
    rig.tamper(4, flip(HEADER_BYTES + 5))
    rig.load(range(20, 26))
    [result] = rig.results(1)
    assert names(result.outcomes) == [OK, OK, MISSING, OK, CORRUPT, OK]
    assert result.ok_prefix == 2
    assert result.bytes_moved == 4 * rig.cache.block_bytes
    assert all(rig.holds(20 + i, i) for i in (0, 1, 3, 5))


@pytest.mark.parametrize("at", [0, 4, 6, 8, 16, 32, 40, 48, HEADER_BYTES, -1])
def test_fault_14_any_flipped_byte_is_found(at: int) -> None:
    rig = Rig()
    rig.stored([0])
    rig.tamper(0, flip(at))
    rig.load([1])
    assert rig.outcomes() == [CORRUPT]


@pytest.mark.parametrize(
    "change", [lambda d: d[:-1], lambda d: d + b"x", lambda d: b"", lambda d: d[:50]]
)
def test_fault_44_truncated_objects_are_corrupt(change: Change) -> None:
    rig = Rig()
    rig.stored([0])
    rig.tamper(0, change)
    rig.load([1])
    assert rig.outcomes() == [CORRUPT]


@pytest.mark.parametrize("checksums", [True, False])
def test_fault_13_another_objects_bytes_are_found_with_or_without_checksums(
    checksums: bool,
) -> None:
    rig = Rig(checksums=checksums)
    rig.stored(range(2))
    zero, one = rig.object(0), rig.object(1)
    rig.tamper(0, lambda _: one)
    rig.tamper(1, lambda _: zero)
    rig.load([10, 11])
    assert rig.outcomes() == [CORRUPT, CORRUPT]


@pytest.mark.parametrize(("checksums", "found"), [(True, CORRUPT), (False, OK)])
def test_swapped_payloads_need_the_checksum(checksums: bool, found: object) -> None:
    rig = Rig(checksums=checksums)
    rig.stored(range(2))
    payloads = [rig.object(i)[HEADER_BYTES:] for i in range(2)]
    for i in range(2):
        rig.tamper(i, lambda data, i=i: data[:HEADER_BYTES] + payloads[1 - i])
    rig.load([10, 11])
    assert rig.outcomes() == [found, found]
    assert rig.holds(10, 1) is not checksums or found is CORRUPT


# ---- nodes -------------------------------------------------------------------------------------


def over(rig: Rig, counts: Sequence[int]) -> list[Placed]:
    return [Placed(rig.nodes[i % len(rig.nodes)], count) for i, count in enumerate(counts)]


def test_a_job_over_several_nodes() -> None:
    rig = Rig(nodes=3)
    rig.fill(range(12), 0)
    rig.save(range(12), placed=over(rig, [3, 4, 1, 4]))
    assert rig.outcomes() == [OK] * 12
    assert [len(store.values) for store in rig.stores] == [7, 4, 1]
    rig.load(range(20, 32), placed=over(rig, [3, 4, 1, 4]))
    assert rig.outcomes() == [OK] * 12
    assert all(rig.holds(20 + i, i) for i in range(12))


@pytest.mark.parametrize("kind", ["save", "load"])
def test_a_node_that_is_down_takes_only_its_own_blocks_along(kind: str) -> None:
    rig = Rig(nodes=2)
    rig.fill(range(9), 0)
    rig.save(range(9), placed=over(rig, [3, 3, 3]))
    assert rig.outcomes() == [OK] * 9
    rig.stores[1].up = False
    getattr(rig, kind)(range(9), placed=over(rig, [3, 3, 3]))
    assert rig.outcomes() == [OK] * 3 + [FAILED] * 3 + [OK] * 3


def test_an_unknown_node() -> None:
    rig = Rig(inline=False, clock=SystemClock())
    rig.load([1, 2], placed=[Placed(NodeId("elsewhere:1/0"), 2)])
    assert rig.outcomes() == [FAILED, FAILED]
    rig.worker.close(5.0)


def test_a_restarted_node_has_nothing_of_its_former_life() -> None:
    rig = Rig()
    asked: list[str] = []
    rig.stored(range(2))
    before = rig.stores[0].incarnation
    rig.stores[0].hook = lambda operation, keys: asked.append(operation)
    rig.load([5, 6], placed=[Placed(rig.nodes[0], 2, before)])
    assert rig.outcomes() == [OK, OK]
    asked.clear()
    rig.stores[0].restart()
    rig.load([5, 6], placed=[Placed(rig.nodes[0], 2, before)])
    assert rig.outcomes() == [MISSING, MISSING]
    rig.save([0, 1], placed=[Placed(rig.nodes[0], 2, before)])
    assert rig.outcomes() == [FAILED, FAILED]
    assert "get" not in asked and "put" not in asked and not rig.stores[0].values


def test_a_full_node() -> None:
    rig = Rig()
    rig.stores[0].bytes_max = 3 * (rig.cache.block_bytes + 300)
    rig.fill(range(5), 0)
    rig.save(range(5))
    assert rig.outcomes() == [OK, OK, OK, FAILED, FAILED]
    rig.load(range(10, 15))
    assert rig.outcomes() == [OK, OK, OK, MISSING, MISSING]


# ---- limits and deadlines ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["save", "load"])
def test_over_the_byte_limit_a_job_is_declined_at_once(kind: str) -> None:
    rig = Rig()
    size = 10 * rig.cache.block_bytes
    rig = Rig(save_bytes_in_flight_max=size, load_bytes_in_flight_max=size)
    first = getattr(rig, kind)(range(6))
    second = getattr(rig, kind)(range(6))
    [declined] = rig.worker.poll().results
    assert declined.job == second and names(declined.outcomes) == [DECLINED] * 6
    [ended] = rig.results(1)
    assert ended.job == first
    getattr(rig, kind)(range(6))
    assert DECLINED not in rig.outcomes()


def test_a_job_that_waited_past_its_deadline_does_no_io() -> None:
    rig = Rig()
    asked: list[str] = []
    rig.stores[0].hook = lambda operation, keys: asked.append(operation)
    rig.save(range(3), deadline_s=2.0)
    rig.load(range(3), deadline_s=3.0)
    assert isinstance(rig.clock, ManualClock)
    rig.clock.advance(3.0)
    assert [names(r.outcomes) for r in rig.results(2)] == [[TIMED_OUT] * 3] * 2
    assert asked == []


def test_the_deadline_counts_from_submit_also_between_nodes() -> None:
    rig = Rig(nodes=2)
    rig.fill(range(4), 0)
    clock = rig.clock
    assert isinstance(clock, ManualClock)
    rig.stores[0].hook = lambda operation, keys: clock.advance(3.0) if operation == "put" else None
    rig.save(range(4), placed=over(rig, [2, 2]), deadline_s=4.0)
    clock.advance(2.0)
    assert rig.outcomes() == [TIMED_OUT] * 4
    rig.save(range(4), placed=over(rig, [2, 2]), deadline_s=3.0)
    rig.stores[0].hook = lambda operation, keys: None
    rig.stores[1].hook = lambda operation, keys: clock.advance(9.0)
    assert rig.outcomes() == [OK, OK, TIMED_OUT, TIMED_OUT]


def test_fault_39_a_late_load_is_counted() -> None:
    rig = Rig()
    rig.stored([0])
    rig.worker.poll()
    assert isinstance(rig.clock, ManualClock)
    rig.load([1], deadline_s=1.0)
    rig.clock.advance(2.0)
    rig.run()
    counters = rig.worker.poll().counters
    assert counters["load_late"] == 1
    assert counters["load_objects{outcome=TIMED_OUT}"] == 1


# ---- whatever is raised ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [StoreUnavailable("x"), RuntimeError("x"), KeyError("x"), MemoryError()]
)
@pytest.mark.parametrize("kind", ["save", "load"])
def test_fault_29_38_every_exception_becomes_outcomes(error: Exception, kind: str) -> None:
    rig = Rig()
    rig.stored(range(3))

    def hook(operation: str, keys: Sequence[bytes]) -> None:
        raise error

    rig.stores[0].hook = hook
    getattr(rig, kind)(range(3))
    assert rig.outcomes() == [FAILED] * 3
    rig.stores[0].hook = None
    getattr(rig, kind)(range(3))
    assert rig.outcomes() == [OK] * 3


@pytest.mark.parametrize(
    "fields",
    [
        {"placed": [Placed(NodeId("n"), 1)]},
        {"placed": [Placed(NodeId("n"), 2), Placed(NodeId("n"), 2)]},
        {"hashes": ()},
        {"namespace": Namespace(b"short")},
        {"store": b""},
        {"blocks": (1, 1 << 20, 2)},
        {"blocks": (-1, 1, 2)},
    ],
)
@pytest.mark.parametrize("kind", ["save", "load"])
def test_fault_40_malformed_jobs_end_too(fields: dict[str, object], kind: str) -> None:
    rig = Rig()
    rest = {name: value for name, value in fields.items() if name != "blocks"}
    getattr(rig, kind)(fields.get("blocks", range(3)), **rest)
    found = rig.outcomes()
    assert len(found) == 3 and OK not in found
    rig.stored(range(3))


def test_a_job_id_is_used_once() -> None:
    rig = Rig()
    rig.save([1], job=7_000_000)
    with pytest.raises(AssertionError, match="submitted before"):
        rig.save([1], job=7_000_000)


# ---- threads -----------------------------------------------------------------------------------


def test_saves_let_loads_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "GIVE_WAY_S", 20.0)
    rig = Rig(inline=False, clock=SystemClock())
    rig.stored(range(4))
    in_put, go, second = threading.Event(), threading.Event(), threading.Event()
    order: list[str] = []

    def hook(operation: str, keys: Sequence[bytes]) -> None:
        saving = threading.current_thread().name.startswith("skv-save")
        if operation == "get":
            assert second.wait(20)
        elif saving and "put" in order:
            second.set()  # the second save is at work, and only the load keeps it from its put
        if operation in ("put", "get"):
            order.append(operation)
        if operation == "put" and not in_put.is_set():
            in_put.set()
            assert go.wait(20)

    rig.stores[0].hook = hook
    rig.save(range(2), 50)
    assert in_put.wait(20)
    rig.save(range(2, 4), 52)
    rig.load(range(10, 14))
    go.set()
    results = rig.results(3)
    assert order == ["put", "get", "put"]
    assert all(names(r.outcomes) == [OK] * len(r.outcomes) for r in results)
    rig.worker.close(5.0)


def test_submit_and_poll_never_wait_for_a_stuck_node() -> None:
    rig = Rig(inline=False, clock=SystemClock())
    stuck, go = threading.Event(), threading.Event()

    def hook(operation: str, keys: Sequence[bytes]) -> None:
        stuck.set()
        assert go.wait(20)

    rig.stores[0].hook = hook
    rig.fill(range(4), 0)
    for _ in range(50):
        rig.save(range(4))
        rig.load(range(4))
        assert rig.worker.poll().results == ()
    assert stuck.wait(20)
    assert rig.worker.pending() == 100
    go.set()
    assert {len(r.outcomes) for r in rig.results(100)} == {4}
    assert rig.worker.close(5.0)


def test_close_ends_every_job() -> None:
    rig = Rig(inline=False, clock=SystemClock())
    stuck, go = threading.Event(), threading.Event()

    def hook(operation: str, keys: Sequence[bytes]) -> None:
        stuck.set()
        assert go.wait(20)

    rig.stores[0].hook = hook
    jobs = [rig.load(range(4)) for _ in range(5)]
    assert stuck.wait(20)
    assert not rig.worker.close(0.1), "one load is still stuck"
    assert rig.worker.pending() == 5
    declined = rig.worker.poll().results
    assert {r.job for r in declined} == set(jobs[1:])
    assert {r.outcomes for r in declined} == {bytes([DECLINED]) * 4}
    late = rig.load(range(4))
    [refused] = rig.worker.poll().results
    assert (refused.job, refused.outcomes) == (late, bytes([DECLINED]) * 4)
    go.set()
    assert rig.worker.close(20.0)
    assert [r.job for r in rig.worker.poll().results] == jobs[:1]
    assert rig.worker.pending() == 0


def test_on_close_is_called_once() -> None:
    calls: list[int] = []
    rig = Rig()
    worker = StoreWorker(rig.config, 0, rig.cache, SystemClock(), {}, lambda: calls.append(1))
    assert worker.close(5.0) and worker.close(5.0)
    assert calls == [1]


# ---- what is told ------------------------------------------------------------------------------


def test_counters() -> None:
    rig = Rig()
    rig.fill(range(3), 0)
    rig.save(range(3))
    rig.save(range(2), 10, session=NO_SESSION)
    rig.run()
    rig.load(range(20, 24))
    rig.run()
    counters, block = rig.worker.poll().counters, rig.cache.block_bytes
    assert counters["save_jobs{session=yes}"] == counters["save_jobs{session=no}"] == 1
    assert counters["save_bytes"] == 5 * block and counters["load_bytes"] == 3 * block
    assert counters["save_objects{outcome=OK}"] == 5
    assert counters["load_objects{outcome=OK}"] == 3
    assert counters["load_objects{outcome=MISSING}"] == 1
    assert all(isinstance(value, int) for value in counters.values())


def test_the_log_line_names_the_session_as_a_digest(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    with caplog.at_level(logging.DEBUG, "store_worker.worker"):
        rig.stored(range(2))
    [line] = [r.message for r in caplog.records if r.message.startswith("save ")]
    assert f"session={short(SESSION)}" in line and "blocks=2 ok=2" in line
    assert SESSION.hex() not in line


def test_a_save_that_has_lost_its_pages_sends_nothing_of_what_they_hold_now() -> None:
    rig = Rig()
    rig.fill(range(3), 50)
    job = rig.save(range(3), 50)
    rig.worker.revoke(StepMeta(revoked=(job, JobId(999_999))))
    rig.fill(range(3), 90)  # somebody else's, from here on
    assert rig.outcomes() == [BlockOutcome.DECLINED] * 3
    assert not rig.stores[0].values
