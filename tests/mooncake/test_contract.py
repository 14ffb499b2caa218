"""The data nodes' contract suite over a segment of a real Mooncake."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from connector.clock import SystemClock
from store_worker.backends.base import DataNode
from store_worker.backends.mooncake_client import acquire, release
from store_worker.backends.mooncake_url import parse_mooncake_url
from tests.contract import test_data_node as suite
from tests.contract.data_node_kit import TTL_MS, NodeCase, put_items
from tests.mooncake.cluster import MooncakeCluster
from tests.waiting import eventually

# What Mooncake can't do; a test of its own below says what holds instead.
NOT_HERE = {
    "test_unpersisted_objects_expire": "objects have no expiry; Mooncake evicts what is not used",
    "test_capacity_is_a_share_or_what_is_configured": "it evicts by itself: capacity 0",
}

globals().update(
    {
        name: test
        for name, test in vars(suite).items()
        if name.startswith("test_") and name not in NOT_HERE
    }
)


@pytest.fixture(scope="module")
def case(cluster: MooncakeCluster) -> Iterator[NodeCase]:
    def restart() -> None:
        """The first owner leaves and comes back, under the same name and empty. Returns when the
        process's client has been replaced, which fails the calls that wait for a thread."""
        config = cluster.config()
        client = acquire(parse_mooncake_url(cluster.url), config.staging_bytes, cluster.clock)
        before = eventually(client.current)
        eventually(lambda: cluster.names[0] in client.cluster.last_seen(), 10.0)
        cluster.owners[0].leave()
        eventually(lambda: cluster.names[0] not in (cluster.listed() or ()), 10.0)
        cluster.owners[0].start()
        eventually(lambda: client.current() not in (None, before), 20.0, "a new client")
        release(client)

    yield NodeCase(cluster.node, restart, SystemClock())


@pytest.fixture
def node(case: NodeCase) -> Iterator[DataNode]:
    opened = case.connect()
    yield opened
    opened.close()


def test_the_suite_is_really_here() -> None:
    assert NOT_HERE.keys() <= vars(suite).keys()
    assert "test_put_replaces" in globals()


def test_objects_stay_without_persist(case: NodeCase, node: DataNode) -> None:
    items = put_items(3, [112], b"stay")
    keys = [item.key for item in items]
    node.put(items, 1, case.soon())
    assert node.persist([*keys, b"stay:none"], case.soon()) == [True] * 3 + [False]
    assert node.exists(keys, case.soon()) == [True] * 3


def test_capacity(case: NodeCase) -> None:
    assert case.connect().capacity(case.soon()) == 0
    assert case.connect(capacity_bytes=12345).capacity(case.soon()) == 12345


def test_ttl_is_ignored_but_accepted(case: NodeCase, node: DataNode) -> None:
    [item] = put_items(1, [112, 10], b"ttl")
    assert node.put([item], TTL_MS, case.soon()) == [suite.OK]
