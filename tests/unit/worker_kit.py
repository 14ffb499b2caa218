"""A store worker over in-process nodes, with its cache, for the tests of jobs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import torch

from connector.clock import Clock, ManualClock
from connector.config import Config, parse_config
from connector.ids import BlockHash, BlockId, JobId, Namespace, NodeId, RequestId, SessionKey
from connector.meta import BlockOutcome, JobResult, LoadMeta, Placed, ReqMeta, SaveMeta, StepMeta
from store_worker.backends.base import DataNode
from store_worker.backends.factory import node_id, open_node
from store_worker.backends.memory import MemoryStore, memory_store
from store_worker.executor import InlinePool
from store_worker.keys import object_key
from store_worker.paged.layout import PagedCache, paged_cache
from store_worker.worker import IoState, PoolSpec, StoreWorker, WorkerPorts
from tests.waiting import eventually

OK, MISSING, CORRUPT = BlockOutcome.OK, BlockOutcome.MISSING, BlockOutcome.CORRUPT
FAILED, TIMED_OUT = BlockOutcome.FAILED, BlockOutcome.TIMED_OUT
DECLINED = BlockOutcome.DECLINED

NAMESPACE = Namespace(b"namespace-------")
STORE = b"storeinc"
SESSION = SessionKey(bytes(range(16)))
BLOCKS, LAYERS = 64, 3
_names = itertools.count()
_jobs = itertools.count(1)


def hash_of(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "big"))


def names(outcomes: bytes) -> list[BlockOutcome]:
    return [BlockOutcome(code) for code in outcomes]


class Rig:
    """One rank: a cache of 64 pages of 3 x 2 KiB, and `nodes` data nodes in this process.

    inline True: jobs run when `run` is called, on virtual time; else on real threads.
    wrap: put around every connection.
    """

    def __init__(
        self,
        nodes: int = 1,
        inline: bool = True,
        clock: Clock | None = None,
        wrap: Callable[[DataNode], DataNode] = lambda node: node,
        rank: int = 0,
        **keys: object,
    ) -> None:
        urls = [f"memory://unit-{next(_names)}" for _ in range(nodes)]
        self.nodes = [node_id(url) for url in urls]
        self.stores: list[MemoryStore] = [memory_store(url) for url in urls]
        self.config: Config = parse_config({"store": urls[0], **keys})
        self.clock = clock or ManualClock()
        self.tensors = [torch.zeros(BLOCKS, 2, 8, 32) for _ in range(LAYERS)]
        self.cache: PagedCache = paged_cache(self.tensors, BLOCKS)
        self.pools: list[InlinePool[IoState]] = []
        by_name = dict(zip(self.nodes, urls, strict=True))
        if not inline:
            self.worker = StoreWorker(self.config, rank, self.cache, self.clock, by_name)
            return

        def inline_pool(spec: PoolSpec) -> InlinePool[IoState]:
            self.pools.append(InlinePool(spec.make_state, 4096, spec.bytes_max))
            return self.pools[-1]

        def connect(name: NodeId) -> DataNode:
            return wrap(open_node(by_name[name], self.config, self.clock))

        ports = WorkerPorts(self.clock, connect, inline_pool, virtual=True)
        self.worker = StoreWorker.with_ports(self.config, rank, self.cache, ports)

    # ---- the cache -----------------------------------------------------------------------------

    def fill(self, blocks: Iterable[int], seed: int) -> None:
        """Give pages a content that says which block hash (seed + i) they hold."""
        for index, block in enumerate(blocks):
            for layer, tensor in enumerate(self.tensors):
                generator = torch.Generator().manual_seed((seed + index) * 100 + layer)
                tensor[block] = torch.randn(tensor[block].shape, generator=generator)

    def holds(self, block: int, number: int) -> bool:
        """Is the page what `fill` makes of that hash number?"""
        for layer, tensor in enumerate(self.tensors):
            generator = torch.Generator().manual_seed(number * 100 + layer)
            want = torch.randn(tensor[block].shape, generator=generator)
            if not torch.equal(tensor[block], want):
                return False
        return True

    # ---- jobs ----------------------------------------------------------------------------------

    def meta(
        self,
        kind: type[SaveMeta] | type[LoadMeta],
        blocks: Sequence[int],
        first: int = 0,
        placed: Sequence[Placed] | None = None,
        **fields: object,
    ) -> ReqMeta:
        """A job on pages `blocks` with hashes first, first + 1, ..., on the first node."""
        values: dict[str, object] = {
            "job": JobId(next(_jobs)),
            "request": RequestId("r"),
            "store": STORE,
            "hashes": tuple(hash_of(first + i) for i in range(len(blocks))),
            "blocks": tuple(BlockId(block) for block in blocks),
            "placed": tuple(placed or (Placed(self.nodes[0], len(blocks)),)),
            "deadline_s": 5.0,
            "session": SESSION,
            "namespace": NAMESPACE,
            **fields,
        }
        return kind(**values)  # type: ignore[arg-type]

    def save(self, blocks: Sequence[int], first: int = 0, **fields: object) -> JobId:
        meta = self.meta(SaveMeta, blocks, first, **fields)  # type: ignore[arg-type]
        self.worker.submit(StepMeta(saves=(meta,)))  # type: ignore[arg-type]
        return meta.job

    def load(self, blocks: Sequence[int], first: int = 0, **fields: object) -> JobId:
        meta = self.meta(LoadMeta, blocks, first, **fields)  # type: ignore[arg-type]
        self.worker.submit(StepMeta(loads=(meta,)))  # type: ignore[arg-type]
        return meta.job

    def run(self) -> None:
        """Run all jobs that wait (inline only)."""
        while any([pool.step() for pool in self.pools]):  # noqa: C419  (both take a step)
            pass

    def results(self, count: int) -> list[JobResult]:
        """The next `count` results, in order of arrival."""
        if self.pools:
            self.run()
        found: list[JobResult] = []

        def look() -> bool:
            found.extend(self.worker.poll().results)
            return len(found) >= count

        eventually(look, 20.0, f"{count} results")
        assert len(found) == count, found
        return found

    def outcomes(self) -> list[BlockOutcome]:
        """The outcomes of the one job that is open."""
        [result] = self.results(1)
        assert self.worker.pending() == 0
        return names(result.outcomes)

    def stored(self, blocks: Sequence[int], first: int = 0, node: int = 0) -> None:
        """Fill pages and save them."""
        self.fill(blocks, first)
        self.save(blocks, first, placed=[Placed(self.nodes[node], len(blocks))])
        assert self.outcomes() == [OK] * len(blocks)

    # ---- the stores ----------------------------------------------------------------------------

    def key(self, number: int) -> bytes:
        return object_key(STORE, NAMESPACE, hash_of(number), 0)

    def tamper(self, number: int, change: Callable[[bytes], bytes | None], node: int = 0) -> None:
        """Replace (or, with None, remove) the stored object of a hash."""
        values = self.stores[node].values
        old = values.pop(self.key(number))
        new = change(old.data)
        if new is not None:
            values[self.key(number)] = old._replace(data=new)

    def object(self, number: int, node: int = 0) -> bytes:
        return self.stores[node].values[self.key(number)].data
