"""Messages between the scheduler half and the worker half of the connector.

`ReqMeta` is what one request asks of a worker rank in one step: a `SaveMeta` or a `LoadMeta`.
Frozen array-like msgspec structs, fields only ever appended; a worker never writes into one.

Leaf module: standard library and msgspec only.
"""

from __future__ import annotations

import enum

import msgspec

from connector.ids import (
    NO_SESSION,
    BlockHash,
    BlockId,
    Generation,
    JobId,
    Namespace,
    NodeId,
    RequestId,
    SessionKey,
)


class Message(msgspec.Struct, frozen=True, array_like=True):
    """Base: frozen, positional on the wire."""


class Placed(Message, frozen=True):
    """`count` consecutive blocks of a job that lie on `node`; incarnation of the node as listed."""

    node: NodeId
    count: int
    incarnation: bytes = b""


class ReqMeta(Message, frozen=True):
    """One job of one request, the same for every rank.

    hashes[i] is the key of the block in cache page blocks[i]; len(hashes) == len(blocks) > 0.
    placed: where the blocks lie, in order; the counts add up to len(blocks).
    store: the index's incarnation (8 bytes), part of every object key, as is `namespace`, which
    moves to a new epoch when the engine's cache is reset.
    deadline_s: seconds from the moment a worker receives the job; then it has ended, either way.
    """

    job: JobId
    request: RequestId
    store: bytes
    hashes: tuple[BlockHash, ...]
    blocks: tuple[BlockId, ...]
    placed: tuple[Placed, ...]
    deadline_s: float
    session: SessionKey = NO_SESSION
    generation: Generation = Generation(0)
    namespace: Namespace = Namespace(b"")


class SaveMeta(ReqMeta, frozen=True, tag="save"):
    """Copy these pages to the store. The scheduler holds a reference on each until all report.

    grouped: the blocks lie below what conversations share, so that a store that evicts by itself
    may evict them together with the rest of the session.
    """

    grouped: bool = False


class LoadMeta(ReqMeta, frozen=True, tag="load"):
    """Fill these pages from the store. The engine owns them for this request until all report."""


class StepMeta(Message, frozen=True):
    """Everything the worker ranks are to do, sent with one engine step.

    revoked: saves that have lost their blocks, to be told to the worker before this step's forward
    pass, which may overwrite them.
    """

    loads: tuple[LoadMeta, ...] = ()
    saves: tuple[SaveMeta, ...] = ()
    revoked: tuple[JobId, ...] = ()

    @property
    def empty(self) -> bool:
        """True if there is nothing to do."""
        return not (self.loads or self.saves or self.revoked)


class BlockOutcome(enum.IntEnum):
    """What became of one block of a job on one rank."""

    OK = 0
    MISSING = 1  # the object is not there
    CORRUPT = 2  # wrong header, length or checksum
    FAILED = 3  # the node, the connection or a copy failed
    TIMED_OUT = 4  # the deadline passed
    DECLINED = 5  # a queue was full, or the worker is shutting down


class JobKind(enum.IntEnum):
    """Direction of a job."""

    SAVE = 0
    LOAD = 1


class JobResult(Message, frozen=True):
    """The one and only result of a job on one rank; it names every block.

    outcomes: one byte per block of the job, a `BlockOutcome` each; blocks: the job's.
    bytes_moved: payload bytes put into the cache or handed to the server.
    seconds: from receiving the job to its end.
    """

    job: JobId
    request: RequestId
    kind: JobKind
    rank: int
    outcomes: bytes
    bytes_moved: int = 0
    seconds: float = 0.0
    session: SessionKey = NO_SESSION
    blocks: tuple[BlockId, ...] = ()

    @property
    def ok_prefix(self) -> int:
        """Blocks, from the first, that are all OK."""
        for index, outcome in enumerate(self.outcomes):
            if outcome != BlockOutcome.OK:
                return index
        return len(self.outcomes)


class WorkerReport(Message, frozen=True):
    """What a rank reports back with one step. Counters are totals since the last report."""

    rank: int
    results: tuple[JobResult, ...] = ()
    counters: dict[str, int] = {}
