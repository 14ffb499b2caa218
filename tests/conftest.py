"""Fixtures that any test may ask for."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.servers import Server

# Before anything imports grpc: its own work at a fork, while calls are under way, was seen to hang
# servers that a test starts, or to end them before they had begun.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"


@pytest.fixture(scope="module")
def redis_server() -> Iterator[Server]:
    """A real server shared by a module's tests; use `clean_redis` to find it empty."""
    with Server(tcp=True) as server:
        yield server


@pytest.fixture
def clean_redis(redis_server: Server) -> Server:
    """The module's server, emptied."""
    with redis_server.client() as client:
        client.flushall()
        client.script_flush()
    return redis_server
