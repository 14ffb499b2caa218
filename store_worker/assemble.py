"""Puts the parts of an engine's store together: what both composition roots need.

The scheduler process gets an index client with its janitor, each rank a `StoreWorker`. Both
are given the same config; `embedded` is resolved here, by starting or joining the two servers.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from connector.clock import Clock
from connector.config import EMBEDDED, Config, StoreConfig
from connector.ids import Namespace, NodeId
from store_worker.backends.factory import node_id, open_node
from store_worker.codec import HEADER_BYTES
from store_worker.embedded import EmbeddedStore, default_directory, start_or_join
from store_worker.executor import ThreadPool
from store_worker.index import SessionIndex, open_index, options_of
from store_worker.index.client import IndexClient
from store_worker.index.janitor import Description, Desk
from store_worker.index.locked import locked
from store_worker.index.precheck import Precheck
from store_worker.keys import NamespaceSpec, namespace_of, namespace_text
from store_worker.nodes import MOONCAKE, NodeDirectory

if TYPE_CHECKING:
    import torch

    from store_worker.paged.layout import PagedCache
    from store_worker.worker import StoreWorker

READY_S = 3.0
JANITOR_TASKS_MAX = 4096


def object_bytes(payload_bytes: int) -> int:
    """Bytes of one rank's object of one block: header and payload."""
    return HEADER_BYTES + payload_bytes


def resolve_store(config: Config, clock: Clock) -> tuple[StoreConfig, EmbeddedStore | None]:
    """The URLs to use; with them a use of the embedded servers, to be kept and closed."""
    store = config.resolved_store()
    if store.index != EMBEDDED:
        return store, None
    directory = config.embedded_dir or default_directory()
    embedded = start_or_join(directory, config.embedded_bytes, clock)
    return StoreConfig(index=embedded.index_url, data=(embedded.data_url,)), embedded


class Naming:
    """The namespace of this engine, epoch by epoch. Scheduler thread; `description` is read by the
    janitor's."""

    def __init__(self, spec: NamespaceSpec) -> None:
        self._spec = spec
        self.description: Description | None = None  # replaced whole, never changed

    def namespace_of(self, epoch: str) -> Namespace:
        """The namespace of an epoch, which is the current one from here on."""
        spec = msgspec.structs.replace(self._spec, epoch=epoch)
        text = namespace_text(spec).decode()
        self.description = Description(namespace_of(spec), text, spec.tokens_per_block)
        return self.description.namespace


@dataclass
class SchedulerSide:
    """What the scheduler process holds of the store."""

    index: IndexClient
    naming: Naming
    embedded: EmbeddedStore | None

    def close(self, timeout_s: float) -> None:
        """Stop the threads, then give the embedded servers back."""
        self.index.close(timeout_s)
        if self.embedded is not None:
            self.embedded.close()


def open_scheduler_side(
    config: Config, object_bytes: int, spec: NamespaceSpec, clock: Clock
) -> SchedulerSide:
    """The index client, ready or, after 3 s, not: a store that is down never stops an engine."""
    store, embedded = resolve_store(config, clock)
    names = tuple(node_id(url) for url in store.data if not url.startswith(MOONCAKE))
    naming = Naming(spec)
    options = msgspec.structs.replace(
        options_of(config),
        engine=config.engine_name or f"{socket.gethostname()}:{os.getpid()}",
    )

    def index() -> SessionIndex:
        found = open_index(store.index, config, options)
        return locked(found) if store.index.startswith("memory:") else found

    def pool(client: IndexClient) -> ThreadPool[Desk]:
        return ThreadPool(
            "store-janitor",
            threads=1,
            make_state=lambda: Desk(
                index=index(),
                directory=NodeDirectory(store.data, config, clock),
                config=config,
                clock=clock,
                object_bytes=object_bytes,
                tell_identity=client.tell_identity,
                tell_nodes=client.tell_nodes,
                tell_gauges=client.tell_gauges,
                describe=lambda: naming.description,
            ),
            tasks_max=JANITOR_TASKS_MAX,
            bytes_max=1 << 62,
        )

    client = IndexClient(index(), config, names, clock, pool)
    cluster = next((url for url in store.data if url.startswith(MOONCAKE)), None)
    if cluster is not None and config.mooncake_check:
        url = cluster
        client.precheck = Precheck(lambda name: open_node(url, config, clock, name=name), clock)
    client.wait_ready(READY_S)
    return SchedulerSide(index=client, naming=naming, embedded=embedded)


def open_worker_side(
    config: Config,
    rank: int,
    caches: Mapping[str, torch.Tensor] | Sequence[torch.Tensor],
    num_blocks: int,
    clock: Clock,
) -> StoreWorker:
    """The store thread's side of one worker rank, over the engine's cache tensors."""
    from store_worker.paged.layout import paged_cache
    from store_worker.worker import StoreWorker

    store, embedded = resolve_store(config, clock)
    urls: dict[NodeId, str] = {node_id(url): url for url in store.data}
    cache = paged_cache(caches, num_blocks)
    close: Callable[[], None] = embedded.close if embedded is not None else _nothing
    cluster = next((url for url in store.data if url.startswith(MOONCAKE)), None)
    if cluster is not None:
        close = _join_mooncake(cluster, config, clock, cache)
    return StoreWorker(config, rank, cache, clock, urls, on_close=close)


def _join_mooncake(
    url: str, config: Config, clock: Clock, cache: PagedCache
) -> Callable[[], None]:
    """Become a member of the cluster, with the segment that the URL promises and the cache as
    memory to send from; returns the way out."""
    from store_worker.backends.mooncake import Membership

    member = Membership(url, config, clock)
    if cache.device.type == "cpu":
        for storage in cache.storages:
            member.register(storage.numpy().data)
    return member.close


def _nothing() -> None:
    return None
