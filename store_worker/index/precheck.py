"""A look whether the planned objects are still there, for a store that evicts by itself.

Mooncake answers for thousands of keys in a few milliseconds, and protects what it was asked for
for the length of its own lease. Thread: the index client's.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from connector.clock import Clock
from connector.errors import StoreError
from connector.ids import BlockHash, Namespace
from connector.indexmsg import Acquired, RunSlice
from store_worker.backends.base import DataNode
from store_worker.keys import object_key

logger = logging.getLogger(__name__)

DEADLINE_S = 0.25


class Precheck:
    """Asks the cluster through one client."""

    def __init__(self, node: DataNode, clock: Clock) -> None:
        self._node, self._clock = node, clock

    def first_missing(
        self, store: bytes, namespace: Namespace, hashes: Sequence[BlockHash], found: Acquired
    ) -> int:
        """Depth up to which every object is there; `found.depth` if the store does not say."""
        keys, depths = [], []
        for piece in found.slices:
            for depth in range(piece.start, piece.stop):
                for rank in range(piece.ranks):
                    keys.append(object_key(store, namespace, hashes[depth], rank))
                    depths.append(depth)
        try:
            there = self._node.exists(keys, self._clock.now() + DEADLINE_S)
        except StoreError as error:
            logger.debug("the planned objects could not be looked for: %s", error)
            return found.depth
        return next((d for d, ok in zip(depths, there, strict=True) if not ok), found.depth)

    def close(self) -> None:
        """Give the client back."""
        self._node.close()


def cut(found: Acquired, depth: int) -> Acquired:
    """The same prefix, ended at `depth`."""
    slices = tuple(
        RunSlice(
            node=s.node,
            incarnation=s.incarnation,
            start=s.start,
            stop=min(s.stop, depth),
            ranks=s.ranks,
        )
        for s in found.slices
        if s.start < depth
    )
    return Acquired(depth=depth, slices=slices, lease_until_ms=found.lease_until_ms)
