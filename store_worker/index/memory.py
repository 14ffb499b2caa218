"""The reference index: plain Python on plain records, the same algorithms as the server's scripts.

Also what the simulation and the replay run on. Thread: one caller at a time.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import islice

from connector.clock import Clock, SystemClock
from connector.ids import BlockHash, Generation, GrantId, Namespace, NodeId, SessionKey
from connector.indexmsg import (
    Acquired,
    Boundary,
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
from store_worker.index import commits, copies, loads, losses, room, saves, sessions, tree, views
from store_worker.index import limits as L
from store_worker.index.integrity import check
from store_worker.index.options import IndexOptions
from store_worker.index.records import State
from store_worker.index.requests import check_candidates, check_hashes, check_prepare
from store_worker.index.tree import Op
from store_worker.policy import Ended, ScoreTable, Turn


class MemoryIndex:
    """See `SessionIndex`. `view` gives another caller (engine) the same index."""

    def __init__(
        self,
        clock: Clock | None = None,
        options: IndexOptions | None = None,
        state: State | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        self._options = options or IndexOptions()
        self.state = state or State(os.urandom(8), os.urandom(32))

    def view(self, options: IndexOptions) -> MemoryIndex:
        """The same index for a caller with other options."""
        return MemoryIndex(self._clock, options, self.state)

    def _op(self, now_ms: int) -> Op:
        s = self.state
        s.clock_ms = max(s.clock_ms, now_ms or self._clock.wall_ms())
        return Op(s, s.clock_ms)

    # -- the index itself and its nodes ------------------------------------------------------

    def identity(self) -> IndexIdentity:
        """See SessionIndex."""
        return IndexIdentity(self.state.incarnation, self.state.secret)

    def register_node(
        self, node: NodeId, incarnation: bytes, capacity_bytes: int, now_ms: int = 0
    ) -> None:
        """See SessionIndex."""
        losses.register(self._op(now_ms), node, incarnation, capacity_bytes)

    def set_charge(self, node: NodeId, object_bytes: int, charged_bytes: int) -> None:
        """See SessionIndex."""
        known = self.state.nodes.get(node)
        if known is not None:
            known.charges[object_bytes] = charged_bytes

    def node_down(self, node: NodeId, now_ms: int = 0) -> None:
        """See SessionIndex."""
        losses.down(self._op(now_ms), node)

    def drain(self, node: NodeId, on: bool = True) -> None:
        """See SessionIndex."""
        known = self.state.nodes.get(node)
        if known is not None:
            known.draining = on

    # -- lookup ------------------------------------------------------------------------------

    def recall(self, namespace: Namespace, session: SessionKey, now_ms: int = 0) -> Recalled:
        """See SessionIndex."""
        s = self.state
        record = s.sessions.get(session)
        if record is None:
            return Recalled(Generation(s.generation), None)
        found = sorted(record.boundaries.get(namespace, []), reverse=True)
        home = NodeId(s.node_at(record.home).name) if record.home else None
        boundaries = tuple(Boundary(depth, BlockHash(block)) for depth, block in found)
        return Recalled(Generation(record.generation), home, boundaries)

    def probe(self, namespace: Namespace, hashes: Sequence[BlockHash]) -> tuple[bool, ...]:
        """See SessionIndex."""
        check_hashes(hashes)
        entries = self.state.entries.get(namespace, {})
        return tuple(block in entries for block in hashes)

    def acquire(
        self,
        namespace: Namespace,
        candidates: Sequence[tuple[BlockHash, int]],
        lease_s: float,
        session: SessionKey,
        now_ms: int = 0,
    ) -> Acquired:
        """See SessionIndex."""
        check_candidates(candidates)
        if not candidates:
            return Acquired(0)
        wish = loads.Wish(namespace, tuple(candidates), lease_s, session)
        return loads.acquire(self._op(now_ms), wish, self._options)

    # -- saves -------------------------------------------------------------------------------

    def prepare(self, request: PrepareRequest, now_ms: int = 0) -> Granted | Declined:
        """See SessionIndex."""
        check_prepare(request)
        op = self._op(now_ms)
        room.expire(op)
        sessions.tidy(op)
        return saves.prepare(op, request, self._options)

    def commit(self, request: CommitRequest, now_ms: int = 0) -> Committed:
        """See SessionIndex."""
        return commits.commit(self._op(now_ms), request, self._options)

    def copied(self, steps: Sequence[CopyStep], now_ms: int = 0) -> tuple[Victim, ...]:
        """See SessionIndex."""
        if not steps:
            return ()
        op = self._op(now_ms)
        copies.copied(op, steps)
        return tuple(op.victims)

    def moves(
        self, node: NodeId, now_ms: int = 0
    ) -> tuple[tuple[CopyStep, ...], tuple[Victim, ...]]:
        """See SessionIndex."""
        op = self._op(now_ms)
        steps = copies.moves(op, node)
        return steps, tuple(op.victims)

    def abort(self, grant: GrantId, now_ms: int = 0) -> tuple[Victim, ...]:
        """See SessionIndex."""
        op = self._op(now_ms)
        known = self.state.grants.get(grant)
        if known is not None and known.reply is None:
            room.settle_promise(op, known)
            self.state.grant_ends.discard(grant)
            del self.state.grants[grant]
            self.state.count("grants_aborted")
        return tuple(op.victims)

    def freed(self, victims: Sequence[Victim], now_ms: int = 0) -> None:
        """See SessionIndex."""
        if victims:
            room.freed(self._op(now_ms), list(victims))

    def dying(self, node: NodeId, now_ms: int = 0) -> tuple[Victim, ...]:
        """See SessionIndex."""
        op = self._op(now_ms)
        room.expire(op)
        sessions.tidy(op)
        room.sweep_free(op)
        room.sweep_dead(op)
        known = self.state.nodes.get(node)
        if known is not None:
            room.reissue(op, known, L.BLOCKS_MAX)
        return tuple(op.victims)

    def close(self, session: SessionKey, now_ms: int = 0, resume: bool = False) -> Closed:
        """See SessionIndex."""
        return losses.close(self._op(now_ms), session, resume) if session else Closed()

    def forget(
        self, namespace: Namespace, hashes: Sequence[BlockHash], node: NodeId, now_ms: int = 0
    ) -> tuple[Victim, ...]:
        """See SessionIndex."""
        check_hashes(hashes)
        if not hashes:
            return ()
        op = self._op(now_ms)
        losses.forget(op, namespace, hashes, node)
        return tuple(op.victims)

    # -- hints and hand-offs -----------------------------------------------------------------

    def retain(self, session: SessionKey, priority: int, ttl_s: float, now_ms: int = 0) -> None:
        """See SessionIndex."""
        if session:
            sessions.retain(self._op(now_ms), session, priority, ttl_s, self._options.tenant)

    def pin(self, session: SessionKey, ttl_s: float, now_ms: int = 0) -> float:
        """See SessionIndex."""
        if not session or ttl_s <= 0 or not self._options.pinned_bytes_max:
            return 0.0
        return sessions.pin(self._op(now_ms), session, ttl_s, self._options)

    def awaited(self, namespace: Namespace, tip: BlockHash, now_ms: int = 0) -> bool:
        """See SessionIndex."""
        op = self._op(now_ms)
        since = op.s.abandoned.score((namespace, tip))
        abandoned = since is not None and since > op.now - L.ABANDONED_MS
        return not abandoned and tree.find(op, namespace, tip) is None

    def abandon(self, namespace: Namespace, tip: BlockHash, now_ms: int = 0) -> None:
        """See SessionIndex."""
        op = self._op(now_ms)
        op.s.abandoned.add((namespace, tip), op.now)
        if len(op.s.abandoned) > L.ABANDONED_MAX:
            op.s.abandoned.discard(next(iter(op.s.abandoned)))

    # -- inspection --------------------------------------------------------------------------

    def describe(self, namespace: Namespace, text: str, tokens_per_block: int) -> None:
        """See SessionIndex."""
        self.state.described.setdefault(namespace, (text, tokens_per_block))

    def namespaces(self) -> Mapping[Namespace, tuple[str, int, int]]:
        """See SessionIndex."""
        return views.namespaces(self.state)

    def nodes(self) -> tuple[NodeState, ...]:
        """See SessionIndex."""
        return tuple(views.node_state(node) for node in self.state.by_idx)

    def sessions(self, cursor: int = 0, count: int = 100) -> tuple[int, tuple[SessionState, ...]]:
        """See SessionIndex."""
        keys = self.state.by_seq.between(cursor + 1, float("inf"))[:count]
        states = tuple(views.session_state(self.state, SessionKey(key)) for key in keys)
        last = int(self.state.by_seq.score(keys[-1]) or 0) if len(keys) == count else 0
        return last, states

    def session(self, session: SessionKey) -> SessionState | None:
        """See SessionIndex."""
        known = session in self.state.sessions
        return views.session_state(self.state, session) if known else None

    def stats(self) -> Mapping[str, int]:
        """See SessionIndex."""
        return views.stats(self.state)

    def lead(self, owner: str, ttl_s: float, now_ms: int = 0) -> bool:
        """See SessionIndex."""
        op = self._op(now_ms)
        leader, until_ms = op.s.leader
        if leader != owner and op.now < until_ms:
            return False
        op.s.leader = owner, op.now + round(ttl_s * 1000)
        return True

    def set_scores(self, table: ScoreTable) -> None:
        """See SessionIndex."""
        views.check_table(self.state.table, table, bool(self.state.runs))
        self.state.table = table

    def turns(self, after: int = 0, count: int = 1000) -> tuple[int, tuple[Turn | Ended, ...]]:
        """See SessionIndex."""
        s = self.state
        first = s.logged - len(s.log)
        skip = max(0, after - first)
        events = tuple(islice(s.log, skip, skip + count))
        return first + skip + len(events), events

    def snapshot(self) -> State:
        """See SessionIndex. The state itself, not a copy."""
        return self.state

    def check_integrity(self) -> list[str]:
        """See SessionIndex."""
        return check(self.state)

