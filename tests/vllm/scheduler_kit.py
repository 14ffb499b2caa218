"""vLLM's own Scheduler and our connector in both roles, around a model of a few lines.

The "model" writes into the paged cache, for each token, numbers that depend on the token and on
what the cache holds for the token before it; a sampled token is a checksum over everything that
the request's pages hold. So one wrong byte in one loaded block changes the text, and the text does
not depend on how the work was split into steps: equal text proves equal KV.

Steps are run by the test, one at a time, in one thread. Metadata and outputs travel pickled, as
between vLLM's processes.
"""

from __future__ import annotations

import copy
import functools
import pickle
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.parallel_state import (
    init_distributed_environment,
    initialize_model_parallel,
    model_parallel_is_initialized,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.servers import free_port
from tests.vllm import tiny_model
from tests.waiting import eventually

B = 32  # tokens per block: the smallest that vLLM's CPU platform accepts
LAYERS = ("layer.0", "layer.1")
HEAD_SIZE = 8
NUMBERS_PER_TOKEN = 2 * HEAD_SIZE
RUN_DEADLINE_S = 30.0
_SPREAD = np.arange(1, NUMBERS_PER_TOKEN + 1, dtype=np.uint64)


def engine_config(
    transfer: Mapping[str, object] | None, tokens_per_step: int = 2048
) -> VllmConfig:
    """A VllmConfig as `vllm serve` would make it, for the tiny model."""
    config = copy.deepcopy(_engine_config(transfer is not None, tokens_per_step))
    if transfer is not None:
        config.kv_transfer_config = KVTransferConfig(**transfer)  # type: ignore[arg-type]
    return config


@functools.cache
def _engine_config(connector: bool, tokens_per_step: int) -> VllmConfig:
    """Made once, since it takes a while; the connector's own config is put in later."""
    transfer = KVTransferConfig(kv_connector="SessionKVConnector", kv_role="kv_both")
    return EngineArgs(
        model=str(tiny_model.ensure().folder),
        dtype="float32",
        enforce_eager=True,
        block_size=B,
        max_model_len=tiny_model.MAX_TOKENS,
        max_num_seqs=64,
        max_num_batched_tokens=tokens_per_step,
        enable_chunked_prefill=True,
        disable_log_stats=False,
        kv_transfer_config=transfer if connector else None,
    ).create_engine_config()


def cache_config(num_blocks: int) -> KVCacheConfig:
    """One group of full attention, small pages."""
    spec = FullAttentionSpec(
        block_size=B, num_kv_heads=1, head_size=HEAD_SIZE, dtype=torch.float32
    )
    group = KVCacheGroupSpec(layer_names=list(LAYERS), kv_cache_spec=spec)
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[group],
        kv_cache_layout="LBHNC",
        hash_block_size=B,
    )


def ready_process(config: VllmConfig) -> None:
    """Make this process a tensor-parallel group of one, once: a worker asks for its rank."""
    if model_parallel_is_initialized():
        return
    with set_current_vllm_config(config):
        where = f"tcp://127.0.0.1:{free_port()}"
        init_distributed_environment(1, 0, where, local_rank=0, backend="gloo")
        initialize_model_parallel(1, 1, backend="gloo")


@dataclass
class RowState:
    """What a worker knows of one request."""

    tokens: list[int]
    blocks: list[int]
    done: int = 0


class Model:
    """The paged cache of one rank, and the arithmetic that stands for a forward pass."""

    def __init__(self, num_blocks: int) -> None:
        shape = (num_blocks, 1, B, NUMBERS_PER_TOKEN)
        self.caches = {name: torch.zeros(shape, dtype=torch.float32) for name in LAYERS}
        self._pages = [c.view(torch.int32).numpy()[:, 0] for c in self.caches.values()]
        self.rows: dict[str, RowState] = {}

    def page(self, block: int) -> bytes:
        """Raw content of one block, all layers."""
        return b"".join(layer[block].tobytes() for layer in self._pages)

    def take(self, output: SchedulerOutput) -> None:
        """Learn of new, resumed and finished requests."""
        for request_id in output.finished_req_ids:
            self.rows.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            assert new.prompt_token_ids is not None
            self.rows[new.req_id] = RowState(
                list(new.prompt_token_ids), list(new.block_ids[0]), new.num_computed_tokens
            )
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            row, fresh = self.rows[request_id], cached.new_block_ids[index]
            row.done = cached.num_computed_tokens[index]
            if request_id in cached.resumed_req_ids:
                assert fresh is not None
                row.blocks = list(fresh[0])
                row.tokens = list(cached.all_token_ids[request_id])
            elif fresh is not None:
                row.blocks += fresh[0]

    def forward(self, output: SchedulerOutput) -> dict[str, list[int]]:
        """Compute what is scheduled; the sampled token of each request that reached its end."""
        sampled = {}
        for request_id, count in output.num_scheduled_tokens.items():
            row = self.rows[request_id]
            for position in range(row.done, row.done + count):
                self._write(row, position)
            row.done += count
            sampled[request_id] = []
            if row.done == len(row.tokens):
                token = self._sample(row)
                sampled[request_id] = [token]
                row.tokens.append(token)
        return sampled

    def _write(self, row: RowState, position: int) -> None:
        before = 0
        if position:
            block, slot = row.blocks[(position - 1) // B], (position - 1) % B
            before = int(self._pages[-1][block][slot][-1])
        seed = zlib.crc32(f"{before}/{row.tokens[position]}/{position}".encode())
        block, slot = row.blocks[position // B], position % B
        for index, layer in enumerate(self._pages):
            numbers = (seed + index) * _SPREAD * np.uint64(0x9E3779B1) % np.uint64(1 << 30)
            layer[block, slot] = numbers.astype(np.int32)

    def _sample(self, row: RowState) -> int:
        check = 0
        for start in range(0, row.done, B):
            block, used = row.blocks[start // B], min(B, row.done - start)
            for layer in self._pages:
                check = zlib.crc32(layer[block, :used].tobytes(), check)
        return tiny_model.byte_id(0x20 + check % 95)


@dataclass
class Step:
    """One scheduled step on its way."""

    output: SchedulerOutput
    result: ModelRunnerOutput | None = None


@dataclass
class Text:
    """What came out of one request."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    finished: str | None = None
    params: dict[str, Any] | None = None
    cached: int = 0


class Engine:
    """vLLM's scheduler with one worker rank. Always `close` it (or use it in a `with`).

    steps_ahead: 0 runs one step at a time, 1 schedules the next step before a step's output is
    known, as async scheduling does. seen: the metadata of every step, oldest first; outputs: what
    the worker's connector said at its end.
    """

    def __init__(
        self,
        transfer: Mapping[str, object] | None,
        num_blocks: int = 256,
        tokens_per_step: int = 2048,
        steps_ahead: int = 0,
        config: VllmConfig | None = None,
    ) -> None:
        self.config = config or engine_config(transfer, tokens_per_step)
        self.config.scheduler_config.async_scheduling = bool(steps_ahead)
        self.config.cache_config.num_gpu_blocks = num_blocks
        self.caches = cache_config(num_blocks)
        hash_fn = get_hash_fn_by_name(self.config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_fn)
        self._hasher = get_request_block_hasher(B, hash_fn)
        ready_process(self.config)
        self.scheduler = self.config.scheduler_config.get_scheduler_cls()(
            vllm_config=self.config,
            kv_cache_config=self.caches,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=B,
            hash_block_size=B,
            log_stats=True,
        )
        self.model = Model(num_blocks)
        self.worker: Any = None
        if transfer is not None:
            self.worker = KVConnectorFactory.create_connector(
                self.config, KVConnectorRole.WORKER, self.caches
            )
            self.worker.register_kv_caches(self.model.caches)
        self.texts: dict[str, Text] = {}
        self.seen: list[Any] = []
        self.outputs: list[KVConnectorOutput] = []
        self.stats: dict[str, float] = {}
        self.tables: dict[str, set[int]] = {}
        self.steps = 0
        self._ahead = steps_ahead
        self.in_flight: deque[Step] = deque(maxlen=4)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connector's threads, both halves."""
        self.scheduler.shutdown()
        if self.worker is not None:
            self.worker.shutdown()

    @property
    def connector(self) -> Any:
        """The connector in the scheduler's role."""
        return self.scheduler.get_kv_connector()

    @property
    def pool(self) -> Any:
        """vLLM's block pool."""
        return self.scheduler.kv_cache_manager.block_pool

    # -- requests --------------------------------------------------------------------------------

    def make(self, request_id: str, tokens: Sequence[int], max_tokens: int, **more: Any) -> Request:
        """A request of vLLM's own class. more: arguments of Request, or `extra_args`."""
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, extra_args=more.pop("extra_args", None)
        )
        params.update_from_generation_config({}, eos_token_id=2)
        return Request(
            request_id=request_id,
            prompt_token_ids=list(tokens),
            sampling_params=params,
            pooling_params=None,
            block_hasher=self._hasher,
            **more,
        )

    def add(self, request: Request) -> Text:
        """Queue a request."""
        text = self.texts[request.request_id] = Text(request)
        self.scheduler.add_request(request)
        return text

    def ask(
        self, request_id: str, tokens: Sequence[int], max_tokens: int = 4, **more: Any
    ) -> Text:
        """Queue a request of these tokens."""
        return self.add(self.make(request_id, tokens, max_tokens, **more))

    def abort(self, request_id: str) -> None:
        """The client has gone away."""
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def answer(
        self, request_id: str, tokens: Sequence[int], max_tokens: int = 4, **more: Any
    ) -> Text:
        """Ask, and run until the answer is there."""
        text = self.ask(request_id, tokens, max_tokens, **more)
        self.run_until(lambda: text.finished, f"the answer of {request_id}")
        return text

    # -- steps -----------------------------------------------------------------------------------

    def step(self) -> None:
        """What vLLM's engine core does in one turn of its loop; nothing if there is no work."""
        if len(self.in_flight) > self._ahead or not self.scheduler.has_requests():
            self.finish_step()
            return
        self.begin_step()
        if len(self.in_flight) > self._ahead:
            self.finish_step()

    def begin_step(self) -> SchedulerOutput:
        """Schedule one step and run it on the worker; its output stays in flight."""
        step = Step(self.scheduler.schedule())
        self.in_flight.append(step)
        self.execute(step)
        return step.output

    def run(self, step: Step) -> None:
        """Run a step that the test has scheduled, and hand its output over."""
        self.in_flight.append(step)
        self.execute(step)
        self.finish_step()

    def finish_step(self) -> None:
        """Hand the oldest step's output to the scheduler."""
        if not self.in_flight:
            return
        step = self.in_flight.popleft()
        assert step.result is not None
        outputs = self.scheduler.update_from_output(step.output, step.result)
        self.steps += 1
        for per_client in outputs.values():
            for out in per_client.outputs:
                self._take(out)
            self._count(per_client.scheduler_stats)

    def execute(self, step: Step) -> None:
        """The worker's part of a step, in the order of vLLM's model runner."""
        output = step.output
        self.model.take(output)
        for request_id in output.num_scheduled_tokens:
            table = self.model.rows[request_id].blocks
            self.tables.setdefault(request_id, set()).update(table)
        connector_output = None
        if self.worker is not None:
            meta = pickle.loads(pickle.dumps(output.kv_connector_metadata))
            self.seen.append(meta)
            self.worker.handle_preemptions(meta)
            self.worker.bind_connector_metadata(meta)
        sampled = self.model.forward(output)
        if self.worker is not None:
            connector_output = self._after_forward(output)
        result = ModelRunnerOutput(
            req_ids=list(sampled),
            req_id_to_index={r: i for i, r in enumerate(sampled)},
            sampled_token_ids=list(sampled.values()),
            kv_connector_output=connector_output,
        )
        step.result = pickle.loads(pickle.dumps(result))

    def _after_forward(self, output: SchedulerOutput) -> KVConnectorOutput:
        worker = self.worker
        worker.start_load_kv(None)
        worker.wait_for_save()
        ended = worker.get_transfer_results(output.finished_req_ids)
        found = KVConnectorOutput(
            finished_sending=ended.finished_sending,
            finished_recving=ended.finished_recving,
            failed_recving=ended.failed_recving,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_stats=worker.get_kv_connector_stats(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        self.outputs.append(found)
        return found

    def _take(self, out: Any) -> None:
        text = self.texts[out.request_id]
        text.tokens += out.new_token_ids
        if out.finish_reason is not None:
            text.finished = str(out.finish_reason)
            text.params = out.kv_transfer_params
        if out.prefill_stats is not None:
            text.cached = out.prefill_stats.num_cached_tokens

    def _count(self, stats: Any) -> None:
        self._add_stats((stats and stats.kv_connector_stats) or {})

    def _add_stats(self, data: Mapping[str, Any]) -> None:
        for key, value in data.items():
            if isinstance(value, int | float):
                self.stats[key] = self.stats.get(key, 0) + value
            else:  # MultiConnector: by child
                self._add_stats(value.get("data", value))

    # -- waiting ---------------------------------------------------------------------------------

    def run_until(
        self, done: Callable[[], object], what: str, deadline_s: float = RUN_DEADLINE_S
    ) -> None:
        """Step until `done()` is true."""

        def look() -> bool:
            self.step()
            return bool(done())

        eventually(look, deadline_s, what, again_s=0.0005)

    def run_all(self) -> None:
        """Step until every request has ended and the connector asks for no more steps."""
        self.run_until(
            lambda: not self.in_flight and not self.scheduler.has_requests(), "an idle engine"
        )
        late = self.connector and self.connector.get_kv_connector_stats()
        if late is not None:  # what was counted behind the last step
            self._add_stats(late.to_dict() if hasattr(late, "to_dict") else late.data)

    def held_blocks(self) -> int:
        """Blocks that are not in the free queue (the null block apart)."""
        return self.pool.num_gpu_blocks - 1 - self.pool.get_num_free_blocks()

    def assert_empty(self) -> None:
        """Nothing of any request is left, on any side; the local cache can be emptied."""
        scheduler = self.scheduler
        assert not scheduler.requests and not scheduler.running
        assert not scheduler.waiting and not scheduler.kv_holding_waiting
        assert not scheduler.finished_recving_kv_req_ids
        assert not scheduler.failed_recving_kv_req_ids
        assert self.held_blocks() == 0, f"{self.held_blocks()} blocks are held"
        assert scheduler.reset_prefix_cache()

    def loads(self) -> list[Any]:
        """Every LoadMeta so far."""
        return [job for meta in self.seen for job in step_of(meta).loads]

    def saves(self) -> list[Any]:
        """Every SaveMeta so far."""
        return [job for meta in self.seen for job in step_of(meta).saves]


def step_of(meta: Any) -> Any:
    """The StepMeta in a step's metadata; under MultiConnector, that of the last child."""
    return meta.metadata[-1].step if hasattr(meta, "metadata") else meta.step


def prompt(seed: int, tokens: int) -> list[int]:
    """Printable tokens that no other seed shares, not even at the start."""
    text = f"{seed}:" + "".join(
        chr(0x21 + zlib.crc32(f"{seed}/{i}".encode()) % 94) for i in range(tokens)
    )
    return tiny_model.token_ids(text[:tokens])
