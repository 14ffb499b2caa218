"""The conversation of `session-kv demo`, with engines that are processes of their own, on a real
Mooncake."""

from __future__ import annotations

import asyncio

import pytest

from engine_shim.demo import COLD, Report, alternate, connector_flag, http_client, running
from store_worker.backends.mooncake import Membership
from tests.mooncake.cluster import MooncakeCluster
from tests.servers import Server

TURNS = 4


def demo(cluster: MooncakeCluster, indexes: tuple[str, str]) -> Report:
    """The demo, its two engines on this Mooncake, each with the index that is named for it."""

    async def main() -> Report:
        stores = [{"index": index, "data": cluster.url} for index in indexes]
        flags = [connector_flag("", store=store, staging_bytes=64 << 20) for store in stores]
        serve = ("serve", "--port", "0", "--kv-transfer-config")
        commands = {name: (*serve, flag) for name, flag in zip("AB", flags, strict=True)}
        async with running({**commands, "cold": COLD}) as engines, http_client() as http:
            return await alternate(http, engines, TURNS, lambda text: None)

    return asyncio.run(main())


@pytest.mark.slow
def test_the_demo_on_mooncake(own_cluster: MooncakeCluster) -> None:
    with Server() as index:
        report = demo(own_cluster, (index.url, index.url))
    assert report.ok, report.problems
    assert len(report.turns) == TURNS
    # Every block is on one segment, that of the session's home, as the master says.
    member = Membership(own_cluster.url, own_cluster.config(), own_cluster.clock)
    homes = set()
    for name in {node for node, _ in own_cluster.objects()}:
        keys = [key for node, key in own_cluster.objects() if node == name]
        node = own_cluster.node(own_cluster.names[own_cluster.names.index(name)])
        homes |= {tuple(s) for s in node.where(keys, own_cluster.soon()).values()}
        node.close()
    member.close()
    assert len(homes) == 1, homes


@pytest.mark.slow
def test_the_demo_fails_where_the_index_is_not_shared(own_cluster: MooncakeCluster) -> None:
    """The control: the data are there, but nobody knows of the other engine's."""
    with Server() as one, Server() as other:
        report = demo(own_cluster, (one.url, other.url))
    assert {problem.split(": ")[0] for problem in report.problems} >= {"turn 2"}
    assert all(turn.equal for turn in report.turns)
