"""The connections of one load or save thread, by node.

A `Connections` belongs to its thread; only `interrupt` is called from another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from connector.errors import StoreUnavailable
from connector.ids import NodeId
from store_worker.backends.base import DataNode

OpenNode = Callable[[NodeId], DataNode]
"""A new connection to a node for the calling thread. Raises StoreUnavailable for unknown names."""


class Connections:
    """Nodes by name, each opened when first needed."""

    def __init__(self, open_node: OpenNode) -> None:
        self._open_node = open_node
        self._nodes: dict[NodeId, DataNode] = {}
        self._lock = threading.Lock()  # of _nodes and _interrupted
        self._interrupted = False

    def node(self, name: NodeId) -> DataNode:
        """This thread's connection to a node. Raises StoreUnavailable after `interrupt`."""
        with self._lock:
            if self._interrupted:
                raise StoreUnavailable("the worker is shutting down")
            node = self._nodes.get(name)
            if node is None:
                node = self._nodes[name] = self._open_node(name)
            return node

    def drain_counters(self) -> dict[str, int]:
        """The counters of all nodes since the last call."""
        total: dict[str, int] = {}
        for node in self._nodes.values():
            for name, count in node.drain_counters().items():
                total[name] = total.get(name, 0) + count
        return total

    def interrupt(self) -> None:
        """Break what is under way and let nothing new begin. Any thread."""
        with self._lock:
            self._interrupted = True
            nodes = list(self._nodes.values())
        for node in nodes:
            node.close()

    def close(self) -> None:
        """Drop all connections."""
        self.interrupt()
