"""Where objects lie, what goes together, what stays and what goes: on a real Mooncake."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator

import pytest

from connector.ids import NodeId
from connector.meta import BlockOutcome
from store_worker.backends.base import HintedNode, PutHints, PutItem
from store_worker.backends.factory import node_id, open_node
from store_worker.backends.mooncake import Membership, MooncakeNode, segment_names
from tests.contract.data_node_kit import TTL_MS, get_items, joined, put_items
from tests.mooncake.cluster import MooncakeCluster
from tests.waiting import eventually

OK, MISSING = BlockOutcome.OK, BlockOutcome.MISSING
SIZES = [112, 256 << 10]
SMALL = 64 << 20


@pytest.fixture(scope="module", autouse=True)
def member(cluster: MooncakeCluster) -> Iterator[Membership]:
    """Keeps the process's client for the whole module."""
    held = Membership(cluster.url, cluster.config(), cluster.clock)
    yield held
    held.close()


def stored(
    node: MooncakeNode, name: bytes, count: int, hints: PutHints, cluster: MooncakeCluster
) -> list[PutItem]:
    items = put_items(count, SIZES, name)
    assert node.put_hinted(items, hints, cluster.soon()) == [OK] * count
    return items


def share_at_home(
    cluster: MooncakeCluster, nodes: dict[int, MooncakeNode], placed: bool
) -> float:
    """20 conversations of 8 blocks; the share of bytes on each one's home, as the master says."""
    at_home = 0
    for number in range(20):
        home = number % 2
        name = b"%s-%d" % (b"placed" if placed else b"control", number)
        node = nodes[home] if placed else nodes[2]
        items = stored(node, name, 8, PutHints(), cluster)
        where = node.where([item.key for item in items], cluster.soon())
        assert len(where) == 8
        at_home += sum(segments == [cluster.names[home]] for segments in where.values())
    return at_home / 160


def test_objects_lie_at_home(cluster: MooncakeCluster) -> None:
    anywhere = cluster.node(node_id(cluster.url))
    nodes = dict(enumerate([*map(cluster.node, cluster.names), anywhere]))
    assert share_at_home(cluster, nodes, placed=True) == 1.0
    # The control: without placement it is a matter of chance.
    assert 0.2 < share_at_home(cluster, nodes, placed=False) < 0.8


def test_nodes_do_not_touch_each_others_objects(cluster: MooncakeCluster) -> None:
    first, second = map(cluster.node, cluster.names)
    items = stored(first, b"elsewhere", 3, PutHints(), cluster)
    keys = [item.key for item in items]
    assert second.get(get_items(items), cluster.soon()) == [MISSING] * 3
    assert second.delete(keys, cluster.soon()) == 0
    assert stored(second, b"elsewhere", 3, PutHints(), cluster)
    homes = [set(map(tuple, n.where(keys, cluster.soon()).values())) for n in (first, second)]
    assert homes == [{(name,)} for name in cluster.names]
    assert second.delete(keys, cluster.soon()) == 3
    found = get_items(items)
    assert first.get(found, cluster.soon()) == [OK] * 3
    assert [joined(item) for item in found] == [joined(item) for item in items]


def test_the_factory_knows_segments(cluster: MooncakeCluster) -> None:
    config = cluster.config()
    sizes = segment_names(cluster.url, config, cluster.clock)
    assert sizes == dict.fromkeys(cluster.names, 256 << 20)
    node = open_node(cluster.url, config, cluster.clock, name=cluster.names[1])
    assert isinstance(node, HintedNode)
    items = put_items(1, SIZES, b"factory")
    assert node.put(items, TTL_MS, cluster.soon()) == [OK]
    assert isinstance(node, MooncakeNode)
    where = node.where([items[0].key], cluster.soon())
    assert where == {items[0].key: [cluster.names[1]]}
    incarnations = {cluster.node(name).incarnation(cluster.soon()) for name in cluster.names}
    assert len(incarnations) == 2
    unplaced = open_node(cluster.url, config, cluster.clock)
    assert unplaced.ready(cluster.soon()) == unplaced.incarnation(cluster.soon())


def test_a_leased_object_is_gone_for_us_and_removed_later(cluster: MooncakeCluster) -> None:
    node = cluster.node(cluster.names[1])
    items = stored(node, b"leased", 6, PutHints(), cluster)
    keys = [item.key for item in items]
    assert node.get(get_items(items), cluster.soon()) == [OK] * 6
    assert node.delete(keys, cluster.soon()) == 6
    assert node.delete(keys, cluster.soon()) == 0
    assert node.exists(keys, cluster.soon()) == [False] * 6
    assert node.get(get_items(items), cluster.soon()) == [MISSING] * 6
    assert node.where(keys, cluster.soon()), "the lease should still hold"
    # Written again meanwhile: that one stays.
    assert node.put(items[:1], TTL_MS, cluster.soon()) == [OK]
    eventually(lambda: len(_listed(cluster, keys)) == 1, 15.0, "the removal")
    assert node.exists(keys, cluster.soon()) == [True] + [False] * 5


def _listed(cluster: MooncakeCluster, keys: list[bytes]) -> list[bytes]:
    """Those that the master still has; unlike `where`, asking renews no lease."""
    there = {key for _, key in cluster.objects()}
    return [key for key in keys if key in there]


def test_loading_straight_into_the_cache(cluster: MooncakeCluster) -> None:
    node = cluster.node(cluster.names[0], extra="&direct=true")
    items = put_items(3, [112, 1 << 20, 1000, 2 << 20, 7], b"direct")
    assert node.put(items, TTL_MS, cluster.soon()) == [OK] * 3
    found = get_items([*items, PutItem(b"direct:none", items[0].parts)])
    assert node.get(found, cluster.soon()) == [OK] * 3 + [MISSING]
    assert [joined(item) for item in found[:3]] == [joined(item) for item in items]


def test_memory_lent_by_an_engine(cluster: MooncakeCluster) -> None:
    url = cluster.url + f"&segment={SMALL}"
    before = set(cluster.listed() or ())
    lender = Membership(url, cluster.config(url), cluster.clock)
    name = eventually(
        lambda: next(iter(set(cluster.listed() or ()) - before), ""), 20.0, "the segment"
    )
    node = cluster.node(NodeId(name), extra=f"&segment={SMALL}")
    items = stored(node, b"lent", 3, PutHints(), cluster)
    keys = [item.key for item in items]
    assert node.where(keys, cluster.soon()) == {key: [name] for key in keys}
    node.close()
    lender.close()
    eventually(lambda: name not in (cluster.listed() or ()), 20.0, "the segment to go")
    assert not _listed(cluster, keys)


def test_two_writers_of_one_object(cluster: MooncakeCluster) -> None:
    items = put_items(6, SIZES, b"twice")
    nodes = [cluster.node() for _ in range(4)]
    outcomes: list[list[BlockOutcome]] = []

    def write(node: MooncakeNode) -> None:
        outcomes.append(node.put(items, TTL_MS, cluster.soon()))

    threads = [threading.Thread(target=write, args=(node,)) for node in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [[OK] * 6] * 4
    found = get_items(items)
    assert nodes[0].get(found, cluster.soon()) == [OK] * 6
    assert [joined(item) for item in found] == [joined(item) for item in items]


# ---- under pressure ------------------------------------------------------------------------------


@pytest.fixture
def small() -> Iterator[tuple[MooncakeCluster, MooncakeNode]]:
    with MooncakeCluster((SMALL,)) as cluster:
        node = cluster.node()
        yield cluster, node
        node.close()


def test_what_is_evicted_is_missing_and_puts_go_on(
    small: tuple[MooncakeCluster, MooncakeNode],
) -> None:
    cluster, node = small
    items = put_items(600, SIZES, b"flood")  # 150 MiB into 64
    for at in range(0, 600, 30):
        assert node.put(items[at : at + 30], TTL_MS, cluster.soon()) == [OK] * 30
    keys = [item.key for item in items]
    alive = _listed(cluster, keys)
    assert 60 < len(alive) < 300
    found = get_items(items)
    outcomes = node.get(found, cluster.soon())
    assert set(outcomes) == {OK, MISSING}
    for item, kept, outcome in zip(items, found, outcomes, strict=True):
        assert outcome is MISSING or joined(kept) == joined(item)


def test_a_group_is_evicted_whole(small: tuple[MooncakeCluster, MooncakeNode]) -> None:
    cluster, node = small
    groups: dict[str, list[bytes]] = {}
    for number in range(40):
        items = stored(node, b"g%d" % number, 15, PutHints(f"s{number}", group_from=3), cluster)
        groups[f"s{number}"] = [item.key for item in items]
    alone = [key for keys in groups.values() for key in keys[:3]]
    left = Counter(len(_listed(cluster, keys[3:])) for keys in groups.values())
    assert set(left) == {0, 12}, "a group was torn apart"
    assert left[0] > 10 and left[12] > 5
    assert 0 < len(_listed(cluster, alone)) < len(alone)


def test_a_pin_protects(small: tuple[MooncakeCluster, MooncakeNode]) -> None:
    cluster, node = small
    pinned = stored(node, b"pinned", 8, PutHints(pin_ttl_ms=60_000), cluster)
    later = stored(node, b"later", 8, PutHints(), cluster)
    plain = stored(node, b"plain", 8, PutHints(), cluster)
    keys = {name: [i.key for i in items] for name, items in
            (("pinned", pinned), ("later", later), ("plain", plain))}
    assert node.pin([*keys["later"], b"later:none"], 60_000, cluster.soon()) == 8
    chance = random.Random(1)
    for number in range(20):
        page = memoryview(chance.randbytes(1 << 20))
        flood = [PutItem(b"flood%d:%d" % (number, i), [page[:112], page]) for i in range(6)]
        assert node.put(flood, TTL_MS, cluster.soon()) == [OK] * 6
    alive = {name: len(_listed(cluster, some)) for name, some in keys.items()}
    assert alive == {"pinned": 8, "later": 8, "plain": 0}
    found = get_items(later)
    assert node.get(found, cluster.soon()) == [OK] * 8
    assert [joined(item) for item in found] == [joined(item) for item in later]


def test_more_than_fits_at_all(small: tuple[MooncakeCluster, MooncakeNode]) -> None:
    cluster, node = small
    [big] = put_items(1, [112, 70 << 20], b"big")
    assert node.put([big], TTL_MS, cluster.soon()) == [BlockOutcome.FAILED]
    assert node.drain_counters().get("store_full", 0) > 0
    assert node.put(put_items(1, SIZES, b"fits"), TTL_MS, cluster.soon()) == [OK]
