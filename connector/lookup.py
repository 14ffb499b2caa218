"""Operations that the scheduler half posts to the index client thread, and their replies.

Leaf module. An operation names who asked (`request` or `job`), so that a reply finds its way back
without shared state. Every operation gets exactly one reply.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

import msgspec

from connector.ids import (
    NO_HASH,
    NO_NAMESPACE,
    NO_SESSION,
    BlockHash,
    Generation,
    GrantId,
    JobId,
    Namespace,
    NodeId,
    RequestId,
    SessionKey,
)
from connector.indexmsg import (
    CommitOutcome,
    DeclineReason,
    RunSlice,
    Struct,
    TurnEnd,
)


class LookupOp(Struct, frozen=True):
    """Find the longest stored prefix of a request.

    ticket: echoed by the reply (a request may ask more than once).
    session_id and cache_salt are the raw strings: the client thread makes the key of them.
    hashes: the chain of the request's whole blocks that may be loaded. depth_min: what the engine
    has itself; nothing shorter is worth an answer. deadline_s: seconds from posting.
    wait_tip: a prefill hand-off: answer only once this hash is committed, abandoned or the
    deadline has passed.
    lease_s: how long the found prefix is protected.
    """

    ticket: int
    request: RequestId
    namespace: Namespace
    session_id: str | None
    cache_salt: str | None
    hashes: tuple[BlockHash, ...]
    deadline_s: float
    lease_s: float
    wait_tip: BlockHash = NO_HASH
    hints: tuple[HintOp, ...] = ()


class LookupOutcome(enum.StrEnum):
    """How a lookup ended."""

    HIT_TIP = "hit_tip"  # by one of the session's own boundaries
    HIT_SHARED = "hit_shared"  # by searching what others have stored
    MISS = "miss"
    UNAVAILABLE = "unavailable"  # the index could not be asked in time


class LookupReply(Struct, frozen=True):
    """Answer to a LookupOp. `depth` blocks can be loaded, as `slices` say.

    session and generation are what later operations of the request carry; store is the index's
    incarnation. round_trips: how many the client needed. turn_start: depth that the session's
    turn before had on this chain, stored or not; of a first turn, what others have stored.
    """

    ticket: int
    request: RequestId
    outcome: LookupOutcome
    session: SessionKey = NO_SESSION
    generation: Generation = Generation(0)
    home: NodeId | None = None
    store: bytes = b""
    depth: int = 0
    slices: tuple[RunSlice, ...] = ()
    round_trips: int = 0
    seconds: float = 0.0
    turn_start: int = 0


class PrepareOp(Struct, frozen=True):
    """Ask for room for one save; see `indexmsg.PrepareRequest`. start: depth of `parent`."""

    job: JobId
    namespace: Namespace
    session: SessionKey
    generation: Generation
    parent: BlockHash
    start: int
    hashes: tuple[BlockHash, ...]
    object_bytes: int
    ranks: int
    grant_s: float
    new_tokens: int = 0
    must: bool = False


class PrepareReply(Struct, frozen=True):
    """Answer to a PrepareOp: a grant, or why not (`declined`; None with `unavailable`)."""

    job: JobId
    grant: GrantId = GrantId(0)
    node: NodeId = NodeId("")
    incarnation: bytes = b""
    store: bytes = b""
    first_missing: int = 0
    declined: DeclineReason | None = None
    unavailable: bool = False


class CommitOp(Struct, frozen=True):
    """Make a job's first `saved` blocks (from the grant's first missing one) visible.

    hashes: all hashes of the grant, parent first_missing as in the PrepareReply; the client
    PERSISTs the objects of the saved ones after the commit. With grant 0: a touch of the chain
    that ends with `parent` at depth `start`; `beyond`: see `indexmsg.CommitRequest`.
    """

    job: JobId
    namespace: Namespace
    session: SessionKey
    generation: Generation
    grant: GrantId = GrantId(0)
    node: NodeId = NodeId("")
    saved: int = 0
    hashes: tuple[BlockHash, ...] = ()
    ranks: int = 1
    parent: BlockHash = NO_HASH
    start: int = 0
    turn_end: TurnEnd | None = None
    beyond: BlockHash = NO_HASH


class CommitReply(Struct, frozen=True):
    """Answer to a CommitOp; outcome None: the index could not be reached."""

    job: JobId
    outcome: CommitOutcome | None
    already: int = 0


class AbortOp(Struct, frozen=True):
    """Give a grant back: nothing of it will be committed; the objects may be deleted."""

    job: JobId
    namespace: Namespace
    grant: GrantId
    node: NodeId
    hashes: tuple[BlockHash, ...]
    ranks: int


class ForgetOp(Struct, frozen=True):
    """The objects of these blocks were found missing or corrupt."""

    namespace: Namespace
    hashes: tuple[BlockHash, ...]
    node: NodeId = NodeId("")


class RenewOp(Struct, frozen=True):
    """Extend the lease on the chain that ends with `hash` (a running request needs it)."""

    namespace: Namespace
    hash: BlockHash
    depth: int
    lease_s: float


class CloseOp(Struct, frozen=True):
    """The conversation is over: end its generation and free what nothing else needs."""

    session_id: str
    cache_salt: str | None = None


class CloseReply(Struct, frozen=True):
    """Answer to a CloseOp. blocks: how many became free; ok False: the index was unreachable."""

    session_id: str
    ok: bool
    blocks: int = 0


class AbandonOp(Struct, frozen=True):
    """A prefill hand-off failed: whoever waits for this tip should stop."""

    namespace: Namespace
    tip: BlockHash


class HintKind(enum.StrEnum):
    """Action types of a kv_hints envelope."""

    RETAIN = "retain"
    PIN = "pin"
    RELEASE = "release"
    DEMOTE = "demote"


class HintOp(Struct, frozen=True):
    """One accepted kv_hints action on a session.

    namespace, hashes: the chain of the request that brought it; only with PIN, for a store that
    evicts by itself and has to be told of every block.
    """

    session_id: str
    cache_salt: str | None
    kind: HintKind
    ttl_s: float = 0.0
    priority: int = 0
    namespace: Namespace = NO_NAMESPACE
    hashes: tuple[BlockHash, ...] = ()

    def on_chain(self, namespace: Namespace, hashes: Iterable[bytes]) -> HintOp:
        """The same of this chain, if it needs one."""
        if self.kind is not HintKind.PIN:
            return self
        chain = tuple(BlockHash(hash) for hash in hashes)
        return msgspec.structs.replace(self, namespace=namespace, hashes=chain)


class HintReply(Struct, frozen=True):
    """Answer to a HintOp: accepted, clipped (to a tenant's limit) or rejected, and why."""

    kind: HintKind
    outcome: str
    why: str = ""


class DoneReply(Struct, frozen=True):
    """Answer to operations that need none but the bookkeeping (abort, forget, renew, abandon)."""

    op: str
    ok: bool


IndexOp = (
    LookupOp | PrepareOp | CommitOp | AbortOp | ForgetOp | RenewOp | CloseOp | AbandonOp | HintOp
)
IndexReply = LookupReply | PrepareReply | CommitReply | CloseReply | HintReply | DoneReply
