"""From a URL of the config to a data node, and to the name that all engines give it."""

from __future__ import annotations

from urllib.parse import parse_qs, urlsplit

from connector.clock import Clock, SystemClock
from connector.config import DATA_SCHEMES, Config
from connector.errors import ConfigError
from connector.ids import NodeId
from store_worker.backends.base import DataNode
from store_worker.backends.breaker import Breaker

DEFAULT_PORT = 6379


def node_id(url: str) -> NodeId:
    """The node's stable name: `host:port/db`, `path/to.sock/db`, `memory:NAME` or
    `mooncake:host:port`.

    The same for every engine, whatever credentials, scheme or defaults its own URL has.
    """
    parts = urlsplit(url)
    query = parse_qs(parts.query)
    if parts.scheme == "memory":
        return NodeId(f"memory:{parts.netloc}")
    if parts.scheme == "mooncake":
        return NodeId(f"mooncake:{parts.hostname}:{parts.port or 0}")
    if parts.scheme == "unix":
        return NodeId(f"{parts.path}/{query.get('db', ['0'])[0]}")
    database = query.get("db", [parts.path.strip("/") or "0"])[0]
    return NodeId(f"{parts.hostname}:{parts.port or DEFAULT_PORT}/{database}")


def node_breaker(url: str, config: Config, clock: Clock) -> Breaker:
    """A breaker for a node, to be shared by all of a process's connections to it."""
    return Breaker(node_id(url), clock, config.connect_timeout_s)


def open_node(
    url: str,
    config: Config,
    clock: Clock | None = None,
    breaker: Breaker | None = None,
    name: NodeId | None = None,
) -> DataNode:
    """A data node for one thread. Nothing is connected yet.

    name: which node, where a URL names several (the segments of a Mooncake cluster).
    Raises ConfigError for a URL that can't be one, UnsupportedError where a library is missing.
    """
    clock = clock or SystemClock()
    breaker = breaker or node_breaker(url, config, clock)
    scheme = urlsplit(url).scheme
    if scheme == "memory":
        from store_worker.backends.memory import MemoryNode, memory_store

        return MemoryNode(memory_store(url), config, clock)
    if scheme in ("redis", "rediss", "unix"):
        from store_worker.backends.redis import RedisNode, connection_of

        try:
            connection_of(url, config.connect_timeout_s)
        except ValueError as error:
            raise ConfigError("store.data", url, f"a URL ({error})") from error
        return RedisNode(url, config, clock, breaker)
    if scheme == "mooncake":
        from store_worker.backends.mooncake import open_mooncake

        return open_mooncake(url, config, clock, name or node_id(url))
    raise ConfigError("store.data", url, f"a URL of one of {', '.join(DATA_SCHEMES)}")
