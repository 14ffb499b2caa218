"""What the scheduler half remembers of one request (`RequestTracker`).

Core module. Owned by the engine's scheduler thread. The session of a request enters here and
leaves in each of its `ReqMeta`s.

    lookup:  WAITING ──reply or deadline──► KNOWN
    load:    none ──alloc──► loading ──all ranks──► none      (at most one at a time)
    saves:   a window of jobs, committed in the order of their depth
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from connector.ids import (
    NO_GENERATION,
    NO_HASH,
    NO_SESSION,
    BlockHash,
    BlockId,
    Generation,
    JobId,
    Namespace,
    RequestId,
    SessionKey,
)
from connector.indexmsg import RunSlice
from connector.ledger import Job
from connector.lookup import HintOp


class RequestLike(Protocol):
    """An engine's request as the core reads it; never written. The engine keeps changing it."""

    @property
    def request_id(self) -> str: ...
    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Chained hash of each full block of the tokens known so far."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...


@dataclass(frozen=True)
class Identity:
    """Who a request belongs to, as the entrance resolved it."""

    session_id: str | None = None
    cache_salt: str | None = None
    wait_tip: BlockHash = NO_HASH
    must_save: bool = False
    tells_namespace: bool = False


class Promise(NamedTuple):
    """Blocks (start, stop] of the chain that a match promised, and where they lie."""

    start: int
    stop: int
    slices: tuple[RunSlice, ...]


@dataclass
class RequestTracker:
    """State of one request. Depths count blocks from the root of its chain.

    known: depth that the store is known to have (by lookup, or by our own commits).
    promise: what the last match promised, until it is allocated.
    planned: depth up to which saves are planned. usable_max: bad blocks seen, load nothing deeper.
    computed: tokens whose KV exists once the last step it was in has run: an engine also counts
    tokens as computed that somebody has only promised to load.
    turn_start: depth that the turn before had. declined: the policy let no more of it in.
    """

    request: RequestLike
    identity: Identity
    namespace: Namespace
    deadline: float
    session: SessionKey = NO_SESSION
    generation: Generation = NO_GENERATION
    store: bytes = b""
    ticket: int = 0
    answered: bool = False
    identified: bool = False
    hit_kind: str = "miss"
    slices: tuple[RunSlice, ...] = ()
    known: int = 0
    lease_until: float = 0.0
    usable_max: int = 1 << 40
    promise: Promise | None = None
    loading: JobId | None = None
    blocks: list[BlockId] = field(default_factory=list)
    planned: int = 0
    computed: int = 0
    committed: int = 0
    window: list[Job] = field(default_factory=list)
    saving: bool = True
    retry_at: float = 0.0
    regained: bool = False
    finished: bool = False
    turn_sent: bool = False
    turn_start: int = 0
    declined: bool = False
    hints: tuple[HintOp, ...] = ()
    counted: bool = False

    @property
    def id(self) -> RequestId:
        """The engine's id of the request."""
        return RequestId(self.request.request_id)

    def hash_at(self, depth: int) -> BlockHash:
        """Hash of the block that ends at `depth`; NO_HASH at depth 0."""
        return BlockHash(self.request.block_hashes[depth - 1]) if depth else NO_HASH
