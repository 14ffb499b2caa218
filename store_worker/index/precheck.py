"""A look whether the planned objects are still there, for a store that evicts by itself.

Mooncake answers for thousands of keys in a few milliseconds, and protects what it was asked for
for the length of its own lease. Thread: the index client's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from connector.clock import Clock
from connector.errors import StoreError
from connector.ids import BlockHash, Namespace, NodeId
from connector.indexmsg import Acquired, RunSlice
from store_worker.backends.base import DataNode
from store_worker.keys import object_key

logger = logging.getLogger(__name__)

DEADLINE_S = 0.25
NODES_MAX = 256


class Precheck:
    """Asks each node for what is listed on it: an object's key names its node."""

    def __init__(self, open_node: Callable[[NodeId], DataNode], clock: Clock) -> None:
        """open_node: connects to nothing yet."""
        self._open_node, self._clock = open_node, clock
        self._nodes: dict[NodeId, DataNode] = {}  # at most NODES_MAX

    def first_missing(
        self, store: bytes, namespace: Namespace, hashes: Sequence[BlockHash], found: Acquired
    ) -> int:
        """Depth up to which every object is there; `found.depth` if the store does not say."""
        end = self._clock.now() + DEADLINE_S
        for piece in found.slices:
            depths = range(piece.start, piece.stop)
            keys = [
                object_key(store, namespace, hashes[depth], rank)
                for depth in depths
                for rank in range(piece.ranks)
            ]
            try:
                there = self._node(piece.node).exists(keys, end)
            except StoreError as error:
                logger.debug("the planned objects could not be looked for: %s", error)
                return found.depth
            gone = next((i for i, ok in enumerate(there) if not ok), None)
            if gone is not None:
                return depths[gone // piece.ranks]
        return found.depth

    def _node(self, name: NodeId) -> DataNode:
        if name not in self._nodes:
            if len(self._nodes) >= NODES_MAX:
                self.close()
            self._nodes[name] = self._open_node(name)
        return self._nodes[name]

    def close(self) -> None:
        """Give the connections back."""
        nodes, self._nodes = self._nodes, {}
        for node in nodes.values():
            node.close()


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
