"""What saving and loading have in common: a job's ticket, its slices, and how it always ends.

`run_job` is called on a load or save thread, once per job, and returns the job's one result: every
block is named in it, whatever is raised on the way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from connector.clock import Clock
from connector.errors import StoreError, StoreTimeout
from connector.ids import BlockHash, BlockId, JobId, NodeId
from connector.meta import BlockOutcome, JobKind, JobResult, LoadMeta, SaveMeta
from connector.stats import Stats
from store_worker.backends.base import DataNode
from store_worker.codec import Codec
from store_worker.keys import object_key
from store_worker.paged.copy import Fence, Mover

logger = logging.getLogger(__name__)


class Ticket(NamedTuple):
    """A job as a worker has received it.

    received: clock seconds; the deadline counts from there. after: what copies have to wait for.
    """

    meta: SaveMeta | LoadMeta
    received: float
    after: Fence = Fence()

    @property
    def kind(self) -> JobKind:
        return JobKind.SAVE if isinstance(self.meta, SaveMeta) else JobKind.LOAD

    @property
    def end(self) -> float:
        """Clock seconds at which the job has ended, either way."""
        return self.received + self.meta.deadline_s


def _never(job: JobId) -> bool:
    """Nothing is revoked."""
    return False


def _no_wait(end: float) -> None:
    """Nothing is more urgent."""


@dataclass(frozen=True)
class JobContext:
    """What a thread works with.

    payload_bytes: of one block, all regions together.
    node: this thread's connection to a node, by name; raises StoreError if there is none.
    give_way: called between batches of a save with the job's end; lets more urgent work pass.
    revoked: whether a save has lost its blocks; asked after checksums are made, before the put.
    """

    rank: int
    payload_bytes: int
    mover: Mover
    node: Callable[[NodeId], DataNode]
    clock: Clock
    checksums: bool
    ttl_ms: int
    give_way: Callable[[float], None] = _no_wait
    revoked: Callable[[JobId], bool] = _never
    stats: Stats = field(default_factory=Stats)


class Slice(NamedTuple):
    """Consecutive blocks of a job on one node; start: index of the first within the job."""

    node: NodeId
    incarnation: bytes
    start: int
    hashes: Sequence[BlockHash]
    blocks: Sequence[BlockId]


class Outcomes:
    """One outcome per block of a job. The first word about a block counts."""

    _OPEN = 0xFF

    def __init__(self, count: int) -> None:
        self._codes = bytearray([self._OPEN]) * count

    def put(self, start: int, outcomes: Sequence[BlockOutcome]) -> None:
        """Set the outcomes of blocks start, start + 1, ..."""
        for index, outcome in enumerate(outcomes, start):
            if self._codes[index] == self._OPEN:
                self._codes[index] = outcome

    def fill(self, piece: Slice, outcome: BlockOutcome) -> None:
        """Set what is still open of a slice."""
        self.put(piece.start, [outcome] * len(piece.blocks))

    def close(self) -> bytes:
        """All outcomes. What nobody has spoken of has failed."""
        self.put(0, [BlockOutcome.FAILED] * len(self._codes))
        return bytes(self._codes)


SliceRunner = Callable[[Slice, Ticket, JobContext, Outcomes], None]


def run_job(ticket: Ticket, context: JobContext, run_slice: SliceRunner) -> JobResult:
    """Do a job slice by slice. A node that fails takes along only the blocks that lie on it."""
    meta = ticket.meta
    outcomes = Outcomes(len(meta.blocks))
    try:
        for piece in slices(meta):
            _run_one(piece, ticket, context, outcomes, run_slice)
    except Exception:
        logger.exception("job %d of request %s can't be done", meta.job, meta.request)
    try:
        # A copy that is still under way must not outlive the report.
        context.mover.finish()
    except Exception:
        logger.exception("job %d: a copy between device and host failed", meta.job)
        outcomes = Outcomes(len(meta.blocks))
    seconds = context.clock.now() - ticket.received
    return result_of(ticket, outcomes.close(), context.rank, context.payload_bytes, seconds)


def slices(meta: SaveMeta | LoadMeta) -> list[Slice]:
    """A job's blocks, node by node. Raises ValueError if the parts of a job do not fit."""
    count = len(meta.blocks)
    if len(meta.hashes) != count or sum(placed.count for placed in meta.placed) != count:
        raise ValueError(f"{count} blocks, {len(meta.hashes)} hashes, placed {meta.placed}")
    found, at = [], 0
    for placed in meta.placed:
        stop = at + placed.count
        hashes, blocks = meta.hashes[at:stop], meta.blocks[at:stop]
        found.append(Slice(placed.node, placed.incarnation, at, hashes, blocks))
        at = stop
    return found


def _run_one(
    piece: Slice, ticket: Ticket, context: JobContext, outcomes: Outcomes, run_slice: SliceRunner
) -> None:
    try:
        if context.clock.now() >= ticket.end:
            raise StoreTimeout("the job's deadline has passed")
        run_slice(piece, ticket, context, outcomes)
    except StoreError as error:
        logger.debug("job %d: node %s: %s", ticket.meta.job, piece.node, error)
        late = isinstance(error, StoreTimeout)
        outcomes.fill(piece, BlockOutcome.TIMED_OUT if late else BlockOutcome.FAILED)
    except Exception:
        logger.exception("job %d: node %s", ticket.meta.job, piece.node)
        outcomes.fill(piece, BlockOutcome.FAILED)


def codec_of(ticket: Ticket, context: JobContext) -> Codec:
    """Headers of the job's objects: a job names its namespace, which moves with the epoch."""
    return Codec(ticket.meta.namespace, context.rank, context.payload_bytes)


def lives(node: DataNode, piece: Slice, end: float) -> bool:
    """Is the node in the life in which the slice's blocks were listed or promised?

    What the connection knows may be older: before a "no" it is made anew. Raises StoreError.
    """
    now_is = node.ready(end)
    if not piece.incarnation or now_is == piece.incarnation:
        return True
    node.close()
    return node.ready(end) == piece.incarnation


def key_of(ticket: Ticket, codec: Codec, hash: BlockHash) -> bytes:
    """The key of a block's object on this rank."""
    return object_key(ticket.meta.store, codec.namespace, hash, codec.rank)


def node_verdict(outcomes: Sequence[BlockOutcome]) -> BlockOutcome | None:
    """The first outcome that speaks of the node rather than of one object, if there is one."""
    for outcome in outcomes:
        if outcome in (BlockOutcome.FAILED, BlockOutcome.TIMED_OUT):
            return outcome
    return None


def result_of(
    ticket: Ticket, outcomes: bytes, rank: int, payload_bytes: int, seconds: float
) -> JobResult:
    """The job's result. outcomes: one code per block."""
    meta = ticket.meta
    return JobResult(
        job=meta.job,
        request=meta.request,
        kind=ticket.kind,
        rank=rank,
        outcomes=outcomes,
        bytes_moved=outcomes.count(BlockOutcome.OK) * payload_bytes,
        seconds=max(0.0, seconds),
        session=meta.session,
        blocks=meta.blocks,
    )
