"""What the connector core needs from the outside. Implementations live in `store_worker` and in
the engines' adapters; the core knows only these.

Core module: leaf imports only. Every method here is called on the engine's scheduler thread and
returns at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from connector.ids import BlockId
from connector.lookup import IndexOp, IndexReply


class LookupPort(Protocol):
    """The way to the session index: one client thread behind bounded queues."""

    def post(self, op: IndexOp) -> bool:
        """Hand over an operation. False if the queue is full: the caller counts it and goes on."""

    def poll(self) -> Sequence[IndexReply]:
        """Replies that have arrived, in order of arrival; empty if none. Each posted operation
        is answered exactly once, with a failure when the index can't be reached in time."""

    def pending(self) -> int:
        """Operations posted and not yet polled."""

    def gauges(self) -> Mapping[str, float]:
        """Levels of the whole store, as last seen; names as in `stats`, without `gauge:`."""

    def close(self, timeout_s: float) -> None:
        """Stop the thread; what is queued is dropped after `timeout_s`."""


class BlockPool(Protocol):
    """References on the engine's cache pages."""

    def hold(self, blocks: Sequence[BlockId]) -> None:
        """Take a reference on each page, so that it is not reused."""

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Give the references back."""

    def free_share(self) -> float:
        """Share of pages that could be allocated now, 0 to 1."""
