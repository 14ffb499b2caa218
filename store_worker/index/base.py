"""The session index as its client thread sees it (DESIGN section 5).

Two implementations: `MemoryIndex` (the reference, also used by the simulation and the replay) and
`RedisIndex` (server-side scripts). One contract suite runs over both. Every call is one atomic
operation; `now_ms` 0 means the server's clock, and time is kept monotone inside.

Raises StoreUnavailable / StoreTimeout when the server can't be asked; nothing else is raised for
the world's failures. Thread: one caller at a time per instance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from connector.ids import BlockHash, GrantId, Namespace, NodeId, SessionKey
from connector.indexmsg import (
    Acquired,
    Closed,
    CommitRequest,
    Committed,
    Declined,
    Granted,
    IndexIdentity,
    NodeState,
    PrepareRequest,
    Recalled,
    SessionState,
    Victim,
)
from store_worker.policy import Ended, ScoreTable, Turn


class SessionIndex(Protocol):
    """Every operation of the index."""

    def identity(self) -> IndexIdentity:
        """The index's incarnation and secret, made once by set-if-absent."""

    def register_node(self, node: NodeId, incarnation: bytes, capacity_bytes: int) -> None:
        """Say that a node is up with this incarnation; another incarnation makes its old runs
        dead. capacity_bytes 0: the node evicts by itself and is not accounted for."""

    def set_charge(self, node: NodeId, object_bytes: int, charged_bytes: int) -> None:
        """What the node's server really uses for an object of that size (MEMORY USAGE)."""

    def node_down(self, node: NodeId) -> None:
        """New blocks avoid the node; its runs stay listed for its return."""

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
        16), cut at the first run without a live copy; leases the last usable block and counts as
        a use. At most 64 runs."""

    def prepare(self, request: PrepareRequest, now_ms: int = 0) -> Granted | Declined:
        """Room for one save; names victims if some must go first."""

    def commit(self, request: CommitRequest, now_ms: int = 0) -> Committed:
        """Make saved blocks visible, move the session's hold, record boundaries. Idempotent."""

    def abort(self, grant: GrantId, now_ms: int = 0) -> None:
        """Give a grant back. Unknown grants are ignored."""

    def freed(self, victims: Sequence[Victim], now_ms: int = 0) -> None:
        """These victims' objects are deleted: their bytes are room again."""

    def dying(self, node: NodeId, now_ms: int = 0) -> tuple[Victim, ...]:
        """Victims not reported freed for 5 s, to delete again (at most 128)."""

    def close(self, session: SessionKey, now_ms: int = 0) -> Closed:
        """End the generation at once, drop its holds, free upward what nothing else needs."""

    def retain(self, session: SessionKey, priority: int, ttl_s: float, now_ms: int = 0) -> None:
        """Bias eviction: classes with higher priority go later. Priority 0 undoes."""

    def pin(self, session: SessionKey, ttl_s: float, now_ms: int = 0) -> float:
        """Protect until a time. Returns the seconds granted (clipped or 0 when over quota)."""

    def forget(
        self, namespace: Namespace, hashes: Sequence[BlockHash], node: NodeId, now_ms: int = 0
    ) -> tuple[Victim, ...]:
        """Data was lost on `node`: lowers its run's live_to; returns what a bounded sweep frees."""

    def abandon(self, namespace: Namespace, tip: BlockHash, now_ms: int = 0) -> None:
        """A prefill hand-off failed: `tip` will not be committed. Remembered for a minute."""

    def awaited(self, namespace: Namespace, tip: BlockHash, now_ms: int = 0) -> bool:
        """True while `tip` is neither listed nor abandoned: whoever needs it should still wait."""

    def nodes(self) -> tuple[NodeState, ...]:
        """Accounting of every known node."""

    def sessions(self, cursor: int = 0, count: int = 100) -> tuple[int, tuple[SessionState, ...]]:
        """A page of known sessions and the next cursor (0: the end)."""

    def session(self, session: SessionKey) -> SessionState | None:
        """One session, or None."""

    def set_scores(self, table: ScoreTable) -> None:
        """Put a policy's table in force. Leaves keep the class of their last use; tables of
        another number of classes are refused while leaves are listed (ValueError)."""

    def turns(self, after: int = 0, count: int = 1000) -> tuple[int, tuple[Turn | Ended, ...]]:
        """What a policy learns from: the log's events number after+1 and on, at most `count`, and
        the number of the last one returned. The log is bounded; what fell out of it is skipped."""

    def check_integrity(self) -> list[str]:
        """Every violated invariant (I1, I5, I9b, refs), in words; empty when sound."""
