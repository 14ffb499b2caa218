"""The index client: the one thread that talks to the session index for an engine.

It implements `connector.ports.LookupPort`: the scheduler thread posts operations and polls replies
and never waits. Every operation gets exactly one reply, with a failure when the index can't be
reached in time. Data nodes are the janitor's business, so that a slow node delays no lookup.

Thread: `post`, `poll`, `pending` and `close` on the scheduler thread; everything with an
underscore on the `session-index` thread, except where it says otherwise.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from connector.clock import Clock
from connector.config import Config
from connector.errors import StoreError, StoreUnavailable
from connector.ids import NO_NODE, NO_SESSION, NodeId, SessionKey
from connector.indexmsg import (
    CommitOutcome,
    CommitRequest,
    Committed,
    Declined,
    DeclineReason,
    IndexIdentity,
    PrepareRequest,
    Victim,
)
from connector.lookup import (
    AbandonOp,
    AbortOp,
    CloseOp,
    CloseReply,
    CommitOp,
    CommitReply,
    DoneReply,
    ForgetOp,
    HintOp,
    IndexOp,
    IndexReply,
    LookupOp,
    LookupReply,
    PrepareOp,
    PrepareReply,
    RenewOp,
)
from connector.session import session_key
from store_worker import placement
from store_worker.executor import Loop, Pool
from store_worker.index import janitor, search
from store_worker.index.base import SessionIndex
from store_worker.index.failures import failure
from store_worker.index.hints import take_hint
from store_worker.index.keeper import Keeper
from store_worker.index.limits import ROOM_TRIES
from store_worker.index.precheck import Precheck, cut

logger = logging.getLogger(__name__)

CHECK_EVERY_S = 1.0
FIT_EVERY_CHECKS = 10
TIP_POLL_S = 0.005
DOWN_S = 0.25
DYING_WAIT_S = 0.5
CLOSE_CALLS_MAX = 4096


class Pending(NamedTuple):
    """A posted operation; posted: clock seconds; tries: of a prepare that waits for room."""

    op: IndexOp
    posted: float
    tries: int = 0


class IndexClient:
    """See the module. `pool` runs janitor jobs."""

    def __init__(
        self,
        index: SessionIndex,
        config: Config,
        nodes: Sequence[NodeId],
        clock: Clock,
        pool: Callable[[IndexClient], Pool[janitor.Desk]],
    ) -> None:
        self._index = index
        self._config = config
        self._nodes = tuple(nodes)  # replaced whole, never changed
        self._clock = clock
        self.precheck: Precheck | None = None  # set before the first operation
        self._wake = threading.Condition()
        self._queue: deque[Pending] = deque()  # bounded by post(); guarded by _wake
        self._replies: deque[IndexReply] = deque()  # one per posted op; guarded by _wake
        self._open = 0  # posted and not polled; scheduler thread
        self._stopping = False  # guarded by _wake
        self._identity: IndexIdentity | None = None  # replaced whole, never changed
        self._gauges: Mapping[str, float] = {}  # replaced whole, never changed
        self._ready = threading.Event()
        self._down_until = 0.0
        self._check_at = 0.0
        self._tips: list[Pending] = []
        self._fit_turns = 0
        self._keeper = Keeper(config.policy)
        self._pool = pool(self)
        self._loop = Loop("session-index", self._run)

    # -- the scheduler thread's side ---------------------------------------------------------

    def post(self, op: IndexOp) -> bool:
        """See LookupPort."""
        if self._open >= self._config.queue_ops_max:
            return False
        with self._wake:
            if self._stopping:
                return False
            self._open += 1
            self._queue.append(Pending(op, self._clock.now()))
            self._wake.notify()
        return True

    def poll(self) -> Sequence[IndexReply]:
        """See LookupPort."""
        if not self._replies:
            return ()
        with self._wake:
            replies = list(self._replies)
            self._replies.clear()
        self._open -= len(replies)
        return replies

    def pending(self) -> int:
        """See LookupPort."""
        return self._open

    def gauges(self) -> Mapping[str, float]:
        """See LookupPort."""
        return self._gauges

    def close(self, timeout_s: float) -> None:
        """See LookupPort."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._loop.join(timeout_s / 2)
        if self.precheck is not None:
            self.precheck.close()
        self._pool.stop(timeout_s / 2)

    def wait_ready(self, timeout_s: float) -> bool:
        """Until index and nodes were asked once, or the time is over. At start only."""
        return self._ready.wait(timeout_s)

    def tell_identity(self, identity: IndexIdentity) -> None:
        """The janitor has seen the index (its thread)."""
        self._identity = identity
        self._ready.set()

    def tell_nodes(self, nodes: Sequence[NodeId]) -> None:
        """The janitor has seen these data nodes (its thread)."""
        self._nodes = tuple(nodes)

    def tell_gauges(self, gauges: Mapping[str, float]) -> None:
        """The janitor has looked at the whole store (its thread)."""
        self._gauges = gauges

    # -- the loop ----------------------------------------------------------------------------

    def _run(self) -> None:
        self._look_around()  # an engine that starts waits for this
        while True:
            item = self._next()
            if item is None:
                with self._wake:
                    if self._stopping and not self._queue:
                        return
            else:
                self._answer(item)
            self._look_around()

    def _next(self) -> Pending | None:
        with self._wake:
            if not self._queue and not self._stopping:
                self._wake.wait(TIP_POLL_S if self._tips else CHECK_EVERY_S / 2)
            return self._queue.popleft() if self._queue else None

    def _look_around(self) -> None:
        now = self._clock.now()
        if now >= self._check_at:
            self._check_at = now + CHECK_EVERY_S
            self._pool.submit(janitor.CheckNodes())
            if self._fit_turns <= 0:
                self._fit_turns = FIT_EVERY_CHECKS
                self._pool.submit(self._keeper)
            self._fit_turns -= 1
        if self._tips:
            waiting, self._tips = self._tips, []
            for item in waiting:
                self._answer(item)

    def _answer(self, item: Pending) -> None:
        """Exactly one reply per operation, now or (waiting tips, prepares without room) later."""
        now = self._clock.now()
        try:
            if now < self._down_until:
                raise StoreUnavailable("the index did not answer a moment ago")
            reply = self._handle(item)
        except StoreError as error:
            logger.debug("index: %s failed: %s", type(item.op).__name__, error)
            if now >= self._down_until:
                self._down_until = self._clock.now() + DOWN_S
            reply = failure(item.op, self._clock.now() - item.posted)
        except Exception:
            logger.exception("index: %s failed", type(item.op).__name__)
            reply = failure(item.op, self._clock.now() - item.posted)
        if reply is not None:
            self._reply(reply)

    def _reply(self, reply: IndexReply) -> None:
        with self._wake:
            self._replies.append(reply)

    def _seen(self) -> IndexIdentity:
        if self._identity is None:
            self._identity = self._index.identity()
        return self._identity

    def _key(self, session_id: str | None, salt: str | None) -> SessionKey:
        if session_id is None:
            return NO_SESSION
        secret = bytes.fromhex(self._config.session_secret) or self._seen().secret
        return session_key(secret, self._config.tenant, salt, session_id)

    def _handle(self, item: Pending) -> IndexReply | None:
        op = item.op
        match op:
            case LookupOp():
                return self._lookup(item, op)
            case PrepareOp():
                return self._prepare(item, op)
            case CommitOp():
                return self._commit(op)
            case CloseOp():
                return self._close(op)
            case HintOp():
                session = self._key(op.session_id, op.cache_salt)
                pinned = partial(self._pinned, session, op)
                return take_hint(self._index, session, op, self._close, pinned)
            case AbortOp():
                self._delete(self._index.abort(op.grant))
            case ForgetOp():
                self._delete(self._index.forget(op.namespace, op.hashes, op.node))
            case RenewOp():
                self._index.acquire(op.namespace, [(op.hash, op.depth)], op.lease_s, NO_SESSION)
            case AbandonOp():
                self._index.abandon(op.namespace, op.tip)
        return DoneReply(op=type(op).__name__, ok=True)

    # -- operations --------------------------------------------------------------------------

    def _lookup(self, item: Pending, op: LookupOp) -> LookupReply | None:
        waited_s = self._clock.now() - item.posted
        if waited_s >= op.deadline_s and not op.wait_tip:
            raise StoreUnavailable("the lookup waited too long")
        tip = op.wait_tip
        if tip and waited_s < op.deadline_s and self._index.awaited(op.namespace, tip):
            self._tips.append(item)
            return None
        identity = self._seen()
        session = self._key(op.session_id, op.cache_salt)
        found = search.find(self._index, op.namespace, session, op.hashes, op.lease_s)
        if found.acquired.pending and waited_s < min(self._config.save_wait_s, op.deadline_s):
            self._tips.append(item)
            return None
        if self.precheck is not None and found.acquired.depth:
            found = self._prechecked(self.precheck, op, found)
        return LookupReply(
            ticket=op.ticket,
            request=op.request,
            outcome=found.outcome,
            session=session,
            generation=found.recalled.generation,
            home=found.recalled.home,
            store=identity.incarnation,
            depth=found.acquired.depth,
            slices=found.acquired.slices,
            round_trips=found.round_trips, turn_start=found.turn_start,
            seconds=self._clock.now() - item.posted,
        )

    def _prechecked(self, look: Precheck, op: LookupOp, found: search.Found) -> search.Found:
        """Without what the store has dropped by itself, which is forgotten."""
        store, acquired = self._seen().incarnation, found.acquired
        depth = look.first_missing(store, op.namespace, op.hashes, acquired)
        if depth == acquired.depth:
            return found
        self._delete(self._index.forget(op.namespace, [op.hashes[depth]], NO_NODE))
        return found._replace(acquired=cut(acquired, depth))

    def _prepare(self, item: Pending, op: PrepareOp) -> PrepareReply | None:
        nodes = placement.candidates(op.session, op.hashes[0], self._nodes, self._config.placement)
        answer = self._index.prepare(
            PrepareRequest(
                namespace=op.namespace,
                session=op.session,
                generation=op.generation,
                parent=op.parent,
                start=op.start,
                hashes=op.hashes,
                nodes=nodes,
                object_bytes=op.object_bytes,
                ranks=op.ranks,
                grant_s=op.grant_s,
                new_tokens=op.new_tokens,
                must=op.must,
            )
        )
        if isinstance(answer, Declined):
            waited_s = self._clock.now() - item.posted
            if answer.reason is DeclineReason.DYING and waited_s < DYING_WAIT_S:
                self._tips.append(item)  # the janitor is deleting it
                return None
            if answer.reason is DeclineReason.ROOM and item.tries < ROOM_TRIES:
                again = item._replace(tries=item.tries + 1)
                if self._delete(answer.victims, lambda: self._again(again)):
                    return None
            else:
                self._delete(answer.victims)
            return PrepareReply(job=op.job, declined=answer.reason)
        self._delete(answer.victims)
        return PrepareReply(
            job=op.job,
            grant=answer.grant,
            node=answer.node,
            incarnation=answer.incarnation,
            store=self._seen().incarnation,
            first_missing=answer.first_missing,
        )

    def _again(self, item: Pending) -> None:
        """The janitor has made room, or failed to (its thread)."""
        with self._wake:
            self._queue.append(item)
            self._wake.notify()

    def _commit(self, op: CommitOp) -> CommitReply:
        answer = self._index.commit(
            CommitRequest(
                namespace=op.namespace,
                session=op.session,
                generation=op.generation,
                grant=op.grant,
                saved=op.saved,
                parent=op.parent,
                start=op.start,
                turn_end=op.turn_end, beyond=op.beyond,
            )
        )
        self._after_commit(op, answer)
        return CommitReply(job=op.job, outcome=answer.outcome, already=len(answer.already))

    def _after_commit(self, op: CommitOp, answer: Committed) -> None:
        self._delete(answer.losers)
        if answer.copy:
            self._pool.submit(janitor.CopyShared(self._seen().incarnation, answer.copy))
        losers = {victim.hash for victim in answer.losers if victim.node == op.node}
        stored = tuple(h for h in op.hashes[: op.saved] if h not in losers)
        if answer.outcome is CommitOutcome.OK and stored:
            store = self._seen().incarnation
            self._pool.submit(
                janitor.Persist(store, op.namespace, op.node, stored, op.ranks, op.session)
            )

    def _pinned(self, session: SessionKey, op: HintOp, seconds: float) -> None:
        self._pool.submit(janitor.Pin(self._seen().incarnation, session, op, seconds))

    def _close(self, op: CloseOp) -> CloseReply:
        session = self._key(op.session_id, op.cache_salt)
        blocks = 0
        for call in range(CLOSE_CALLS_MAX):
            closed = self._index.close(session, resume=call > 0)
            blocks += closed.blocks
            self._delete(closed.victims)
            if not closed.more:
                break
        return CloseReply(session_id=op.session_id, ok=True, blocks=blocks)

    def _delete(
        self, victims: Sequence[Victim], then: Callable[[], None] | None = None
    ) -> bool:
        """Hand victims to the janitor. False if its queue is full (the index names them again)."""
        if not victims:
            return False
        store = self._seen().incarnation
        return self._pool.submit(janitor.Delete(store, victims, then))
