"""The index behind Sentinel: a master is lost, its replica takes over, the index goes on."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from connector.config import parse_config
from connector.errors import ConfigError, StoreError
from connector.ids import BlockHash, Namespace, NodeId, SessionKey
from connector.indexmsg import CommitRequest, Granted, PrepareRequest
from store_worker.index import open_index
from tests.servers import Server, free_port, server_binary
from tests.waiting import eventually

NS = Namespace(b"n" * 16)
CHAIN = tuple(BlockHash(bytes([i]) * 32) for i in range(1, 4))
SESSION = SessionKey(b"s" * 16)


@pytest.fixture
def sentinel(tmp_path: Path) -> Iterator[tuple[Server, Server, int]]:
    """(master, replica, the sentinel's port)."""
    port = free_port()
    with Server(tcp=True) as master, Server(tcp=True) as replica:
        master_port = int(master.tcp_url.rpartition(":")[2])
        with replica.client() as client:
            client.replicaof("127.0.0.1", master_port)
            eventually(lambda: client.info("replication")["master_link_status"] == "up", 20)
        config = tmp_path / "sentinel.conf"
        config.write_text(
            f"port {port}\nbind 127.0.0.1\ndir {tmp_path}\n"
            f"sentinel monitor skv 127.0.0.1 {master_port} 1\n"
            "sentinel down-after-milliseconds skv 500\nsentinel failover-timeout skv 5000\n"
        )
        process = subprocess.Popen(
            [server_binary(), str(config), "--sentinel"], stdout=subprocess.DEVNULL
        )
        try:
            with redis.Redis(port=port, socket_timeout=2) as watch:
                eventually(lambda: _replicas(watch) == 1, 30)
            yield master, replica, port
        finally:
            process.kill()
            process.wait()


def _replicas(client: redis.Redis) -> int:
    try:
        return len(client.sentinel_slaves("skv"))
    except redis.RedisError:
        return 0


def test_the_index_goes_on_with_the_replica(sentinel: tuple[Server, Server, int]) -> None:
    master, _, port = sentinel
    url = f"redis+sentinel://127.0.0.1:{port}/skv"
    index: Any = open_index(url, parse_config({"store": {"index": url, "data": "redis://x"}}))
    identity = index.identity()
    index.register_node(NodeId("n"), b"incarn-1", 1 << 20)
    request = PrepareRequest(
        namespace=NS, session=SESSION, hashes=CHAIN, nodes=(NodeId("n"),), object_bytes=100
    )
    granted = index.prepare(request)
    assert isinstance(granted, Granted)
    index.commit(CommitRequest(namespace=NS, session=SESSION, grant=granted.grant, saved=3))
    with master.client() as client:
        assert client.wait(1, 4000) == 1
    master.kill()

    def answers() -> bool:
        try:
            return bool(index.probe(NS, CHAIN) == (True, True, True))
        except StoreError:
            return False

    eventually(answers, 60)
    assert index.identity() == identity
    assert index.acquire(NS, [(CHAIN[2], 3)], 1.0, SESSION).depth == 3


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://host/skv",
        "redis+sentinel://host:26379",
        "redis+sentinel://:26379/skv",
        "redis+sentinel://host:26379/skv/x",
    ],
)
def test_a_bad_sentinel_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="SERVICE"):
        parse_config({"store": {"index": url, "data": "redis://x"}})
