"""What the session index is asked and what it answers (DESIGN section 5).

Frozen array-like msgspec structs: fields are only ever appended. Hashes are the engine's chained
block hashes, depths count blocks from the root (the first block ends at depth 1). Times are
milliseconds of the index's clock; `now_ms` 0 means the server's own clock.

Leaf module: standard library and msgspec only.
"""

from __future__ import annotations

import enum

import msgspec

from connector.ids import (
    NO_HASH,
    NO_SESSION,
    BlockHash,
    Generation,
    GrantId,
    Namespace,
    NodeId,
    SessionKey,
)

BLOCKS_PER_CALL_MAX = 128
BOUNDARIES_MAX = 64


class Struct(msgspec.Struct, frozen=True, array_like=True):
    """Base of every message here: frozen, positional on the wire."""


class Boundary(Struct, frozen=True):
    """A remembered depth of a session's chain: `hash` is the hash of the block ending there."""

    depth: int
    hash: BlockHash


class Recalled(Struct, frozen=True):
    """Answer of `recall`. An unknown session has no home and no boundaries.

    generation: pass it on to `prepare` and `commit`; it goes stale when the session is closed.
    home: where the session's new blocks go, or None if no home is fixed yet.
    boundaries: at most 64, deepest first.
    """

    generation: Generation
    home: NodeId | None
    boundaries: tuple[Boundary, ...] = ()


class RunSlice(Struct, frozen=True):
    """Consecutive blocks (start, stop] of the acquired chain that lie on one node.

    start, stop: depths; the slice holds blocks number start+1 .. stop.
    ranks: objects per block. incarnation: of the node when the blocks were saved.
    """

    node: NodeId
    incarnation: bytes
    start: int
    stop: int
    ranks: int = 1


class Acquired(Struct, frozen=True):
    """Answer of `acquire`: the usable prefix, whole and leased.

    depth: blocks that can be loaded (0: a miss). slices cover (0, depth] in order.
    pending: a deeper candidate is part of a save under way: soon there will be more.
    """

    depth: int
    slices: tuple[RunSlice, ...] = ()
    lease_until_ms: int = 0
    pending: bool = False


class Victim(Struct, frozen=True):
    """A block taken out of the index whose objects (one per rank) must now be deleted."""

    namespace: Namespace
    hash: BlockHash
    node: NodeId
    ranks: int = 1


class DeclineReason(enum.StrEnum):
    """Why the index promised no room."""

    ROOM = "room"  # victims were named: delete them, report `freed`, ask again
    FULL = "full"  # nothing on the node may be evicted now
    NOT_WORTH = "not_worth"  # what is stored is worth more than this save
    STALE_GENERATION = "stale_generation"
    MISSING_PARENT = "missing_parent"
    NO_NODE = "no_node"  # every candidate node is down, draining or unknown
    DYING = "dying"  # a block of the save is being deleted; ask again later
    QUOTA = "quota"  # the tenant's limit is reached


class PrepareRequest(Struct, frozen=True):
    """Room for one save: `hashes` (at most 128) follow `parent`, which ends at depth `start`.

    nodes: one node (forced) or two rendezvous candidates, used when the session has no live home.
    object_bytes: payload and header of one rank's object; the index charges what the node's server
    really uses for that size. new_tokens: of this turn so far, for the policy's class.
    must: a prefill hand-off, never declined by the policy.
    """

    namespace: Namespace
    session: SessionKey = NO_SESSION
    generation: Generation = Generation(0)
    parent: BlockHash = NO_HASH
    start: int = 0
    hashes: tuple[BlockHash, ...] = ()
    nodes: tuple[NodeId, ...] = ()
    object_bytes: int = 0
    ranks: int = 1
    grant_s: float = 60.0
    new_tokens: int = 0
    must: bool = False


class Granted(Struct, frozen=True):
    """Room is promised until `expires_ms`.

    first_missing: index into `hashes` of the first block to save; everything before it is listed
    already. Equal to len(hashes): nothing to save, `commit` is a touch.
    victims: delete them, then report `freed`; room for this grant does not depend on it.
    """

    grant: GrantId
    node: NodeId
    incarnation: bytes
    first_missing: int
    expires_ms: int
    victims: tuple[Victim, ...] = ()


class Declined(Struct, frozen=True):
    """No room promised."""

    reason: DeclineReason
    victims: tuple[Victim, ...] = ()


class TurnEnd(Struct, frozen=True):
    """Where a turn's prompt and reply ended, as boundaries to remember (at most 4)."""

    boundaries: tuple[Boundary, ...]
    new_tokens: int = 0


class CommitOutcome(enum.StrEnum):
    """What became of a commit."""

    OK = "ok"
    MISSING_PARENT = "missing_parent"
    STALE_GENERATION = "stale_generation"
    EXPIRED = "expired"  # the grant is unknown: it expired, or the index was lost
    DYING = "dying"  # one of the blocks is being deleted on that node; nothing was committed


class CommitRequest(Struct, frozen=True):
    """Make a grant's blocks visible, or, with grant 0, touch the chain that ends at `parent`.

    saved: how many blocks, from the grant's first missing one, were saved on every rank.
    turn_end: given with the turn's last commit.
    beyond: with grant 0, the chain's block after `parent` if it was not stored (a declined save):
    it names the conversation for the policy when nothing of it is stored.
    """

    namespace: Namespace
    session: SessionKey = NO_SESSION
    generation: Generation = Generation(0)
    grant: GrantId = GrantId(0)
    saved: int = 0
    parent: BlockHash = NO_HASH
    start: int = 0
    turn_end: TurnEnd | None = None
    beyond: BlockHash = NO_HASH


class CopyStep(Struct, frozen=True):
    """Copy one block of the shared part (all ranks' objects) from `source` to `node`, then report
    `copied`. Room on `node` is reserved for 60 s."""

    namespace: Namespace
    hash: BlockHash
    source: NodeId
    node: NodeId
    ranks: int = 1


class Committed(Struct, frozen=True):
    """Answer of `commit`; the same when retried.

    already: indices (into the grant's saved blocks) that another engine had committed meanwhile.
    losers: blocks whose objects on the grant's node nobody lists: delete them and report `freed`.
    They come with every outcome but EXPIRED, and also name what was granted and not saved.
    copy: blocks of the shared part that are not yet on every node, for the committer to copy, in
    this order.
    """

    outcome: CommitOutcome
    already: tuple[int, ...] = ()
    losers: tuple[Victim, ...] = ()
    copy: tuple[CopyStep, ...] = ()


class Closed(Struct, frozen=True):
    """Answer of `close`. more: call again for the rest. blocks: how many became free."""

    blocks: int = 0
    victims: tuple[Victim, ...] = ()
    more: bool = False


class NodeState(Struct, frozen=True):
    """One data node as the index accounts for it. All sizes in bytes."""

    node: NodeId
    incarnation: bytes
    up: bool
    draining: bool
    capacity: int
    stored: int
    copies: int
    granted: int
    dying: int
    blocks: int = 0


class SessionState(Struct, frozen=True):
    """One session, for people and routers."""

    session: SessionKey
    generation: Generation
    home: NodeId | None
    blocks: int
    tokens: int
    turns: int
    last_use_ms: int
    pinned_until_ms: int = 0
    priority: int = 0
    engines: tuple[str, ...] = ()


class IndexIdentity(Struct, frozen=True):
    """What the index itself is: changes when its data is lost.

    incarnation: 8 bytes, part of every object key. secret: 32 bytes, the key of session keys.
    """

    incarnation: bytes
    secret: bytes
