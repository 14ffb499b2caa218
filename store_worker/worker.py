"""The worker half of the connector: one rank's jobs, from `submit` to their results.

Threads: `submit`, `poll`, `pending` and `close` belong to the engine's worker thread and never
wait (but for `close`). Load and save threads do the rest; they meet the engine's thread only in
`_Ledger`, under its lock.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from connector.clock import Clock
from connector.config import Config
from connector.errors import StoreUnavailable
from connector.ids import JobId, NodeId
from connector.meta import BlockOutcome, JobKind, JobResult, StepMeta, WorkerReport
from connector.session import short
from connector.stats import Stats
from store_worker.backends.base import DataNode
from store_worker.backends.factory import node_breaker, open_node
from store_worker.connections import Connections, OpenNode
from store_worker.executor import Pool, ThreadPool
from store_worker.job import JobContext, Ticket, result_of
from store_worker.load_job import run_load
from store_worker.nodes import MOONCAKE
from store_worker.paged.copy import check_mover, fence, open_mover
from store_worker.paged.layout import PagedCache
from store_worker.save_job import run_save

logger = logging.getLogger(__name__)

JOBS_WAITING_MAX = 4096
GIVE_WAY_S = 0.05
"""How long a save lets loads pass, per batch: it is slowed by them, never stopped."""


class IoState:
    """What one load or save thread keeps: its connections and its way into the cache."""

    def __init__(self, connections: Connections, context: JobContext) -> None:
        self.connections, self.context = connections, context

    def interrupt(self) -> None:
        self.connections.interrupt()

    def close(self) -> None:
        self.connections.close()


class PoolSpec(NamedTuple):
    """A pool that a worker needs: threads NAME-0 .. with an `IoState` each."""

    name: str
    threads: int
    make_state: Callable[[], IoState]
    bytes_max: int


def _nothing() -> None:
    """The default of `on_close`."""


class WorkerPorts(NamedTuple):
    """What a worker is connected to; the simulation gives its own.

    virtual: jobs run on the caller's thread, so that none may ever wait for another.
    on_close: called once, when `close` is done with the threads.
    """

    clock: Clock
    open_node: OpenNode
    make_pool: Callable[[PoolSpec], Pool[IoState]]
    virtual: bool = False
    on_close: Callable[[], None] = _nothing


def thread_pool(spec: PoolSpec) -> Pool[IoState]:
    """The product's pools: real threads."""
    return ThreadPool(spec.name, spec.threads, spec.make_state, JOBS_WAITING_MAX, spec.bytes_max)


def system_ports(config: Config, clock: Clock, nodes: Mapping[NodeId, str]) -> WorkerPorts:
    """Real threads, and connections to the nodes' URLs; one breaker per node for all threads."""
    breakers = {name: node_breaker(url, config, clock) for name, url in nodes.items()}
    cluster = next((url for url in nodes.values() if url.startswith(MOONCAKE)), None)
    for url in nodes.values():
        # Connects to nothing: a bad URL stops the start, and libraries are imported by now.
        open_node(url, config, clock)

    def connect(name: NodeId) -> DataNode:
        if cluster is not None:
            return open_node(cluster, config, clock, name=name)
        if name not in nodes:
            raise StoreUnavailable(f"data node {name} is not in this engine's config")
        return open_node(nodes[name], config, clock, breakers[name])

    return WorkerPorts(clock, connect, thread_pool)


class StoreWorker:
    """Saves and loads of one rank. Every job that is submitted gets exactly one `JobResult`."""

    def __init__(
        self,
        config: Config,
        rank: int,
        cache: PagedCache,
        clock: Clock,
        nodes: Mapping[NodeId, str],
        on_close: Callable[[], None] = _nothing,
    ) -> None:
        """nodes: the URL of each data node by its `factory.node_id`. Connects to nothing yet.

        on_close: called once, at the end of `close`. Raises ConfigError for a URL that can't be
        one, UnsupportedError if `staging_bytes` can't hold the blocks of a device cache.
        """
        ports = system_ports(config, clock, nodes)._replace(on_close=on_close)
        self._start(config, rank, cache, ports)

    @classmethod
    def with_ports(
        cls, config: Config, rank: int, cache: PagedCache, ports: WorkerPorts
    ) -> StoreWorker:
        """A worker on other threads, nodes or time."""
        worker = cls.__new__(cls)
        worker._start(config, rank, cache, ports)
        return worker

    def _start(self, config: Config, rank: int, cache: PagedCache, ports: WorkerPorts) -> None:
        self._config, self._rank, self._cache, self._ports = config, rank, cache, ports
        self._clock, self._closed = ports.clock, False
        check_mover(cache, config.staging_bytes // config.io_threads)
        self._ledger = _Ledger()
        self._gate = _Gate()
        self._loads = self._pool("skv-load", config.load_bytes_in_flight_max, self._wait_never)
        give_way = self._wait_never if ports.virtual else self._wait_for_loads
        self._saves = self._pool("skv-save", config.save_bytes_in_flight_max, give_way)

    def _pool(self, name: str, bytes_max: int, give_way: Callable[[float], None]) -> Pool[IoState]:
        threads = self._config.io_threads
        spec = PoolSpec(
            f"{name}-r{self._rank}", threads, lambda: self._new_state(give_way), bytes_max
        )
        return self._ports.make_pool(spec)

    def _new_state(self, give_way: Callable[[float], None]) -> IoState:
        """On the new thread itself, before its first job."""
        config = self._config
        connections = Connections(self._ports.open_node)
        context = JobContext(
            rank=self._rank,
            payload_bytes=self._cache.block_bytes,
            mover=open_mover(self._cache, config.staging_bytes // config.io_threads),
            node=connections.node,
            clock=self._clock,
            checksums=config.checksums,
            ttl_ms=round(config.object_ttl_s * 1000),
            give_way=give_way,
            revoked=self._ledger.is_revoked,
        )
        return IoState(connections, context)

    @staticmethod
    def _wait_never(end: float) -> None:
        """Nothing is more urgent than a load."""

    def _wait_for_loads(self, end: float) -> None:
        self._gate.wait(min(GIVE_WAY_S, end - self._clock.now()))

    # ---- the engine's thread -------------------------------------------------------------------

    def submit(self, step: StepMeta) -> None:
        """Take a step's jobs; never waits.

        Saves: call it behind the forward pass that fills their pages. At a limit, or after
        `close`, a job ends at once, every block DECLINED.
        """
        if step.empty:
            return
        after = fence(self._cache)
        received = self._clock.now()
        for load in step.loads:
            self._take(Ticket(load, received, after), self._loads)
        for save in step.saves:
            self._take(Ticket(save, received, after), self._saves)

    def revoke(self, step: StepMeta) -> None:
        """Call it before the forward pass of a step: its `revoked` saves have lost their pages,
        which that pass may overwrite. None of them sends what it has not made a checksum of."""
        if step.revoked:
            self._ledger.revoke(step.revoked, {save.job for save in step.saves})

    def _take(self, ticket: Ticket, pool: Pool[IoState]) -> None:
        assert self._ledger.begin(ticket.meta.job), f"job {ticket.meta.job} was submitted before"
        is_load = ticket.kind is JobKind.LOAD
        if is_load:
            self._gate.enter()
        size = len(ticket.meta.blocks) * self._cache.block_bytes
        if not pool.submit(_JobTask(ticket, self), size):
            self.end_all(ticket, BlockOutcome.DECLINED)

    def poll(self) -> WorkerReport:
        """The results of jobs that have ended since the last call, and what was counted."""
        results, counters = self._ledger.drain()
        return WorkerReport(rank=self._rank, results=results, counters=counters)

    def pending(self) -> int:
        """Jobs submitted whose results `poll` has not handed out yet."""
        return self._ledger.pending()

    def close(self, timeout_s: float) -> bool:
        """End all jobs: what waits is DECLINED, what runs may go on for a while and is then broken
        off. `poll` once more for the results. False if a thread did not end in time: then its
        job has no result yet, and its pages must not be reused."""
        ended = self._loads.stop(timeout_s / 2)
        ended = self._saves.stop(timeout_s / 2) and ended
        if not self._closed:
            self._closed = True
            self._ports.on_close()
        return ended

    # ---- load and save threads -----------------------------------------------------------------

    def end(self, ticket: Ticket, result: JobResult, more: Mapping[str, int]) -> None:
        """The one way a job ends. `more`: counters of the nodes. Any thread."""
        if self._ledger.end(ticket, result, more) and ticket.kind is JobKind.LOAD:
            self._gate.leave()

    def end_all(self, ticket: Ticket, outcome: BlockOutcome) -> None:
        """End a job with the same outcome for every block."""
        codes = bytes([outcome]) * len(ticket.meta.blocks)
        seconds = self._clock.now() - ticket.received
        self.end(ticket, result_of(ticket, codes, self._rank, self._cache.block_bytes, seconds), {})

class _JobTask:
    """A job as a pool's task."""

    def __init__(self, ticket: Ticket, worker: StoreWorker) -> None:
        self._ticket, self._worker = ticket, worker

    def run(self, state: IoState) -> None:
        run = run_save if self._ticket.kind is JobKind.SAVE else run_load
        result = run(self._ticket, state.context)
        self._worker.end(self._ticket, result, state.connections.drain_counters())

    def failed(self, error: BaseException) -> None:
        self._worker.end_all(self._ticket, BlockOutcome.FAILED)

    def dropped(self) -> None:
        self._worker.end_all(self._ticket, BlockOutcome.DECLINED)


class _Gate:
    """How many loads there are, for saves that let them pass."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._loads = 0  # guarded by _changed

    def enter(self) -> None:
        with self._changed:
            self._loads += 1

    def leave(self) -> None:
        with self._changed:
            self._loads -= 1
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> None:
        """Until there is no load, but not longer than `timeout_s`."""
        if timeout_s > 0:
            with self._changed:
                self._changed.wait_for(lambda: not self._loads, timeout_s)


class _Ledger:
    """Which jobs are open, which results wait to be polled, and the counters. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[JobId] = set()
        self._revoked: set[JobId] = set()
        # bounded: by the jobs that the engine itself submits between two polls
        self._results: deque[JobResult] = deque()
        self._stats = Stats()

    def begin(self, job: JobId) -> bool:
        """False if the job is open already."""
        with self._lock:
            if job in self._open:
                return False
            self._open.add(job)
            return True

    def revoke(self, jobs: Sequence[JobId], coming: set[JobId]) -> None:
        """Open jobs, and some that are about to be."""
        with self._lock:
            self._revoked |= set(jobs) & (self._open | coming)

    def is_revoked(self, job: JobId) -> bool:
        with self._lock:
            return job in self._revoked

    def end(self, ticket: Ticket, result: JobResult, more: Mapping[str, int]) -> bool:
        """False if the job has ended before: then this changes nothing."""
        with self._lock:
            if result.job not in self._open:
                return False
            self._open.remove(result.job)
            self._revoked.discard(result.job)
            self._results.append(result)
            self._count(ticket, result, more)
        _log(ticket, result)
        return True

    def _count(self, ticket: Ticket, result: JobResult, more: Mapping[str, int]) -> None:
        kind, stats = result.kind.name.lower(), self._stats
        stats.add(f"{kind}_jobs", session="yes" if result.session else "no")
        stats.add(f"{kind}_bytes", result.bytes_moved)
        stats.add(f"{kind}_us", round(result.seconds * 1e6))
        if result.seconds > ticket.meta.deadline_s:
            stats.add(f"{kind}_late")
        for outcome in BlockOutcome:
            stats.add(f"{kind}_objects", result.outcomes.count(outcome), outcome=outcome.name)
        for name, count in more.items():
            stats.add(name, count)

    def drain(self) -> tuple[tuple[JobResult, ...], dict[str, int]]:
        with self._lock:
            results = tuple(self._results)
            self._results.clear()
            return results, {name: int(n) for name, n in self._stats.drain().items()}

    def pending(self) -> int:
        with self._lock:
            return len(self._open) + len(self._results)


def _log(ticket: Ticket, result: JobResult) -> None:
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug(
            "%s job=%d request=%s session=%s rank=%d blocks=%d ok=%d bytes=%d ms=%.1f",
            result.kind.name.lower(), result.job, result.request,
            short(result.session), result.rank,
            len(result.outcomes), result.outcomes.count(BlockOutcome.OK), result.bytes_moved,
            result.seconds * 1e3,
        )
