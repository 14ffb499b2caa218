"""A data node in this process: `memory://NAME`, shared by all who name it. For tests, the
simulation and the replay; it keeps the same promises as the real ones.

`memory://NAME?bytes=N` limits what it holds: beyond that a write is refused, as by a full server.

Any number of `MemoryNode`s may use one `MemoryStore` from different threads.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

from connector.clock import Clock
from connector.config import Config
from connector.errors import StoreTimeout, StoreUnavailable
from connector.meta import BlockOutcome
from connector.stats import Stats
from store_worker.backends.base import GetItem, Landed, PutItem

CHARGE_BYTES = 64
"""What an object costs here beyond its own bytes."""

Hook = Callable[[str, Sequence[bytes]], None]


class Value(NamedTuple):
    """expires: clock seconds; None: kept."""

    data: bytes
    expires: float | None


class MemoryStore:
    """What a named node holds. `up` False: every call raises StoreUnavailable.

    hook: called as hook(operation, keys) on the caller's thread before each operation; may block
    or raise a StoreError, which stands for the network.
    """

    def __init__(self, bytes_max: int = 0) -> None:
        self.lock = threading.Lock()
        self.values: dict[bytes, Value] = {}  # guarded by lock
        self.incarnation = secrets.token_bytes(8)
        self.bytes_max = bytes_max
        self.up = True
        self.hook: Hook | None = None

    def restart(self) -> None:
        """Come back empty, as a server without persistence does."""
        with self.lock:
            self.values.clear()
            self.incarnation = secrets.token_bytes(8)
            self.up = True

    def used(self) -> int:
        """Bytes charged for all objects."""
        with self.lock:
            return self.used_locked()

    def used_locked(self) -> int:
        return sum(len(key) + len(v.data) + CHARGE_BYTES for key, v in self.values.items())


_stores: dict[str, MemoryStore] = {}
_stores_lock = threading.Lock()


def memory_store(url: str) -> MemoryStore:
    """The store of a `memory://NAME` URL; made when first named."""
    parts = urlsplit(url)
    limit = int(parse_qs(parts.query).get("bytes", ["0"])[0])
    with _stores_lock:
        return _stores.setdefault(parts.netloc, MemoryStore(limit))


def forget_stores() -> None:
    """Drop every named store: a test's way to begin with nothing."""
    with _stores_lock:
        _stores.clear()


class MemoryNode:
    """See `base.DataNode`."""

    def __init__(self, store: MemoryStore, config: Config, clock: Clock) -> None:
        self._store, self._config, self._clock = store, config, clock
        self._stats = Stats()

    def put(self, items: Sequence[PutItem], ttl_ms: int, deadline: float) -> list[BlockOutcome]:
        if not self._reach("put", [item.key for item in items], deadline):
            return [BlockOutcome.TIMED_OUT] * len(items)
        expires = self._clock.now() + ttl_ms / 1000
        return [self._put_one(item, expires) for item in items]

    def _put_one(self, item: PutItem, expires: float) -> BlockOutcome:
        value = Value(b"".join(item.parts), expires)
        store = self._store
        with store.lock:
            self._expire_locked()
            held = store.values.get(item.key)
            more = len(value.data) - len(held.data) if held else (
                len(value.data) + len(item.key) + CHARGE_BYTES
            )
            if store.bytes_max and store.used_locked() + more > store.bytes_max:
                self._stats.add("store_full")
                self._stats.add("server_errors", kind="OOM")
                return BlockOutcome.FAILED
            store.values[item.key] = value
            return BlockOutcome.OK

    def get(
        self, items: Sequence[GetItem], deadline: float, landed: Landed | None = None
    ) -> list[BlockOutcome]:
        if not self._reach("get", [item.key for item in items], deadline):
            return [BlockOutcome.TIMED_OUT] * len(items)
        outcomes = []
        for index, item in enumerate(items):
            outcomes.append(self._get_one(item))
            if landed is not None and outcomes[-1] is BlockOutcome.OK:
                landed(index)
        return outcomes

    def _get_one(self, item: GetItem) -> BlockOutcome:
        value = self._find(item.key)
        if value is None:
            return BlockOutcome.MISSING
        if len(value.data) != sum(map(len, item.parts)):
            return BlockOutcome.CORRUPT
        at = 0
        for part in item.parts:
            part[:] = value.data[at : at + len(part)]
            at += len(part)
        return BlockOutcome.OK

    def delete(self, keys: Sequence[bytes], deadline: float) -> int:
        self._ask("delete", keys, deadline)
        with self._store.lock:
            self._expire_locked()
            return sum(self._store.values.pop(key, None) is not None for key in keys)

    def exists(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        self._ask("exists", keys, deadline)
        return [self._find(key) is not None for key in keys]

    def persist(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        self._ask("persist", keys, deadline)
        with self._store.lock:
            self._expire_locked()
            values = self._store.values
            for key in keys:
                if key in values:
                    values[key] = Value(values[key].data, None)
            return [key in values for key in keys]

    def incarnation(self, deadline: float) -> bytes:
        self._ask("incarnation", (), deadline)
        return self._store.incarnation

    def ready(self, deadline: float) -> bytes:
        return self.incarnation(deadline)

    def charge(self, object_bytes: int, deadline: float) -> int:
        self._ask("charge", (), deadline)
        return object_bytes + 63 + CHARGE_BYTES

    def capacity(self, deadline: float) -> int:
        self._ask("capacity", (), deadline)
        if self._config.capacity_bytes:
            return self._config.capacity_bytes
        return int((self._store.bytes_max or 4 << 30) * self._config.capacity_share)

    def drain_counters(self) -> dict[str, int]:
        return {name: int(value) for name, value in self._stats.drain().items()}

    def close(self) -> None:
        pass

    def _reach(self, operation: str, keys: Sequence[bytes], deadline: float) -> bool:
        """Go over the (imagined) network. False if the deadline has passed by then."""
        if self._store.hook is not None:
            self._store.hook(operation, keys)
        if not self._store.up:
            raise StoreUnavailable("this memory store is down")
        return self._clock.now() < deadline

    def _ask(self, operation: str, keys: Sequence[bytes], deadline: float) -> None:
        if not self._reach(operation, keys, deadline):
            raise StoreTimeout(f"{operation}: not done within the deadline")

    def _find(self, key: bytes) -> Value | None:
        with self._store.lock:
            value = self._store.values.get(key)
            live = value is not None and not self._over(value)
            return value if live else None

    def _over(self, value: Value) -> bool:
        return value.expires is not None and value.expires <= self._clock.now()

    def _expire_locked(self) -> None:
        values = self._store.values
        for key in [key for key, value in values.items() if self._over(value)]:
            del values[key]
