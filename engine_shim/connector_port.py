"""What the engine asks of a connector: vLLM's V1 connector API, cut down and typed.

The scheduler half lives with the scheduler; each worker rank has one worker half. All hooks of
both halves are called on the engine's one thread, must return at once, and must not raise.

Order within one step:

    schedule: get_num_new_matched_tokens / update_state_after_alloc per admitted request
    build_step(output)            -> meta, None for nothing to do
    worker.start_step(meta)       each rank, before the forward pass (called every step)
    ... forward pass (left out when no tokens are scheduled) ...
    worker.end_step()             each rank, after the forward pass was issued
    worker.poll()                 each rank
    request_finished(...)         for requests that end with this step's tokens
    on_worker_reports(...)        if any rank had a report

With async scheduling the schedule and build_step of step N+1 come before the tokens of step N are
processed; then `num_tokens` lags by one and `num_computed_tokens` is ahead of the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

    from engine_shim.config import EngineConfig
    from engine_shim.protocol import KvHintsEnvelope


class MatchResult(NamedTuple):
    """What the connector has beyond the engine's own cache.

    num_tokens: None = ask again next step. A multiple of the block size. load_async: True = the
    load runs while the request waits; False with num_tokens > 0 = the load is complete when
    start_step returns.
    """

    num_tokens: int | None
    load_async: bool = False


class FinishResult(NamedTuple):
    """delay_free: keep the blocks until every rank reports the id in `finished_sends`.

    kv_transfer_params: goes to the client with the last output.
    """

    delay_free: bool = False
    kv_transfer_params: dict[str, Any] | None = None


class RequestView(Protocol):
    """A request as the connector may read it. Never write; the engine keeps changing it."""

    @property
    def request_id(self) -> str: ...
    @property
    def session_id(self) -> str | None: ...
    @property
    def cache_salt(self) -> str | None: ...
    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None: ...
    @property
    def kv_hints(self) -> KvHintsEnvelope | None: ...
    @property
    def extra_args(self) -> Mapping[str, Any] | None: ...
    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Chained 32-byte hash of each full block of tokens known so far. A hash of a generated
        block appears before the block's KV is complete. The list only grows, but for streaming
        input: the last token of an answer is replaced by the next input, and a block that it
        filled gets another hash (its KV was never complete)."""

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens known to the scheduler."""

    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV exists or is scheduled. In build_step: as it was before this step."""

    @property
    def num_preemptions(self) -> int: ...
    @property
    def priority(self) -> int: ...
    @property
    def aborted(self) -> bool:
        """In request_finished: True if the client gave up (a turn that did not end)."""


class ScheduledRequest(NamedTuple):
    """One request's part of a step.

    num_computed_tokens: before the step. block_ids: the full table, in order; complete blocks
    after the step: (num_computed_tokens + num_scheduled_tokens) // block_size.
    token_ids: all known tokens, for a request that the workers see first, or again after a
    preemption or a rolled-back step; else None.
    is_resumed: preempted before; its block table is entirely new.
    """

    request: RequestView
    num_scheduled_tokens: int
    num_computed_tokens: int
    block_ids: tuple[int, ...]
    token_ids: Sequence[int] | None = None
    is_resumed: bool = False


class StepOutput(Protocol):
    """A step as planned by the scheduler."""

    @property
    def step(self) -> int:
        """Number of the step, from 1, without gaps."""

    @property
    def scheduled(self) -> Sequence[ScheduledRequest]: ...
    @property
    def preempted_ids(self) -> Sequence[str]:
        """Preempted by this step: their blocks are free already and may be rewritten by it."""

    @property
    def finished_ids(self) -> Sequence[str]:
        """Ended since the last step."""


class PoolPort(Protocol):
    """References on the engine's blocks. Scheduler thread only."""

    def touch(self, block_ids: Sequence[int]) -> None:
        """Take one reference on each: it stays out of the free pool, its bytes unchanged by
        others, until given back. Legal for blocks that are in use or cached."""

    def free(self, block_ids: Sequence[int]) -> None:
        """Give back one reference on each."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def num_free(self) -> int:
        """Blocks that could be allocated now (cached ones that nobody holds included)."""


@dataclass(frozen=True)
class WorkerReport:
    """What one rank has to say after a step.

    finished_loads: ids of requests whose load has ended on this rank, well or not: exactly once
    for every load issued, also after the request was aborted, and for no other.
    failed_blocks: cache blocks that do not hold what was promised; reported not later than the
    request's finished_loads.
    finished_sends: ids for which request_finished answered delay_free.
    payload: the connector's own, handed to on_worker_reports; None if nothing.
    """

    finished_loads: frozenset[str] = frozenset()
    failed_blocks: frozenset[int] = frozenset()
    finished_sends: frozenset[str] = frozenset()
    payload: object | None = None

    @property
    def empty(self) -> bool:
        """True if there is nothing in it."""
        return not (
            self.finished_loads or self.failed_blocks or self.finished_sends
        ) and self.payload is None


EMPTY_REPORT = WorkerReport()


class ConnectorScheduler(Protocol):
    """The scheduler half."""

    def bind_block_pool(self, pool: PoolPort) -> None:
        """Once, before anything else."""

    def on_new_request(self, request: RequestView) -> None:
        """A request was queued."""

    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int
    ) -> MatchResult:
        """Tokens beyond `num_computed_tokens` (whole local blocks) that could be loaded. May be
        called any number of times for one request and must be free of side effects. It is asked
        again after a preemption, and after a load of which nothing could be used."""

    def update_state_after_alloc(
        self, request: RequestView, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        """Blocks were allocated; `block_ids` is the table so far. For an async load called twice:
        now with the blocks that cover the hit, and with 0 external tokens and the full table when
        the request goes on. Called with 0 external tokens whenever there is no hit."""

    def build_step(self, output: StepOutput) -> object | None:
        """Opaque work for the ranks; None if there is none. Every step, also an empty one."""

    def on_worker_reports(self, reports: Sequence[object]) -> None:
        """Payloads of the ranks' reports of one step, in the order of ranks."""

    def request_finished(self, request: RequestView, block_ids: Sequence[int]) -> FinishResult:
        """Exactly once per request, in whatever state it ends. Blocks of a load that is still
        running are kept until every rank has reported it, whatever is answered."""

    def has_pending_work(self) -> bool:
        """True while an otherwise idle engine must keep stepping for this connector."""

    def reset_cache(self) -> bool:
        """Stop using what this engine has stored so far (new weights). False if it failed."""

    def drop_holds(self) -> None:
        """The engine empties its own cache: give every reference on its blocks back, now. What was
        being read may be overwritten from here on."""

    def close_session(self, session_id: str, cache_salt: str | None) -> None:
        """The client ended this session. Returns at once."""

    def stats(self) -> Mapping[str, object]:
        """Counters for /metrics: numbers, or mappings of numbers. Never ids."""

    def shutdown(self) -> None:
        """The engine stops. Bounded; may never be called."""


class ConnectorWorker(Protocol):
    """The half of one worker rank."""

    def register_kv_caches(self, regions: Sequence[torch.Tensor]) -> None:
        """Once, before the first step. One dense tensor per layer, shape
        [num_blocks, block_size, 2 (K, V), kv_heads / tp_size, head_dim]: axis 0 is the block, so
        a block of a layer is one contiguous run of bytes."""

    def start_step(self, meta: object | None) -> None:
        """Before the forward pass: begin loads. Memory of blocks in a load belongs to the
        connector until it reports the load finished."""

    def end_step(self) -> None:
        """After the forward pass was issued (on CUDA it may still run): saves may begin."""

    def poll(self) -> WorkerReport:
        """What has ended since the last call. Every step, also an empty one."""

    def shutdown(self) -> None:
        """The engine stops. Bounded; may never be called."""


@dataclass(frozen=True)
class Connector:
    """Both halves; `workers[i]` belongs to rank i."""

    scheduler: ConnectorScheduler
    workers: tuple[ConnectorWorker, ...]


ConnectorFactory = Callable[["EngineConfig"], Connector]
"""Makes the connector of one engine, with `config.tp_size` workers. Raises ConfigError."""


class NullScheduler:
    """No connector: never hits, wants nothing."""

    def bind_block_pool(self, pool: PoolPort) -> None:
        """See ConnectorScheduler."""

    def on_new_request(self, request: RequestView) -> None:
        """See ConnectorScheduler."""

    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int
    ) -> MatchResult:
        """Nothing."""
        return MatchResult(0)

    def update_state_after_alloc(
        self, request: RequestView, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        """See ConnectorScheduler."""

    def build_step(self, output: StepOutput) -> object | None:
        """Nothing."""
        return None

    def on_worker_reports(self, reports: Sequence[object]) -> None:
        """See ConnectorScheduler."""

    def request_finished(self, request: RequestView, block_ids: Sequence[int]) -> FinishResult:
        """Nothing to wait for."""
        return FinishResult()

    def has_pending_work(self) -> bool:
        """Never."""
        return False

    def reset_cache(self) -> bool:
        """Trivially."""
        return True

    def drop_holds(self) -> None:
        """There are none."""

    def close_session(self, session_id: str, cache_salt: str | None) -> None:
        """See ConnectorScheduler."""

    def stats(self) -> Mapping[str, object]:
        """None."""
        return {}

    def shutdown(self) -> None:
        """See ConnectorScheduler."""


class NullWorker:
    """No connector, worker side."""

    def register_kv_caches(self, regions: Sequence[torch.Tensor]) -> None:
        """See ConnectorWorker."""

    def start_step(self, meta: object | None) -> None:
        """See ConnectorWorker."""

    def end_step(self) -> None:
        """See ConnectorWorker."""

    def poll(self) -> WorkerReport:
        """Nothing."""
        return EMPTY_REPORT

    def shutdown(self) -> None:
        """See ConnectorWorker."""


def null_connector(tp_size: int = 1) -> Connector:
    """The connector of an engine without one."""
    return Connector(NullScheduler(), tuple(NullWorker() for _ in range(tp_size)))
