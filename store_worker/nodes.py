"""The data nodes of a store, for one thread.

A `redis://` URL is a node. A `mooncake://` URL is a cluster: its mounted segments are the nodes,
which come and go.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from connector.clock import Clock
from connector.config import Config
from connector.errors import StoreError
from connector.ids import NodeId
from store_worker.backends.base import DataNode
from store_worker.backends.factory import node_id, open_node

logger = logging.getLogger(__name__)

MOONCAKE = "mooncake://"


class NodeDirectory:
    """Each node opened once. Thread: the owner's; only `close` may be called from another."""

    def __init__(self, urls: Sequence[str], config: Config, clock: Clock) -> None:
        """Connects to nothing yet. Raises ConfigError, UnsupportedError for a bad URL."""
        self._config, self._clock = config, clock
        self._clusters = tuple(url for url in urls if url.startswith(MOONCAKE))
        self._nodes: dict[NodeId, DataNode] = {
            node_id(url): open_node(url, config, clock)
            for url in urls
            if not url.startswith(MOONCAKE)
        }
        for url in self._clusters:
            open_node(url, config, clock).close()

    @property
    def nodes(self) -> Mapping[NodeId, DataNode]:
        """Those known so far."""
        return self._nodes

    def refresh(self) -> Mapping[NodeId, DataNode]:
        """Those there are now, and those there were: whoever is gone does not answer."""
        for url in self._clusters:
            for name in self._segments(url):
                if name not in self._nodes:
                    self._nodes[name] = open_node(url, self._config, self._clock, name=name)
        return self._nodes

    @staticmethod
    def _segments(url: str) -> list[NodeId]:
        from store_worker.backends.mooncake_master import segments
        from store_worker.backends.mooncake_url import parse_mooncake_url

        try:
            return [NodeId(name) for name in segments(parse_mooncake_url(url))]
        except StoreError as error:
            logger.debug("the Mooncake master does not say which segments there are: %s", error)
            return []

    def close(self) -> None:
        """Drop the connections, also from under a call that is stuck."""
        for node in list(self._nodes.values()):
            node.close()
