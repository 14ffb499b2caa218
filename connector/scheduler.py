"""The scheduler half of the connector, for any engine.

Core module. An adapter calls it on the engine's scheduler thread; nothing here waits (I8): the
index is reached through `LookupPort`, the workers through the metadata of steps.

    on_new_request ─► lookup posted            match ─► promise        allocate ─► load job
    build_step     ─► jobs for the workers     on_reports ─► jobs end  on_finished ─► turn ends
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from connector.clock import Clock
from connector.config import Config
from connector.context import Context
from connector.errors import HintError, SessionIdError
from connector.handoff import hand_off_of, hand_off_tip, is_probe, make_hand_off
from connector.hints import FIELD as HINTS
from connector.hints import parse_hints
from connector.ids import NO_HASH, BlockId, Namespace, RequestId
from connector.ledger import Ledger
from connector.loads import LoadFlow
from connector.lookup import (
    CloseOp,
    CloseReply,
    CommitReply,
    HintKind,
    HintReply,
    LookupReply,
    PrepareReply,
)
from connector.meta import JobKind, StepMeta, WorkerReport
from connector.planner import Engine
from connector.ports import BlockPool, LookupPort
from connector.pressure import Need, Pressure
from connector.saves import SaveFlow
from connector.session import resolve_session_id
from connector.stats import GAUGE, Data, Stats, merge
from connector.tracker import Identity, RequestLike, RequestTracker

PREFILL_TOKENS_MIN = 64


class Scheduled(NamedTuple):
    """One request's part of a step. num_computed_tokens: before the step. blocks: gives the full
    table; called only where there is something to plan, since long tables are dear to copy."""

    request: RequestId
    num_computed_tokens: int
    num_scheduled_tokens: int
    blocks: Callable[[], Sequence[BlockId]]


class Said(NamedTuple):
    """What a request says of itself besides its tokens, as the engine has it."""

    session_id: object = None
    cache_salt: str | None = None
    extra_args: Mapping[str, object] | None = None
    kv_transfer_params: Mapping[str, object] | None = None
    kv_hints: object = None


class ConnectorScheduler:
    """See the module. `namespace_of(epoch)` makes the namespace of an epoch."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        index: LookupPort,
        clock: Clock,
        namespace_of: Callable[[str], Namespace],
    ) -> None:
        held_max = max(1, int(engine.num_blocks * config.hold_share_max))
        self._context = Context(
            engine=engine,
            config=config,
            clock=clock,
            index=index,
            ledger=Ledger(engine.ranks, held_max),
            stats=Stats(),
            namespace=namespace_of(config.weights_version),
        )
        self._namespace_of = namespace_of
        self._loads = LoadFlow(self._context)
        self._saves = SaveFlow(self._context)
        self._pressure = Pressure()
        self._step_at: float | None = None
        self._step_tokens = 0
        self._renew_at = 0.0
        self._worker_counters: Data = {}
        self._gauges: Mapping[str, float] = {}

    @property
    def namespace(self) -> Namespace:
        """Namespace of the current epoch."""
        return self._context.namespace

    def bind_block_pool(self, pool: BlockPool) -> None:
        """Where references on the engine's blocks are taken; once, before the first step."""
        self._context.ledger.bind(pool)

    # -- requests ----------------------------------------------------------------------------

    def on_new_request(self, request: RequestLike, said: Said) -> None:
        """A request was queued: its lookup starts now. A second call with the same live request
        changes nothing; another request under a live id replaces it."""
        context = self._context
        id_ = RequestId(request.request_id)
        identity = self._identity(said)
        old = context.trackers.get(id_)
        if old is not None:
            if old.request is request:
                return
            self._retire(old)
        tracker = RequestTracker(
            request=request, identity=identity, namespace=context.namespace, deadline=0.0
        )
        context.trackers[id_] = tracker
        context.stats.add("requests", session="yes" if identity.session_id else "no")
        self._take_hints(said, tracker)
        self._loads.ask(tracker, context.config.pd_wait_s if identity.wait_tip else 0.0)

    def _identity(self, said: Said) -> Identity:
        """Whose request it is. An engine that has accepted the request can't refuse it here: an
        id that is not acceptable counts as none, and is counted."""
        stats = self._context.stats
        params = said.kv_transfer_params
        try:
            session_id = resolve_session_id(
                body=said.session_id, xargs=said.extra_args, kv_transfer_params=params
            )
            hand_off = hand_off_of(params)
            if session_id is None and hand_off is not None:
                session_id = resolve_session_id(body=hand_off.get("session"))
        except SessionIdError:
            stats.add("sessions_invalid")
            session_id = None
        tip = hand_off_tip(hand_off_of(params), self._context.namespace)
        if tip is None:
            stats.add("hand_offs_refused")
        return Identity(
            session_id=session_id,
            cache_salt=said.cache_salt,
            wait_tip=tip or NO_HASH,
            must_save=self._context.config.pd_role == "prefill",
            tells_namespace=is_probe(hand_off_of(params)),
        )

    def _take_hints(self, said: Said, tracker: RequestTracker) -> None:
        """Hints speak of the time after this turn: they are posted when it ends. A session that
        ends with it need not be saved any more."""
        envelope = said.kv_hints
        if envelope is None and said.kv_transfer_params:
            envelope = said.kv_transfer_params.get(HINTS)
        identity = tracker.identity
        try:
            hints = parse_hints(envelope, identity.session_id, identity.cache_salt)
        except HintError:
            self._context.stats.add("hints", outcome="malformed")
            return
        self._context.stats.add("hints", hints.ignored, outcome="unknown")
        tracker.hints = hints.ops
        if any(op.kind is HintKind.RELEASE for op in hints.ops):
            tracker.saving = False

    def match(self, request: RequestId, num_computed_tokens: int) -> int | None:
        """Tokens that can be loaded beyond the engine's own; None: ask again later."""
        self.poll()
        tracker = self._context.trackers.get(request)
        tokens = 0 if tracker is None else self._loads.match(tracker, num_computed_tokens)
        if tokens is not None:
            self._pressure.offered(request)
        return tokens

    def on_allocated(
        self, request: RequestId, blocks: Sequence[BlockId], num_external_tokens: int
    ) -> None:
        """The engine has allocated blocks; see `LoadFlow.allocate`."""
        self._pressure.placed(request)
        tracker = self._context.trackers.get(request)
        if tracker is not None:
            self._loads.allocate(tracker, blocks, num_external_tokens)

    def on_preempted(self, request: RequestId) -> None:
        """The request lost its blocks. What is being saved keeps its references; the chain is
        looked up again, since more of it may be stored by the time the request comes back."""
        tracker = self._context.trackers.get(request)
        self._pressure.preempted()
        if tracker is not None:
            tracker.blocks = []
            tracker.computed = 0
            tracker.promise = None
            self._context.stats.add("preemptions")
            self._loads.ask(tracker)

    def on_finished(
        self, request: RequestId, num_computed_tokens: int, blocks: Sequence[BlockId]
    ) -> dict[str, object] | None:
        """The request has ended, in whatever state. blocks: its table, as far as computed.

        The last sampled token has no KV, so at most num_tokens - 1 tokens count. Returns the
        hand-off for a decode engine if this is a prefill engine.
        """
        tracker = self._context.trackers.pop(request, None)
        self._pressure.placed(request)
        if tracker is None:
            return None
        self._loads.forget_request(tracker)
        tracker.blocks = list(blocks)
        tokens = min(num_computed_tokens, tracker.computed, tracker.request.num_tokens - 1)
        self._saves.finish(tracker, tokens)
        for hint in tracker.hints:
            self._context.post(hint.on_chain(tracker.namespace, tracker.request.block_hashes))
        return self._hand_off(tracker)

    def _hand_off(self, tracker: RequestTracker) -> dict[str, object] | None:
        if not (tracker.identity.must_save or tracker.identity.tells_namespace):
            return None
        tokens_per_block = self._context.engine.tokens_per_block
        depth = tracker.request.num_prompt_tokens // tokens_per_block
        depth = min(depth, len(tracker.request.block_hashes))
        return make_hand_off(
            tracker.identity.session_id,
            tracker.hash_at(depth),
            depth * tokens_per_block,
            tracker.namespace,
        )

    def _retire(self, tracker: RequestTracker) -> None:
        """Forget a request that never said good-bye."""
        self._loads.forget_request(tracker)
        self._saves.cancel(tracker)
        tracker.finished = True
        tracker.turn_sent = True

    # -- steps -------------------------------------------------------------------------------

    def build_step(self, scheduled: Iterable[Scheduled]) -> StepMeta:
        """What the workers are to do with this step. Called once per step, also an empty one.

        First what is ready is sent, then what this step will compute is planned: so nothing is
        read before the step that computes it has been issued.
        """
        self.poll()
        loads, saves = self._loads.send(), self._saves.send()
        prefill_tokens = 0
        idle = True
        for part in scheduled:
            idle = False
            tracker = self._context.trackers.get(part.request)
            if tracker is None:
                continue
            done = part.num_computed_tokens + part.num_scheduled_tokens
            tracker.computed = done
            if part.num_scheduled_tokens >= PREFILL_TOKENS_MIN:
                prefill_tokens += part.num_scheduled_tokens
            if done // self._context.engine.tokens_per_block > tracker.planned and tracker.saving:
                tracker.blocks = list(part.blocks())
                self._saves.plan(tracker, done)
        self._measure(prefill_tokens)
        context = self._context
        free_share = context.ledger.free_share()
        need = self._pressure.take(idle, free_share, context.trackers.values())
        if need is not Need.NONE:
            self._saves.give_way(need)
        return StepMeta(loads=loads, saves=saves, revoked=self._saves.take_revoked())

    def _measure(self, prefill_tokens: int) -> None:
        """Prefill rate: tokens of the last step over the time until this one was built."""
        now = self._context.clock.now()
        if self._step_at is not None and self._step_tokens:
            self._context.compute_rate.add(self._step_tokens, now - self._step_at)
        self._step_at, self._step_tokens = now, prefill_tokens
        if now >= self._renew_at:
            self._renew_at = now + self._loads.lease_s / 4
            self._loads.renew()

    def on_reports(self, reports: Iterable[WorkerReport]) -> None:
        """Results and counters of the worker ranks."""
        for report in reports:
            merge(self._worker_counters, report.counters)
            for result in report.results:
                job = self._context.ledger.report(result)
                if job is None:
                    continue
                if job.kind is JobKind.LOAD:
                    self._loads.done(job)
                else:
                    self._saves.done(job)

    def poll(self) -> None:
        """Take the index's answers. Cheap when there are none."""
        for reply in self._context.index.poll():
            if isinstance(reply, LookupReply):
                self._loads.take(reply)
            elif isinstance(reply, PrepareReply):
                self._saves.prepared(reply)
            elif isinstance(reply, CommitReply):
                self._saves.committed(reply)
            elif isinstance(reply, CloseReply):
                self._context.stats.add("sessions_closed" if reply.ok else "closes_failed")
            elif isinstance(reply, HintReply):
                self._context.stats.add(f"hints_{reply.kind.value}", outcome=reply.outcome)
        for tracker in self._saves.take_lost():
            self._loads.ask(tracker)

    def has_pending_work(self) -> bool:
        """True while an idle engine should keep stepping: jobs are open, or answers are due."""
        self.poll()
        return len(self._context.ledger) > 0 or self._context.index.pending() > 0

    # -- the whole cache ---------------------------------------------------------------------

    def close_session(self, session_id: str, cache_salt: str | None = None) -> bool:
        """The conversation is over: end its generation in the store. Running turns of it stop
        saving. False if the request could not be queued."""
        for tracker in self._context.trackers.values():
            identity = tracker.identity
            if (identity.session_id, identity.cache_salt) == (session_id, cache_salt):
                self._saves.cancel(tracker)
        return self._context.post(CloseOp(session_id=session_id, cache_salt=cache_salt))

    def reset_cache(self, epoch: str) -> None:
        """Move this engine, and nobody else, to another epoch. Live requests neither load nor
        save from here on: nobody can say which weights their blocks come from."""
        self.drop_holds()
        for tracker in self._context.trackers.values():
            tracker.usable_max = 0
            self._saves.cancel(tracker)
        self._context.namespace = self._namespace_of(epoch)

    def drop_holds(self) -> None:
        """Let go of every engine block, because the engine empties its own cache."""
        self._saves.drop_holds()

    def count(self, name: str) -> None:
        """Something an adapter noticed."""
        self._context.stats.add(name)

    def take_stats(self) -> Data:
        """Counters since the last call: this half's, and the workers' reports'."""
        data, self._worker_counters = self._worker_counters, {}
        merge(data, self._context.stats.drain())
        gauges = self._context.index.gauges()
        if gauges is not self._gauges:
            self._gauges = gauges
            merge(data, {GAUGE + name: value for name, value in gauges.items()})
        return data

    def open_jobs(self) -> int:
        """Jobs that have not ended."""
        return len(self._context.ledger)

    def check_integrity(self) -> list[str]:
        """Violations seen from this side; empty when sound."""
        found = self._context.ledger.check_integrity()
        return found + self._loads.check_integrity() + self._saves.check_integrity()
