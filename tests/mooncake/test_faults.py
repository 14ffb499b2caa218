"""Owners and masters that die or fall silent: nobody waits past a deadline, no late byte lands."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from connector.errors import StoreError, StoreUnavailable
from connector.meta import BlockOutcome
from store_worker.backends.base import DataNode, GetItem
from store_worker.backends.mooncake import Membership, MooncakeNode
from tests.contract.data_node_kit import TTL_MS, get_items, joined, put_items
from tests.mooncake.cluster import MooncakeCluster
from tests.waiting import eventually

OK, MISSING, FAILED = BlockOutcome.OK, BlockOutcome.MISSING, BlockOutcome.FAILED
TIMED_OUT = BlockOutcome.TIMED_OUT
SIZES = [112, 1 << 20]
DEADLINE_S = 1.0
SLACK_S = 1.0
"""What a busy machine may add to a deadline."""

Pair = tuple[MooncakeNode, MooncakeNode]


@pytest.fixture
def pair(own_cluster: MooncakeCluster) -> Iterator[Pair]:
    """A node for each owner's segment."""
    member = Membership(own_cluster.url, own_cluster.config(), own_cluster.clock)
    first, second = (own_cluster.node(name) for name in own_cluster.names)
    yield first, second
    for node in (first, second, member):
        node.close()


def filled(node: DataNode, cluster: MooncakeCluster, name: bytes, count: int = 8) -> list[GetItem]:
    """Objects stored through a node, and where to read them to."""
    items = put_items(count, SIZES, name)
    assert node.put(items, TTL_MS, cluster.soon()) == [OK] * count
    return get_items(items)


def within(seconds: float, call: Callable[[], object]) -> object:
    began = time.monotonic()
    found = call()
    took = time.monotonic() - began
    assert took < seconds + SLACK_S, f"{took:.2f} s"
    return found


def works(node: DataNode, cluster: MooncakeCluster, name: bytes) -> bool:
    """Put and get, without raising."""
    items = put_items(2, SIZES, name)
    found = get_items(items)
    try:
        done = node.put(items, TTL_MS, cluster.soon(5)) == [OK] * 2
        return done and node.get(found, cluster.soon(5)) == [OK] * 2
    except StoreError:
        return False


def test_a_killed_owner_costs_only_what_lies_there(
    own_cluster: MooncakeCluster, pair: Pair
) -> None:
    cluster, (first, second) = own_cluster, pair
    lost, kept = filled(first, cluster, b"lost"), filled(second, cluster, b"kept")
    first.incarnation(cluster.soon())
    cluster.owners[0].kill()
    for _ in range(3):
        outcomes = within(DEADLINE_S, lambda: first.get(lost, cluster.soon(DEADLINE_S)))
        assert set(outcomes) <= {FAILED, TIMED_OUT}
        assert second.get(kept, cluster.soon()) == [OK] * 8
    # The index hears of it long before the master gives the segment up.
    with pytest.raises(StoreUnavailable):
        within(0.5, lambda: first.incarnation(cluster.soon()))
    more = put_items(2, SIZES, b"more")
    assert OK not in within(DEADLINE_S, lambda: first.put(more, TTL_MS, cluster.soon(DEADLINE_S)))
    assert second.put(more, TTL_MS, cluster.soon()) == [OK] * 2
    eventually(lambda: cluster.names[0] not in (cluster.listed() or ()), 15.0)
    assert eventually(lambda: second.get(lost, cluster.soon()), 5.0) == [MISSING] * 8


def test_a_killed_owner_comes_back_empty(own_cluster: MooncakeCluster, pair: Pair) -> None:
    cluster, (first, _) = own_cluster, pair
    lost, before = filled(first, cluster, b"lost"), first.incarnation(cluster.soon())
    cluster.owners[0].kill()
    eventually(lambda: cluster.names[0] not in (cluster.listed() or ()), 15.0)
    cluster.owners[0].start()
    assert eventually(lambda: _incarnation(first, cluster), 20.0) != before
    eventually(lambda: works(first, cluster, b"anew"), 30.0, "the segment to be used again")
    assert first.get(lost, cluster.soon()) == [MISSING] * 8
    [item] = put_items(1, SIZES, b"anew")
    assert first.where([item.key], cluster.soon()) == {item.key: [cluster.names[0]]}


def _incarnation(node: DataNode, cluster: MooncakeCluster) -> bytes | None:
    try:
        return node.incarnation(cluster.soon())
    except StoreError:
        return None


def test_a_silent_owner_and_no_late_byte(own_cluster: MooncakeCluster, pair: Pair) -> None:
    cluster, (first, second) = own_cluster, pair
    items, kept = filled(first, cluster, b"late"), filled(second, cluster, b"kept")
    whole = first._client().life(cluster.soon()).arena
    assert whole.free_bytes() == whole.size
    cluster.owners[0].pause()
    outcomes = within(DEADLINE_S, lambda: first.get(items, cluster.soon(DEADLINE_S)))
    assert outcomes == [TIMED_OUT] * 8
    assert whole.free_bytes() < whole.size  # out of use: the call has not returned
    # The next one is refused at once, and whoever is at home elsewhere goes on.
    assert OK not in within(0.1, lambda: first.get(items, cluster.soon(DEADLINE_S)))
    with pytest.raises(StoreUnavailable):
        first.ready(cluster.soon())
    assert within(2.0, lambda: second.get(kept, cluster.soon())) == [OK] * 8
    assert within(2.0, lambda: works(second, cluster, b"meanwhile"))
    cluster.owners[0].resume()
    eventually(lambda: whole.free_bytes() == whole.size, 40.0, "the late call to return")
    assert all(not any(joined(item)) for item in items)
    eventually(lambda: works(first, cluster, b"again"), 30.0, "the segment to be used again")


def test_a_late_put_is_never_seen(own_cluster: MooncakeCluster, pair: Pair) -> None:
    cluster, (first, second) = own_cluster, pair
    filled(first, cluster, b"warm", 1)
    page = bytearray(b"a" * (1 << 20))
    [item] = put_items(1, [112], b"torn")
    item = item._replace(parts=[item.parts[0], memoryview(page)])
    cluster.owners[0].pause()
    outcomes = within(DEADLINE_S, lambda: first.put([item], TTL_MS, cluster.soon(DEADLINE_S)))
    assert outcomes == [TIMED_OUT]
    page[:] = b"b" * len(page)  # the page has a new owner, while the call still reads it
    arena = first._client().life(cluster.soon()).arena
    cluster.owners[0].resume()
    eventually(lambda: arena.free_bytes() == arena.size, 40.0, "the late call to return")
    assert second.exists([item.key], cluster.soon()) == [False]
    eventually(
        lambda: second.put([item], TTL_MS, cluster.soon()) == [OK], 40.0, "it to be written"
    )
    [found] = get_items([item])
    assert second.get([found], cluster.soon()) == [OK]
    assert joined(found) == joined(item)


def test_a_silent_master(own_cluster: MooncakeCluster, pair: Pair) -> None:
    cluster, (first, _) = own_cluster, pair
    items = filled(first, cluster, b"silent")
    with paused_master(cluster):
        for _ in range(2):
            outcomes = within(DEADLINE_S, lambda: _outcomes(first, items, cluster))
            assert outcomes == [TIMED_OUT] * 8 or outcomes == [FAILED] * 8
        with pytest.raises(StoreError):
            within(DEADLINE_S, lambda: first.exists([b"x"], cluster.soon(DEADLINE_S)))
    eventually(lambda: works(first, cluster, b"again"), 40.0, "the master to be used again")


def _outcomes(node: DataNode, items: list[GetItem], cluster: MooncakeCluster) -> object:
    return node.get(items, cluster.soon(DEADLINE_S))


class paused_master:
    def __init__(self, cluster: MooncakeCluster) -> None:
        self._cluster = cluster

    def __enter__(self) -> None:
        self._cluster.pause_master()

    def __exit__(self, *_: object) -> None:
        self._cluster.resume_master()


def test_a_restarted_master(own_cluster: MooncakeCluster, pair: Pair) -> None:
    cluster, (first, _) = own_cluster, pair
    items = filled(first, cluster, b"master")
    cluster.kill_master()
    for _ in range(3):
        assert OK not in within(DEADLINE_S, lambda: _get_or_failed(first, items, cluster))
    cluster.start_master()
    eventually(lambda: cluster.names[0] in (cluster.listed() or ()), 60.0, "the owner to be back")
    eventually(lambda: works(first, cluster, b"again"), 60.0, "the master to be used again")
    assert first.get(items, cluster.soon()) == [MISSING] * 8


def _get_or_failed(
    node: DataNode, items: list[GetItem], cluster: MooncakeCluster
) -> list[BlockOutcome]:
    try:
        return node.get(items, cluster.soon(DEADLINE_S))
    except StoreError:
        return [FAILED] * len(items)


def test_other_threads_run_on_while_peers_are_silent(
    own_cluster: MooncakeCluster, pair: Pair
) -> None:
    cluster, (first, _) = own_cluster, pair
    items = filled(first, cluster, b"gil")
    stop, gaps = threading.Event(), [0.0]

    def tick() -> None:
        last = time.monotonic()
        while not stop.wait(0.002):
            now = time.monotonic()
            gaps[0], last = max(gaps[0], now - last), now

    ticking = threading.Thread(target=tick)
    ticking.start()
    try:
        cluster.owners[0].pause()
        first.get(items, cluster.soon(DEADLINE_S))
        with paused_master(cluster):
            _get_or_failed(first, items, cluster)
        cluster.owners[0].resume()
    finally:
        stop.set()
        ticking.join()
    assert gaps[0] < 0.5


def test_close_from_another_thread_breaks_a_stuck_call(
    own_cluster: MooncakeCluster, pair: Pair
) -> None:
    cluster, (first, _) = own_cluster, pair
    items = filled(first, cluster, b"stuck")
    cluster.owners[0].pause()
    began = threading.Event()
    found: list[object] = []

    def load() -> None:
        began.set()
        found.append(_get_or_failed_long(first, items, cluster))

    loading = threading.Thread(target=load)
    loading.start()
    began.wait()
    eventually(lambda: first.busy, 5.0, "the call to be under way")
    within(0.5, first.close)
    within(1.0, lambda: loading.join(10.0))
    assert found and OK not in found[0]  # type: ignore[operator]
    cluster.owners[0].resume()


def _get_or_failed_long(
    node: DataNode, items: list[GetItem], cluster: MooncakeCluster
) -> list[BlockOutcome]:
    try:
        return node.get(items, cluster.soon(60))
    except StoreError:
        return [FAILED] * len(items)


def test_nothing_there_at_the_start(own_cluster: MooncakeCluster) -> None:
    cluster = own_cluster
    cluster.kill_master()
    node = cluster.node(cluster.names[0])
    with pytest.raises(StoreError):
        within(3.0, lambda: node.ready(cluster.soon(3.0)))
    with pytest.raises(StoreUnavailable):
        within(0.5, lambda: node.ready(cluster.soon()))
    cluster.start_master()
    eventually(lambda: works(node, cluster, b"late start"), 60.0, "the master to be found")
    node.close()
