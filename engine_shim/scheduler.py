"""Plans steps: continuous batching with chunked prefill, and what their outcome means.

One step: running requests go first, in order of admission, each with as many tokens as the budget
leaves; then requests that have their blocks already (loaded, or new input); then new ones. When
blocks run out, the newest request loses its own and is computed again later.

With async scheduling, step N+1 is planned before the outcome of step N is known: a request then
has one placeholder for the token that step N will sample. Owned by the scheduler thread.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from engine_shim.connector_port import MatchResult, ScheduledRequest
from engine_shim.errors import ConnectorContractError
from engine_shim.lifecycle import Lifecycle, Load
from engine_shim.protocol import EngineCoreOutput, FinishReason
from engine_shim.request import Request, RequestStatus
from engine_shim.scheduler_output import (
    MergedReports,
    PlannedRequest,
    Sampled,
    SchedulerOutput,
)
from engine_shim.tokenizer import EOS


class _Admission(enum.Enum):
    """What became of the request at the head of the queue."""

    ADMITTED = enum.auto()
    LATER = enum.auto()  # the connector has no answer yet; others may go first
    NO_ROOM = enum.auto()  # nobody behind it goes first


@dataclass
class _Plan:
    """A step in the making."""

    budget: int
    scheduled: list[ScheduledRequest] = field(default_factory=list)
    planned: list[PlannedRequest] = field(default_factory=list)
    preempted_ids: list[str] = field(default_factory=list)


class Scheduler(Lifecycle):
    """See the module."""

    _step = 0

    # ---- planning -----------------------------------------------------------------------------

    def schedule(self) -> tuple[SchedulerOutput, object | None]:
        """Plan the next step: (step, the connector's work for the ranks)."""
        self._step += 1
        plan = _Plan(self.config.max_num_batched_tokens)
        self._schedule_running(plan)
        if not plan.preempted_ids:
            self._schedule_ready(plan)
        if not plan.preempted_ids:
            self._schedule_waiting(plan)
        output = SchedulerOutput(
            self._step,
            plan.scheduled,
            plan.planned,
            plan.preempted_ids,
            self.take_finished_ids(),
        )
        meta = self.connector.build_step(output)
        for part in plan.planned:
            request = part.request
            request.num_computed_tokens += part.num_scheduled_tokens
            request.num_in_flight += 1
            request.num_placeholders += part.samples
            request.send_tokens = request.resumed = False
            self.counters.computed_tokens += part.num_scheduled_tokens
        return output, meta

    @property
    def has_work(self) -> bool:
        """True if a step may do something now (also: ask the connector again)."""
        return bool(self.running or self.ready or self.waiting or self._finished_ids)

    @property
    def is_waiting(self) -> bool:
        """True if a connector still has blocks of a request in its hands."""
        return bool(self.loading or self.dying or self.sending)

    def _schedule_running(self, plan: _Plan) -> None:
        index = 0
        while index < len(self.running) and plan.budget > 0:
            request = self.running[index]
            count = min(self._num_to_compute(request), plan.budget)
            if count > 0 and self._grow(request, count, plan):
                self._add(plan, request, count)
            index += 1

    def _num_to_compute(self, request: Request) -> int:
        """Tokens it could be given, the budget aside."""
        pending = request.num_placeholders
        if pending and (
            request.num_output_tokens + pending >= self._max_output(request)
            or request.num_planned_tokens >= self.config.max_model_len
        ):
            # The token that is in flight will be its last.
            return 0
        return request.num_planned_tokens - request.num_computed_tokens

    def _max_output(self, request: Request) -> int:
        most = request.params.max_tokens
        return self.config.max_model_len if most is None else most

    def _grow(self, request: Request, count: int, plan: _Plan) -> bool:
        """Give it blocks for `count` more tokens, at the cost of newer requests. False: not now."""
        needed = self._num_new_blocks(request, request.num_computed_tokens + count)
        while (blocks := self.pool.allocate(needed)) is None:
            victim = self._victim(request)
            if victim is None:
                # Loads or a connector's references have the rest; both end.
                return False
            self._preempt(victim, plan)
        request.block_ids.extend(blocks)
        return True

    def _victim(self, keep: Request) -> Request | None:
        """Whose blocks to take for `keep`: an idle one's, else those of the newest behind it."""
        idle = next((r for r in reversed(self.paused.values()) if r.block_ids), None)
        if idle is not None:
            return idle
        if keep.status is RequestStatus.RUNNING and self.running[-1] is not keep:
            # Running requests are planned in order, so the last one is not in this plan yet.
            return self.running[-1]
        if self.running not in ([], [keep]):
            # Those before it go on, and will give blocks back.
            return None
        newest = self.ready[-1] if self.ready else keep
        return None if newest is keep else newest

    def _preempt(self, victim: Request, plan: _Plan) -> None:
        self.preempt(victim)
        plan.preempted_ids.append(victim.request_id)

    def _num_new_blocks(self, request: Request, num_tokens: int) -> int:
        return max(0, -(-num_tokens // self.config.block_size) - len(request.block_ids))

    def _add(self, plan: _Plan, request: Request, count: int) -> None:
        end = request.num_computed_tokens + count
        samples = end == request.num_planned_tokens
        produced = request.num_output_tokens + request.num_placeholders
        plan.budget -= count
        plan.planned.append(
            PlannedRequest(
                request=request,
                num_scheduled_tokens=count,
                num_computed_tokens=request.num_computed_tokens,
                samples=samples,
                suppress_stop=produced < request.params.min_tokens,
            )
        )
        plan.scheduled.append(
            ScheduledRequest(
                request=request,
                num_scheduled_tokens=count,
                num_computed_tokens=request.num_computed_tokens,
                block_ids=tuple(request.block_ids),
                token_ids=tuple(request.token_ids) if request.send_tokens else None,
                is_resumed=request.resumed,
            )
        )

    def _schedule_ready(self, plan: _Plan) -> None:
        while self.ready and plan.budget > 0 and len(self.running) < self.config.max_num_seqs:
            request = self.ready[0]
            count = min(request.num_tokens - request.num_computed_tokens, plan.budget)
            if not self._grow(request, count, plan):
                return
            self.ready.popleft()
            self._start(request, 0)
            self._add(plan, request, count)

    def _start(self, request: Request, num_external: int) -> None:
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        self.connector.update_state_after_alloc(request, tuple(request.block_ids), num_external)

    # ---- admission ----------------------------------------------------------------------------

    def _schedule_waiting(self, plan: _Plan) -> None:
        later: list[Request] = []
        while self.waiting and plan.budget > 0 and len(self.running) < self.config.max_num_seqs:
            request = self.waiting[0]
            # A step that preempts admits nobody, so the outcome of what was in flight is known.
            assert not request.num_in_flight
            verdict = self._admit(request, plan)
            if verdict is _Admission.NO_ROOM:
                break
            self.waiting.popleft()
            if verdict is _Admission.LATER:
                later.append(request)
        self.waiting.extendleft(reversed(later))

    def _admit(self, request: Request, plan: _Plan) -> _Admission:
        size = self.config.block_size
        hits = self.pool.match(request.block_hashes[: (request.num_tokens - 1) // size])
        local = len(hits) * size
        match = self.connector.get_num_new_matched_tokens(request, local)
        if match.num_tokens is None:
            return _Admission.LATER
        external = match.num_tokens
        self._check_match(request, local, match)
        if not self._has_room(request, hits, plan):
            return _Admission.NO_ROOM

        loads = match.load_async and external > 0
        computed = local + external
        count = 0 if loads else min(request.num_tokens - computed, plan.budget)
        self.pool.touch(hits)
        request.block_ids = list(hits)
        blocks = self.pool.allocate(self._num_new_blocks(request, computed + count))
        assert blocks is not None, "room was there a moment ago"
        request.block_ids.extend(blocks)
        request.num_cached_blocks = len(hits)
        request.num_computed_tokens = computed
        self._count_hits(request, local, external, loads)
        if loads:
            request.status = RequestStatus.WAITING_FOR_REMOTE_KV
            self.loading[request.request_id] = Load(request, local, computed)
            self.connector.update_state_after_alloc(request, tuple(request.block_ids), external)
        else:
            self._start(request, external)
            self._add(plan, request, count)
        return _Admission.ADMITTED

    def _check_match(self, request: Request, local: int, match: MatchResult) -> None:
        external = match.num_tokens or 0
        end = local + external
        whole = external >= 0 and external % self.config.block_size == 0
        # A whole prompt can be loaded only if its last token is computed again afterwards.
        most = request.num_tokens if match.load_async else request.num_tokens - 1
        if not whole or (external and end > most):
            raise ConnectorContractError(
                f"a hit of {external} tokens after {local} local ones was promised for a request"
                f" of {request.num_tokens} tokens (block size {self.config.block_size},"
                f" load_async={match.load_async})"
            )

    def _has_room(self, request: Request, hits: list[int], plan: _Plan) -> bool:
        """Is there room for all tokens known so far, beside what admitted requests still need?

        Without that, requests that can't go on would fill the cache with loaded blocks.
        """
        idle_hits = sum(1 for block_id in hits if self.pool.refs(block_id) == 0)
        total = -(-request.num_tokens // self.config.block_size)
        promised = sum(
            self._num_new_blocks(other, other.num_tokens)
            for other in (*self.ready, *self.running, *(x.request for x in self.loading.values()))
        )
        needed = total - len(hits) + idle_hits + promised
        while needed > self.pool.num_free:
            idle = next((r for r in reversed(self.paused.values()) if r.block_ids), None)
            if idle is None:
                return False
            self._preempt(idle, plan)
        return True

    def _count_hits(self, request: Request, local: int, external: int, loads: bool) -> None:
        counters = self.counters
        counters.prefix_queried_tokens += request.num_tokens
        counters.prefix_hit_tokens += local
        counters.external_queried_tokens += request.num_tokens - local
        counters.external_promised_tokens += external
        if not loads:
            counters.external_loaded_tokens += external
        if not request.prefilled:
            request.local_cached_tokens = local
            request.external_cached_tokens = 0 if loads else external

    # ---- outcome ------------------------------------------------------------------------------

    def update(
        self, output: SchedulerOutput, sampled: Mapping[str, Sampled], reports: MergedReports
    ) -> None:
        """Take in what a step brought; outputs are in `take_outputs`. Steps come in order."""
        if reports.failed_blocks:
            self.note_failed_blocks(reports.failed_blocks)
        for part in output.planned:
            self._take_in(part, sampled)
        if reports.payloads:
            self.connector.on_worker_reports(reports.payloads)
        for request_id in reports.finished_loads:
            self.load_ended(request_id)
        for request_id in reports.finished_sends:
            self.send_ended(request_id)

    def _take_in(self, part: PlannedRequest, sampled: Mapping[str, Sampled]) -> None:
        request = part.request
        if request.status is RequestStatus.FINISHED:
            return
        request.num_in_flight -= 1
        if request.num_drop:
            request.num_drop -= 1
            return
        # Nothing, if it was preempted meanwhile: then it has no blocks.
        self.register(request, part.num_computed_tokens + part.num_scheduled_tokens)
        if not part.samples:
            return
        request.num_placeholders -= 1
        chosen = sampled[request.request_id]
        first = not request.prefilled
        request.prefilled = True
        request.append_token(chosen.token_id)
        self.counters.generated_tokens += 1
        if first:
            self.counters.prompt_tokens += request.num_prompt_tokens
        output = EngineCoreOutput(request.request_id, [chosen.token_id])
        output.usage = request.usage() if first else None
        output.new_logprobs = [chosen.logprobs] if chosen.logprobs is not None else None
        reason = self._stop_reason(request, chosen.token_id)
        if reason is None:
            self.emit(request, output)
        else:
            self._end(request, reason, output)

    def _stop_reason(self, request: Request, token: int) -> FinishReason | None:
        params = request.params
        if request.num_output_tokens >= params.min_tokens:
            if token == EOS and not params.ignore_eos:
                return FinishReason.STOP
            if token in (params.stop_token_ids or ()):
                request.stop_reason = token
                return FinishReason.STOP
        if (
            request.num_output_tokens >= self._max_output(request)
            or request.num_tokens >= self.config.max_model_len
        ):
            return FinishReason.LENGTH
        return None

    def _end(self, request: Request, reason: FinishReason, output: EngineCoreOutput) -> None:
        """The request (or its piece of input) ends with this output."""
        last_input = request.inputs[0] is None if request.inputs else not request.resumable
        if last_input:
            ended = self.close(request, reason)
            ended.new_token_ids, ended.new_logprobs = output.new_token_ids, output.new_logprobs
            self.emit(request, ended)
            return
        request.finish_reason = reason
        output.finish_reason, output.stop_reason = reason, request.stop_reason
        output.usage, output.awaiting_input = request.usage(), True
        self.emit(request, output)
        self.end_of_input(request)
