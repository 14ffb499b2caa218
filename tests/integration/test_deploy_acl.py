"""The rights that docs/DEPLOY.md gives to an ACL user are enough, and no more than needed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import redis

from connector.clock import SystemClock
from connector.config import parse_config
from connector.ids import BlockHash, GrantId, Namespace, NodeId, SessionKey
from connector.indexmsg import CommitRequest, Granted, PrepareRequest
from connector.meta import BlockOutcome
from store_worker.backends.base import GetItem, PutItem
from store_worker.backends.factory import open_node
from store_worker.index import open_index
from tests.servers import Server

DEPLOY = Path(__file__).resolve().parents[2] / "docs" / "DEPLOY.md"
NS = Namespace(b"n" * 16)


def rules(user: str) -> list[str]:
    """The ACL SETUSER line of docs/DEPLOY.md for a user, without its password."""
    found = re.search(rf"ACL SETUSER {user} on >\S+ (.+)", DEPLOY.read_text())
    assert found, f"docs/DEPLOY.md has no line for {user}"
    return found.group(1).split()


def as_user(server: Server, user: str) -> str:
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", user, "reset", "on", ">pw", *rules(user))
    return f"redis://{user}:pw@127.0.0.1:{server.tcp_url.rpartition(':')[2]}"


def test_the_index_user_can_do_everything_the_index_needs(clean_redis: Server) -> None:
    index: Any = open_index(as_user(clean_redis, "skv-index"))
    node, session = NodeId("n"), SessionKey(b"s" * 16)
    index.identity()
    index.register_node(node, b"incarn-1", 1 << 20)
    chain = tuple(BlockHash(bytes([i]) * 32) for i in range(1, 4))
    request = PrepareRequest(
        namespace=NS, session=session, hashes=chain, nodes=(node,), object_bytes=100
    )
    granted = index.prepare(request)
    assert isinstance(granted, Granted)
    index.commit(CommitRequest(namespace=NS, session=session, grant=granted.grant, saved=3))
    assert index.acquire(NS, [(chain[2], 3)], 1.0, session).depth == 3
    index.recall(NS, session)
    index.probe(NS, chain)
    index.abort(GrantId(99))
    index.pin(session, 5.0)
    index.retain(session, 1, 5.0)
    index.forget(NS, chain[2:], node)
    index.lead("me", 5.0)
    index.turns()
    index.nodes()
    index.stats()
    index.sessions()
    index.close(session)


def test_the_data_user_can_do_everything_a_node_needs(clean_redis: Server) -> None:
    clock = SystemClock()
    config = parse_config({"store": "redis://127.0.0.1"})
    node = open_node(as_user(clean_redis, "skv-data"), config, clock)
    end = clock.now() + 5
    assert len(node.incarnation(end)) == 8
    assert node.capacity(end) > 0
    assert node.charge(1000, end) >= 1000
    put = node.put([PutItem(b"skvo:k", [memoryview(b"x" * 100)])], 60_000, end)
    assert put == [BlockOutcome.OK]
    target = memoryview(bytearray(100))
    assert node.get([GetItem(b"skvo:k", [target])], end) == [BlockOutcome.OK]
    assert node.persist([b"skvo:k"], end) == [True]
    assert node.exists([b"skvo:k"], end) == [True]
    assert node.delete([b"skvo:k"], end) == 1
    node.close()


@pytest.mark.parametrize("user", ["skv-index", "skv-data"])
@pytest.mark.parametrize("command", ["FLUSHALL", "KEYS *", "CONFIG SET maxmemory 1", "GET other"])
def test_neither_can_do_anything_else(clean_redis: Server, user: str, command: str) -> None:
    client = redis.Redis.from_url(as_user(clean_redis, user))
    with pytest.raises(redis.exceptions.NoPermissionError):
        client.execute_command(*command.split())
    client.close()
