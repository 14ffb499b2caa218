"""A data node as the save and load threads see it.

Objects are whole values under one key. A value is written and read as a list of memory regions
(header, then one buffer per cache region), so that nothing is copied in between where the back
end can avoid it. All failures of one object are outcomes; a StoreError is raised only when
nothing at all can be said.

Thread: an instance belongs to one thread. Each save or load thread opens its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from connector.meta import BlockOutcome


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


class DataNode(Protocol):
    """One connection to one data server."""

    def put(self, items: Sequence[PutItem], ttl_ms: int, deadline: float) -> list[BlockOutcome]:
        """Write objects that expire after `ttl_ms` unless persisted. `deadline`: clock seconds.
        When it returns, the parts are no longer read."""

    def get(self, items: Sequence[GetItem], deadline: float) -> list[BlockOutcome]:
        """Read objects into their parts. When it returns, no byte will be written any more."""

    def delete(self, keys: Sequence[bytes], deadline: float) -> int:
        """Delete objects without blocking the server; returns how many were there."""

    def exists(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """Which objects are there."""

    def persist(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """Take the expiry off; False where the object is gone."""

    def incarnation(self, deadline: float) -> bytes:
        """The node's random incarnation (8 bytes), made by set-if-absent."""

    def charge(self, object_bytes: int, deadline: float) -> int:
        """What the server uses for an object of that size, by its own account."""

    def capacity(self, deadline: float) -> int:
        """Bytes this node may hold (0.9 x its memory limit); 0 if it has no limit or evicts by
        itself."""

    def close(self) -> None:
        """Drop the connection at once. May be called from another thread to break a stuck call."""
