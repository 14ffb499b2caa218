"""The life of requests outside the planning of steps: arrival, input, preemption, end.

`Lifecycle` is the lower half of the scheduler; `scheduler.py` plans steps on top of it. It holds
each request in exactly one of: `waiting` (no blocks), `loading` (a connector fills its blocks),
`ready` (has blocks and may go on), `paused` (resumable, wants input), `running`. Ended requests
whose blocks are still in a connector's hands are in `dying` (load) or `sending`.

Owned by the scheduler thread.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, fields

from engine_shim.block_pool import BlockPool
from engine_shim.config import EngineConfig
from engine_shim.connector_port import ConnectorScheduler
from engine_shim.errors import ConnectorContractError
from engine_shim.hashing import ROOT
from engine_shim.protocol import EngineCoreOutput, EngineCoreRequest, FinishReason
from engine_shim.request import INPUTS_MAX, Request, RequestStatus
from engine_shim.session_cache import SessionCache

ClientOutput = tuple[bytes, EngineCoreOutput]
"""(client that sent the request, its output)"""


@dataclass
class Counters:
    """Totals since the start. Tokens unless named otherwise."""

    requests: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    external_queried_tokens: int = 0
    external_promised_tokens: int = 0
    external_loaded_tokens: int = 0
    failed_loads: int = 0

    def as_dict(self) -> dict[str, int]:
        """By name."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


@dataclass
class Load:
    """A load in progress. tokens_good: up to where it can be good, as known so far."""

    request: Request
    local_tokens: int
    tokens_good: int


class Lifecycle:
    """See the module."""

    def __init__(self, config: EngineConfig, connector: ConnectorScheduler) -> None:
        self.config = config
        self.connector = connector
        self.pool = BlockPool(config.num_blocks, config.block_size, config.enable_prefix_caching)
        self.sessions = SessionCache(
            self.pool, config.enable_session_cache and config.enable_prefix_caching
        )
        connector.bind_block_pool(self.pool)
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()  # bounded: max_num_queued, see add_request
        self.ready: deque[Request] = deque()  # bounded: likewise
        self.loading: dict[str, Load] = {}
        self.paused: dict[str, Request] = {}
        self.running: list[Request] = []
        self.dying: dict[str, Request] = {}
        self.sending: dict[str, Request] = {}
        self.counters = Counters()
        self._finished_ids: list[str] = []
        self._outputs: list[ClientOutput] = []

    # ---- arrival ------------------------------------------------------------------------------

    def add_request(self, message: EngineCoreRequest, client: bytes = b"") -> None:
        """Queue a request, or give a resumable one more input.

        message: already checked (`validation.check_message`). What is wrong here and now (the id
        is taken, a queue is full) becomes an ERROR output.
        """
        existing = self.requests.get(message.request_id)
        if existing is not None:
            self._add_input(existing, message, client)
            return
        if message.request_id in self.dying or message.request_id in self.sending:
            self.refuse(message, client, "request id is still in use by an ended request")
            return
        if len(self.requests) >= self.config.max_num_queued:
            limit = self.config.max_num_queued
            self.refuse(message, client, f"the engine has {limit} requests already; try later")
            return
        self.counters.requests += 1
        seed = (self.config.seed << 32) + self.counters.requests
        request = Request(message, client, self.config.block_size, seed)
        request.session = self.sessions.begin(request.session_id, request.cache_salt)
        self.requests[request.request_id] = request
        self.waiting.append(request)
        self.connector.on_new_request(request)
        if message.abort_immediately:
            self.finish(request, FinishReason.ABORT)

    def refuse(self, message: EngineCoreRequest, client: bytes, why: str) -> None:
        """Answer a message that leads to no request."""
        output = EngineCoreOutput(
            message.request_id, [], finish_reason=FinishReason.ERROR, error=why
        )
        self._outputs.append((client, output))

    def _add_input(self, request: Request, message: EngineCoreRequest, client: bytes) -> None:
        if not request.resumable or request.client != client:
            self.refuse(message, client, "a request with this id is running")
            return
        if len(request.inputs) >= INPUTS_MAX:
            self.finish(request, FinishReason.ERROR, f"more than {INPUTS_MAX} inputs are waiting")
            return
        request.inputs.append(message if message.resumable else None)
        if request.status is RequestStatus.WAITING_FOR_INPUT:
            self._take_input(request)

    def end_of_input(self, request: Request) -> None:
        """A resumable request has answered all its input so far: wait for more, or go on."""
        self._take_out(request)
        # The last token was not computed, or its computation is in flight and counts no more.
        request.roll_back(request.num_tokens - 1 if request.block_ids else 0)
        request.status = RequestStatus.WAITING_FOR_INPUT
        self.paused[request.request_id] = request
        if request.inputs:
            self._take_input(request)

    def _take_input(self, request: Request) -> None:
        """Go on with the next piece of input, which is there."""
        message = request.inputs.popleft()
        if message is None:
            self.finish(request, request.finish_reason or FinishReason.STOP)
            return
        request.extend_prompt(message)
        if request.num_tokens >= self.config.max_model_len:
            why = f"input of {request.num_tokens} tokens fills the context"
            self.finish(request, FinishReason.ERROR, why)
            return
        del self.paused[request.request_id]
        request.status = RequestStatus.WAITING
        if request.block_ids:
            self.ready.append(request)
        else:
            request.num_computed_tokens = 0
            self.waiting.append(request)

    # ---- the end ------------------------------------------------------------------------------

    def finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """End a request in whatever state it is, and queue its last output."""
        self.emit(request, self.close(request, reason, error))

    def close(
        self, request: Request, reason: FinishReason, error: str | None = None
    ) -> EngineCoreOutput:
        """End a request; its last output, to be emitted by the caller."""
        request_id = request.request_id
        request.finish_reason = reason
        self._take_out(request)
        request.status = RequestStatus.FINISHED
        del self.requests[request_id]
        self._finished_ids.append(request_id)
        result = self.connector.request_finished(request, tuple(request.block_ids))
        request.delay_free = result.delay_free
        load = self.loading.pop(request_id, None)
        if load is not None:
            # The ranks still write into its blocks.
            self.dying[request_id] = request
        elif request.delay_free:
            self.sending[request_id] = request
        else:
            self._free(request)
        return EngineCoreOutput(
            request_id,
            [],
            finish_reason=reason,
            stop_reason=request.stop_reason,
            kv_transfer_params=result.kv_transfer_params,
            usage=request.usage(),
            error=error,
        )

    def _take_out(self, request: Request) -> None:
        """Remove it from the one container it is in; `loading` is the caller's."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        elif request.status is RequestStatus.WAITING_FOR_INPUT:
            del self.paused[request.request_id]
        elif request.status is not RequestStatus.WAITING_FOR_REMOTE_KV:
            queue = self.ready if request in self.ready else self.waiting
            queue.remove(request)

    def finish_ids(self, request_ids: list[str], reason: FinishReason) -> None:
        """End these requests; ids that are not (or no longer) here are passed over."""
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None:
                self.finish(request, reason)

    def _free(self, request: Request) -> None:
        self.pool.free(reversed(request.block_ids))
        request.block_ids = []
        if request.session is not None:
            depth = len(self.pool.match(request.block_hashes))
            leaf = request.block_hashes[depth - 1] if depth else None
            self.sessions.end(request.session, leaf, tag=not request.aborted)
            request.session = None

    def emit(self, request: Request, output: EngineCoreOutput) -> None:
        """Queue an output for the request's client."""
        self._outputs.append((request.client, output))

    @property
    def has_outputs(self) -> bool:
        """True if `take_outputs` has something."""
        return bool(self._outputs)

    def take_outputs(self) -> list[ClientOutput]:
        """Outputs since the last call."""
        taken, self._outputs = self._outputs, []
        return taken

    def take_finished_ids(self) -> list[str]:
        """Ids of requests that ended since the last call."""
        taken, self._finished_ids = self._finished_ids, []
        return taken

    # ---- loads and sends ----------------------------------------------------------------------

    def note_failed_blocks(self, failed: set[int]) -> None:
        """Some blocks do not hold what a connector promised: nothing from there on counts."""
        size = self.config.block_size
        for load in self.loading.values():
            first = _first_failed(load.request, failed)
            if first is not None:
                load.tokens_good = min(load.tokens_good, first * size)
        for request in self.running:
            first = _first_failed(request, failed)
            if first is not None and first * size < request.num_computed_tokens:
                self.counters.failed_loads += 1
                if not request.prefilled:
                    loaded = max(0, first * size - request.local_cached_tokens)
                    self.counters.external_loaded_tokens -= request.external_cached_tokens - loaded
                    request.external_cached_tokens = loaded
                request.roll_back(first * size)

    def load_ended(self, request_id: str) -> None:
        """All ranks are done with a load. Raises ConnectorContractError for one never issued."""
        dead = self.dying.pop(request_id, None)
        if dead is not None:
            if dead.delay_free:
                self.sending[request_id] = dead
            else:
                self._free(dead)
            return
        load = self.loading.pop(request_id, None)
        if load is None:
            raise ConnectorContractError(f"end of a load that was not issued: {request_id}")
        request, good = load.request, load.tokens_good
        promised = request.num_computed_tokens
        self.counters.failed_loads += good < promised
        self.counters.external_loaded_tokens += max(0, good - load.local_tokens)
        request.status = RequestStatus.WAITING
        if not request.prefilled:
            request.external_cached_tokens = max(0, good - load.local_tokens)
        if good == 0:
            self.drop_blocks(request)
            self.waiting.appendleft(request)
            return
        request.num_computed_tokens = good
        self.register(request, good)
        # At least one token must be computed to sample from.
        request.num_computed_tokens = min(good, request.num_tokens - 1)
        self.ready.append(request)

    def send_ended(self, request_id: str) -> None:
        """All ranks are done with the blocks of an ended request."""
        request = self.sending.pop(request_id, None)
        if request is None:
            raise ConnectorContractError(f"end of a send that was not delayed: {request_id}")
        self._free(request)

    # ---- blocks -------------------------------------------------------------------------------

    def register(self, request: Request, num_tokens: int) -> None:
        """Put its blocks that are complete with the first `num_tokens` into the prefix cache."""
        hashes = request.block_hashes
        last = min(num_tokens // self.config.block_size, len(hashes), len(request.block_ids))
        for index in range(request.num_cached_blocks, last):
            parent = hashes[index - 1] if index else ROOT
            if not self.pool.register(parent, hashes[index], request.block_ids[index]):
                return
            request.num_cached_blocks = index + 1

    def drop_blocks(self, request: Request) -> None:
        """Give all its blocks back; everything is to be computed (or found) again."""
        self.pool.free(reversed(request.block_ids))
        request.block_ids = []
        request.num_computed_tokens = 0
        request.num_cached_blocks = 0
        request.send_tokens = True

    def preempt(self, request: Request) -> None:
        """Take the blocks of a request that is running, ready, or waits for input."""
        self.counters.preemptions += 1
        request.num_preemptions += 1
        request.resumed = True
        self.drop_blocks(request)
        if request.status is RequestStatus.WAITING_FOR_INPUT:
            return
        self._take_out(request)
        request.status = RequestStatus.PREEMPTED
        self.waiting.appendleft(request)


def _first_failed(request: Request, failed: set[int]) -> int | None:
    return next((i for i, block_id in enumerate(request.block_ids) if block_id in failed), None)

