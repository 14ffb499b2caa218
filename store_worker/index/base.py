"""The session index as its client thread sees it (DESIGN section 5).

Two implementations: `MemoryIndex` (the reference, also used by the simulation and the replay) and
`RedisIndex` (server-side scripts). One contract suite runs over both. Every call is one atomic
operation; `now_ms` 0 means the server's clock, and time is kept monotone inside.

Every tuple of victims is a duty: delete their objects, then report `freed`. Who dies in between
loses nothing: `dying` and `prepare` name them again after 5 s, to anyone.

Raises StoreUnavailable / StoreTimeout when the server can't be asked; nothing else is raised for
the world's failures. Thread: one caller at a time per instance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from connector.ids import BlockHash, GrantId, Namespace, NodeId, SessionKey
from connector.indexmsg import (
    Acquired,
    Closed,
    CommitRequest,
    Committed,
    CopyStep,
    Declined,
    Granted,
    IndexIdentity,
    NodeState,
    PrepareRequest,
    Recalled,
    SessionState,
    Victim,
)
from store_worker.index.records import State
from store_worker.policy import Ended, ScoreTable, Turn


class SessionIndex(Protocol):
    """Every operation of the index."""

    def identity(self) -> IndexIdentity:
        """The index's incarnation and secret, made once by set-if-absent."""

    def register_node(
        self, node: NodeId, incarnation: bytes, capacity_bytes: int, now_ms: int = 0
    ) -> None:
        """Say that a node is up with this incarnation; another incarnation makes its old runs
        dead. capacity_bytes 0: the node evicts by itself and is not accounted for. Cheap and
        repeatable: after a lost index, `prepare` says NO_NODE until nodes are registered again."""

    def set_charge(self, node: NodeId, object_bytes: int, charged_bytes: int) -> None:
        """What the node's server really uses for an object of that size (MEMORY USAGE)."""

    def node_down(self, node: NodeId, now_ms: int = 0) -> None:
        """New blocks avoid the node; its runs stay listed for its return, ten minutes at least."""

    def drain(self, node: NodeId, on: bool = True) -> None:
        """New blocks avoid the node while it empties; sessions at home there move."""

    def recall(self, namespace: Namespace, session: SessionKey, now_ms: int = 0) -> Recalled:
        """What is remembered of a session. Creates nothing. One round trip, at most 4 KiB."""

    def probe(self, namespace: Namespace, hashes: Sequence[BlockHash]) -> tuple[bool, ...]:
        """Which of up to 128 blocks are listed (monotone along one chain, by I1)."""

    def acquire(
        self,
        namespace: Namespace,
        candidates: Sequence[tuple[BlockHash, int]],
        lease_s: float,
        session: SessionKey,
        now_ms: int = 0,
    ) -> Acquired:
        """The runs up to the first listed of `candidates` ((hash, depth), deepest first, at most
        16), cut at the first block without a live copy; leases the last usable block and counts as
        a use. At most 64 slices, in one of which neighbouring runs on one node are joined."""

    def prepare(self, request: PrepareRequest, now_ms: int = 0) -> Granted | Declined:
        """Room for one save; names victims if some must go first."""

    def commit(self, request: CommitRequest, now_ms: int = 0) -> Committed:
        """Make saved blocks visible, move the session's hold, record boundaries. Idempotent.
        `losers` are victims like any others."""

    def copied(self, steps: Sequence[CopyStep], now_ms: int = 0) -> tuple[Victim, ...]:
        """These copies are made, in the order in which they were asked for. Returns copies that
        are of no use any more. Steps that failed are not reported: their room comes back."""

    def moves(
        self, node: NodeId, now_ms: int = 0
    ) -> tuple[tuple[CopyStep, ...], tuple[Victim, ...]]:
        """What to copy away from a draining node, a few blocks at a time: report `copied`. A run
        whose blocks are all copied lies on the other node from then on. Empty steps: nothing can
        be moved now (all is under way, nowhere is room yet, or the node is empty)."""

    def abort(self, grant: GrantId, now_ms: int = 0) -> tuple[Victim, ...]:
        """Give a grant back; what it may have written dies. Unknown grants are ignored."""

    def freed(self, victims: Sequence[Victim], now_ms: int = 0) -> None:
        """These victims' objects are deleted: their bytes are room again."""

    def dying(self, node: NodeId, now_ms: int = 0) -> tuple[Victim, ...]:
        """Housekeeping, for each node about once a second: victims on that node that were not
        reported freed for 5 s, and what lost grants, closed sessions and lost data leave, on any
        node (each at most 128)."""

    def close(self, session: SessionKey, now_ms: int = 0, resume: bool = False) -> Closed:
        """End the generation at once, drop its holds, free upward what nothing else needs, at most
        96 blocks; while `more`, call again with `resume`, which ends no generation. What is
        leased at that moment is freed by a later `dying`, `close`, or as a first victim."""

    def retain(self, session: SessionKey, priority: int, ttl_s: float, now_ms: int = 0) -> None:
        """Bias eviction: blocks of higher priority (-1 to 3, clipped) go later. Priority 0 undoes.
        ttl_s 0: until the session is closed."""

    def pin(self, session: SessionKey, ttl_s: float, now_ms: int = 0) -> float:
        """Protect until a time. Returns the seconds granted (clipped or 0 when over quota)."""

    def forget(
        self, namespace: Namespace, hashes: Sequence[BlockHash], node: NodeId, now_ms: int = 0
    ) -> tuple[Victim, ...]:
        """Data was lost on `node` (empty: on whichever a block lies). Those blocks can't be
        acquired any more, nor can what lies behind them, until they are saved again; after a
        minute they are swept from the leaves. At most 128 hashes in 4 runs; more is left for the
        next load to find. Returns what must be deleted."""

    def awaited(self, namespace: Namespace, tip: BlockHash, now_ms: int = 0) -> bool:
        """Is it worth waiting for this tip: neither listed nor abandoned?"""

    def abandon(self, namespace: Namespace, tip: BlockHash, now_ms: int = 0) -> None:
        """A hand-off failed: nobody should wait for this tip (for a minute)."""

    def describe(self, namespace: Namespace, text: str, tokens_per_block: int) -> None:
        """What people should see for a namespace; kept if it is there already."""

    def namespaces(self) -> Mapping[Namespace, tuple[str, int, int]]:
        """Known namespaces: (text, tokens per block, listed blocks)."""

    def nodes(self) -> tuple[NodeState, ...]:
        """Accounting of every known node."""

    def sessions(self, cursor: int = 0, count: int = 100) -> tuple[int, tuple[SessionState, ...]]:
        """A page of known sessions, oldest first, and the next cursor (0: the end)."""

    def session(self, session: SessionKey) -> SessionState | None:
        """One session, or None. blocks: the depth of its longest stored chain."""

    def stats(self) -> Mapping[str, int]:
        """Counters since the index began, and gauges: `sessions`, `open_sessions` (holding
        blocks), `leases` (leased leaves), `runs`, `blocks`, `grants`."""

    def lead(self, owner: str, ttl_s: float, now_ms: int = 0) -> bool:
        """True if `owner` is the elected engine for the next `ttl_s`: nobody else is, or it was."""

    def set_scores(self, table: ScoreTable) -> None:
        """Put a policy's table in force. Leaves keep the class of their last use; tables of
        another number of classes are refused while leaves are listed (ValueError)."""

    def turns(self, after: int = 0, count: int = 1000) -> tuple[int, tuple[Turn | Ended, ...]]:
        """What a policy learns from: the log's events number after+1 and on, at most `count`, and
        the number of the last one returned. The log is bounded; what fell out of it is skipped."""

    def snapshot(self) -> State:
        """Everything, as plain records, for `verify` and for people; dear where there is much."""

    def check_integrity(self) -> list[str]:
        """Every violated invariant (I1, I5, I9b, refs), in words; empty when sound."""
