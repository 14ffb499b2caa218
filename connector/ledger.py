"""Open jobs and the engine blocks they hold.

Core module. Owned by the scheduler thread. A job is opened once, settled once, and holds its
blocks from opening until every rank has reported (I6); ids are never reused, so that a late
report of an older job settles nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from connector.ids import (
    NO_GRANT,
    NO_HASH,
    NO_NODE,
    BlockHash,
    BlockId,
    GrantId,
    JobId,
    Namespace,
    NodeId,
    RequestId,
)
from connector.meta import BlockOutcome, JobKind, JobResult
from connector.ports import BlockPool


class JobState(Enum):
    """Life of a job. A load starts READY."""

    QUEUED = "queued"  # a save that waits for the commit of the one before it
    PREPARING = "preparing"  # room was asked for
    READY = "ready"  # to be sent with the next step
    SENT = "sent"  # with the workers
    SAVED = "saved"  # all ranks reported
    COMMITTING = "committing"  # the index was asked


@dataclass
class Job:
    """One transfer. hashes[i] belongs to blocks[i]; the first block ends at depth start + 1.

    first: index of the first block that is really moved (earlier ones were listed already).
    ok: blocks, from `first`, that every rank has moved, once all have reported.
    """

    id: JobId
    kind: JobKind
    request: RequestId
    namespace: Namespace
    start: int
    hashes: tuple[BlockHash, ...]
    blocks: tuple[BlockId, ...]
    state: JobState
    opened: float
    ranks_left: int
    parent: BlockHash = NO_HASH
    grant: GrantId = NO_GRANT
    node: NodeId = NO_NODE
    incarnation: bytes = b""
    store: bytes = b""
    first: int = 0
    ok: int = 0
    held: bool = False
    cancelled: bool = False
    outcomes: bytearray = field(default_factory=bytearray)
    bytes_moved: int = 0
    seconds: float = 0.0

    @property
    def depth(self) -> int:
        """Depth at which the job's last block ends."""
        return self.start + len(self.hashes)


class Ledger:
    """All open jobs of one engine."""

    def __init__(self, ranks: int, held_blocks_max: int) -> None:
        self._ids = itertools.count(1)
        self._jobs: dict[JobId, Job] = {}
        self._ranks = ranks
        self._held_blocks_max = held_blocks_max
        self._pool: BlockPool | None = None
        self.held_blocks = 0

    def bind(self, pool: BlockPool) -> None:
        """Say where references on blocks are taken. Without a pool nothing is saved."""
        self._pool = pool

    def room(self) -> int:
        """Blocks that one more save may hold now."""
        return 0 if self._pool is None else self._held_blocks_max - self.held_blocks

    def free_share(self) -> float:
        """Share of the engine's blocks that could be allocated now."""
        return 1.0 if self._pool is None else self._pool.free_share()

    def open(
        self,
        kind: JobKind,
        request: RequestId,
        namespace: Namespace,
        span: tuple[int, Sequence[BlockHash], Sequence[BlockId]],
        now: float,
    ) -> Job:
        """A new job over span = (start depth, hashes, blocks). A save holds its blocks at once;
        a load's blocks are held by the engine."""
        start, hashes, blocks = span
        assert len(hashes) == len(blocks) > 0, "a job moves at least one block"
        saving = kind is JobKind.SAVE
        job = Job(
            id=JobId(next(self._ids)),
            kind=kind,
            request=request,
            namespace=namespace,
            start=start,
            hashes=tuple(hashes),
            blocks=tuple(blocks),
            state=JobState.QUEUED if saving else JobState.READY,
            opened=now,
            ranks_left=self._ranks,
        )
        if saving:
            assert self._pool is not None
            self._pool.hold(job.blocks)
            self.held_blocks += len(job.blocks)
            job.held = True
        self._jobs[job.id] = job
        return job

    def get(self, job: JobId) -> Job | None:
        """The open job of that id, or None: it has ended, or was never ours."""
        return self._jobs.get(job)

    def release(self, job: Job) -> None:
        """Give the job's blocks back, once."""
        if job.held:
            assert self._pool is not None
            job.held = False
            self.held_blocks -= len(job.blocks)
            self._pool.release(job.blocks)

    def settle(self, job: Job) -> None:
        """The job has ended: its blocks are given back and its id is forgotten."""
        assert self._jobs.pop(job.id, None) is job, f"job {job.id} ended twice"
        self.release(job)

    def report(self, result: JobResult) -> Job | None:
        """Take one rank's result. Returns the job once the last rank has reported, else None.

        A block counts as moved only if it was on every rank (I2).
        """
        job = self._jobs.get(result.job)
        if job is None or job.ranks_left == 0:
            return None
        moved = len(job.blocks) - job.first
        assert len(result.outcomes) == moved, f"result of job {job.id} doesn't name every block"
        if not job.outcomes:
            job.outcomes = bytearray(result.outcomes)
        else:
            for index, outcome in enumerate(result.outcomes):
                job.outcomes[index] = max(job.outcomes[index], outcome)
        job.bytes_moved += result.bytes_moved
        job.seconds = max(job.seconds, result.seconds)
        job.ranks_left -= 1
        if job.ranks_left:
            return None
        job.ok = next(
            (i for i, o in enumerate(job.outcomes) if o != BlockOutcome.OK), len(job.outcomes)
        )
        return job

    def __len__(self) -> int:
        return len(self._jobs)

    def jobs(self) -> list[Job]:
        """All open jobs."""
        return list(self._jobs.values())

    def bytes_open(self, kind: JobKind, block_bytes: int) -> int:
        """Bytes of open jobs of one kind."""
        return sum(len(j.blocks) * block_bytes for j in self._jobs.values() if j.kind is kind)

    def check_integrity(self) -> list[str]:
        """Violations of I6 as far as this side can see; empty when sound."""
        held = sum(len(job.blocks) for job in self._jobs.values() if job.held)
        return [] if held == self.held_blocks else [f"{self.held_blocks} held, jobs say {held}"]
