"""Mooncake's published client library: the part of it that is used, how it is loaded and set up.

A `Library` may be called from several threads at once, and lets other threads of the interpreter
run meanwhile. Two calls do not: `setup` (30 ms, but a minute and a half if the master does not
answer) and `close` (a second, or ten). So both are made only after the master has just answered,
and `close` as late as possible. After `close` any call ends the process.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from connector.errors import StoreUnavailable, UnsupportedError
from store_worker.backends.mooncake_master import fetch
from store_worker.backends.mooncake_url import MooncakeUrl

logger = logging.getLogger(__name__)

DEFAULTS = {
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "3",
    "MC_TCP_STATUS_TIMEOUT_SEC": "3",
    "MC_RPC_TIMEOUT_MS": "3000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "1000",
}
"""How long the library itself waits for a peer or for the master; its own limits are 30 s each, so
that a call to a host that has stopped answering takes a minute. What is set already stays."""

MOST_WAIT_S = 50.0
"""A transfer that is not done after 60 s is given up by the library *without* being stopped: memory
of a call that took this long is never used again."""

PIN_TTL_MS_MAX = 24 * 3600 * 1000
"""The longest soft pin that a master grants by default; a longer one makes a put fail."""

PROBE_S = 1.0
CLOSE_PROBE_S = 0.5

REMEDY = (
    "pip install 'session-kv-connector[mooncake]' (and, on Debian, apt-get install libibverbs1)"
)


class Library(Protocol):
    """`mooncake.store.MooncakeDistributedStore`. Numbers returned: see `mooncake_codes`."""

    def get_hostname(self) -> str: ...
    def register_buffer(self, buffer_ptr: int, size: int) -> int: ...
    def allocate_and_mount_segment(self, size: int, protocol: str) -> dict[str, Any]: ...
    def batch_is_exist(self, keys: list[str]) -> list[int]: ...
    def batch_remove(self, keys: list[str], force: bool = False) -> list[int]: ...
    def batch_get_replica_desc(self, keys: list[str]) -> dict[str, list[Any]]: ...
    def batch_put_session_start(
        self, keys: list[str], sizes: list[int], config: Any
    ) -> list[int]: ...
    def batch_put_from_multi_buffer_ranges(
        self,
        keys: list[str],
        all_buffer_ptrs: list[list[int]],
        all_sizes: list[list[int]],
        all_dst_offsets: list[list[int]],
    ) -> list[int]: ...
    def batch_put_session_end(self, keys: list[str]) -> list[int]: ...
    def batch_put_session_revoke(self, keys: list[str]) -> list[int]: ...
    def batch_upsert_from(
        self, keys: list[str], buffer_ptrs: list[int], sizes: list[int], config: Any
    ) -> list[int]: ...
    def batch_get_into_multi_buffers(
        self, keys: list[str], all_buffer_ptrs: list[list[int]], all_sizes: list[list[int]]
    ) -> list[int]: ...
    def get_into_ranges(
        self,
        buffer_ptrs: list[int],
        all_keys: list[list[str]],
        all_dst_offsets: list[list[list[int]]],
        all_src_offsets: list[list[list[int]]],
        all_sizes: list[list[list[int]]],
    ) -> list[list[list[int]]]: ...
    def close(self) -> int: ...


OpenLibrary = Callable[[MooncakeUrl], Library]
"""Sets up a client; raises StoreUnavailable. May take seconds."""


def load() -> Any:
    """The library's module. Raises UnsupportedError with the remedy if it can't serve."""
    try:
        from mooncake import store
    except ImportError as error:
        what = f"mooncake:// needs its client library ({error}): {REMEDY}"
        raise UnsupportedError(what) from error
    if not hasattr(store.MooncakeDistributedStore, "batch_put_session_start"):
        raise UnsupportedError(f"mooncake:// needs a newer client library (0.3.13): {REMEDY}")
    return store


def open_library(url: MooncakeUrl) -> Library:
    """A client that lends no memory (yet); see `OpenLibrary`."""
    store = load()
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    host = url.host or local_address(url)
    check_master(url, PROBE_S)
    library = store.MooncakeDistributedStore()
    code = library.setup(
        host, url.metadata, 0, 0, url.protocol, url.devices, url.master.strip("[]")
    )
    if code != 0:
        raise StoreUnavailable(
            f"Mooncake's client could not be set up (code {code}) with master {url.master} and "
            f"metadata {url.metadata}; its own messages are on stderr"
        )
    return library


def close_library(library: Library, url: MooncakeUrl) -> bool:
    """Close a client that nobody calls any more. False: the master does not answer, so that it is
    left to the end of the process (the interpreter would stand still for ten seconds)."""
    try:
        check_master(url, CLOSE_PROBE_S)
    except StoreUnavailable as error:
        logger.warning("Mooncake: a client is not closed: %s", error)
        return False
    library.close()
    return True


def check_master(url: MooncakeUrl, timeout_s: float) -> None:
    """Master and metadata answer now. Raises StoreUnavailable."""
    fetch(f"{url.admin}/health", timeout_s)
    if url.metadata.startswith("http"):
        fetch(f"{url.metadata}?key=session-kv", timeout_s, (200, 404))


def local_address(url: MooncakeUrl) -> str:
    """The address that faces the master. Raises StoreUnavailable if the master is away."""
    try:
        address = (url.master_host.strip("[]"), url.master_port)
        with socket.create_connection(address, timeout=PROBE_S) as probe:
            return str(probe.getsockname()[0])
    except OSError as error:
        raise StoreUnavailable(f"Mooncake's master {url.master} is away: {error}") from error


def address_of(memory: memoryview) -> int:
    """Of the first byte; the memory may be read-only."""
    if not memory.nbytes:
        return 0
    return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])


def register_memory(library: Library, memory: memoryview) -> bool:
    """False if the library refuses it, which is logged: it is then copied from, not sent."""
    code = library.register_buffer(address_of(memory), memory.nbytes)
    if code != 0:
        logger.warning("Mooncake: %d bytes could not be registered (%d)", memory.nbytes, code)
    return code == 0


def replicate_config(segment: str, groups: Sequence[str] = (), pin_ttl_ms: int = 0) -> Any:
    """How objects are to be placed: on `segment` if there is room ("": anywhere); groups: one per
    object, or none."""
    store = load()
    config = store.ReplicateConfig()
    if segment:
        config.preferred_segments = [segment]
    if any(groups):
        config.group_ids = list(groups)
    if pin_ttl_ms > 0:
        config.soft_pin_action = store.SoftPinAction.ENABLE
        config.soft_pin_ttl_ms = min(pin_ttl_ms, PIN_TTL_MS_MAX)
    return config
