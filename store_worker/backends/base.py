"""A data node as the save and load threads see it.

Objects are whole values under one key. A value is written and read as a list of memory regions
(header, then one buffer per cache region), so that nothing is copied in between where the back
end can avoid it. All failures of one object are outcomes; a StoreError is raised only when
nothing at all can be said.

Thread: an instance belongs to one thread. Each save or load thread opens its own. Only `close` may
be called from another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from connector.meta import BlockOutcome

Landed = Callable[[int], None]
"""Told the index of an item of `get` as soon as its bytes are all there. Must not raise."""


class PutItem(NamedTuple):
    """One object to write: `parts` are read-only buffers, sent in order."""

    key: bytes
    parts: Sequence[memoryview]


class GetItem(NamedTuple):
    """One object to read straight into `parts` (writable buffers, filled in order).

    An object whose length differs from the parts' total is CORRUPT and nothing is written beyond.
    """

    key: bytes
    parts: Sequence[memoryview]


class PutHints(NamedTuple):
    """For back ends that place and evict by themselves (Mooncake); see `HintedNode`.

    group: objects of one group are evicted together; items before `group_from` are in none. The
    blocks that conversations share must be in none. pin_ttl_ms: keep as long if at all possible.
    """

    group: str = ""
    group_from: int = 0
    pin_ttl_ms: int = 0


NO_HINTS = PutHints()


class DataNode(Protocol):
    """One connection to one data server. It connects on first use and again after a failure.

    `deadline` is in clock seconds (`Clock.now()`); when it has passed, what is not done yet is
    TIMED_OUT (put, get) or StoreTimeout is raised (the rest).
    """

    def put(self, items: Sequence[PutItem], ttl_ms: int, deadline: float) -> list[BlockOutcome]:
        """Write objects that expire after `ttl_ms` unless persisted; one outcome per item:
        OK, FAILED or TIMED_OUT. When it returns or raises, the parts are no longer read."""

    def get(
        self, items: Sequence[GetItem], deadline: float, landed: Landed | None = None
    ) -> list[BlockOutcome]:
        """Read objects into their parts; one outcome per item: OK, MISSING, CORRUPT, FAILED or
        TIMED_OUT. When it returns or raises, no byte will be written into any part any more.
        `landed` is called for every item that ends OK, in any order, before `get` returns."""

    def delete(self, keys: Sequence[bytes], deadline: float) -> int:
        """Delete objects without blocking the server; returns how many were there."""

    def exists(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """Which objects are there."""

    def persist(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """Take the expiry off; False where the object is gone. Persisting twice is True twice."""

    def ready(self, deadline: float) -> bytes:
        """Connect if need be. Returns the incarnation that the node had when this connection was
        made; asks nothing on an open one. Raises StoreError, at once while a node is known to be
        unreachable."""

    def incarnation(self, deadline: float) -> bytes:
        """The node's random incarnation (8 bytes), made by set-if-absent. Another value than
        before means that the node has lost its data."""

    def charge(self, object_bytes: int, deadline: float) -> int:
        """What the server uses for an object of that size, by its own account."""

    def capacity(self, deadline: float) -> int:
        """Bytes this node may hold: `capacity_bytes` if configured, else `capacity_share` of its
        memory limit (or of half the machine's memory where it has none); 0 if it evicts by
        itself and so can't be accounted for."""

    def drain_counters(self) -> dict[str, int]:
        """What happened since the last call, by name (`connector.stats` keys): `connects`,
        `store_full`, `server_errors{kind=...}`, ... Thread: the owner's."""

    def close(self) -> None:
        """Drop the connection at once. May be called from another thread to break a stuck call.
        The next call connects again."""


@runtime_checkable
class HintedNode(Protocol):
    """A data node that can be told more (`isinstance` tells)."""

    def put_hinted(
        self, items: Sequence[PutItem], hints: PutHints, deadline: float
    ) -> list[BlockOutcome]:
        """`put` with hints; the objects stay until they are deleted or evicted."""


@runtime_checkable
class PinningNode(Protocol):
    """A data node that evicts by itself, and can be told what to keep (`isinstance` tells)."""

    def pin(self, keys: Sequence[bytes], ttl_ms: int, deadline: float) -> int:
        """Protect objects from eviction for `ttl_ms`; returns how many are protected now."""
