"""The vLLM plugin: vLLM 0.32's V1 connector API on top of `ConnectorScheduler` and `StoreWorker`.

The only file that imports vLLM. Each hook of the scheduler role runs on the scheduler's thread,
each of the worker role on the worker's; none waits for the network. It relies neither on async
scheduling nor on its absence, nor on `shutdown` being called.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

from connector import plugin
from connector.clock import SystemClock
from connector.config import parse_config
from connector.ids import BlockId, RequestId
from connector.meta import BlockOutcome, JobKind, StepMeta, WorkerReport
from connector.planner import Engine
from connector.scheduler import ConnectorScheduler, Said, Scheduled
from connector.stats import GAUGE, Data, merge, split_key
from connector.vllm_facts import check_supported, namespace_spec, payload_bytes
from store_worker.assemble import SchedulerSide, object_bytes, open_scheduler_side, open_worker_side
from store_worker.worker import StoreWorker

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.session_kv")

METRIC_PREFIX = "vllm:session_kv_"
CLOSE_TIMEOUT_S = 5.0


@dataclass
class StepMetadata(KVConnectorMetadata):
    """What the scheduler half sends with a step."""

    step: StepMeta


@dataclass
class Reports(KVConnectorWorkerMetadata):
    """What the worker ranks send back."""

    reports: list[WorkerReport]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, Reports)
        return Reports(self.reports + other.reports)


@dataclass
class SessionKVStats(KVConnectorStats):
    """Counters since the last step that sent any; `data` is flat (see `connector.stats`)."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        return SessionKVStats(merge(dict(self.data), other.data))

    def reduce(self) -> dict[str, int | float]:
        return {k: round(v, 3) for k, v in sorted(self.data.items()) if "_bin" not in k}

    def is_empty(self) -> bool:
        return not self.data


class SessionKVPromMetrics(KVConnectorPromMetrics):
    """Counters and gauges on vLLM's /metrics, made when first seen; one label besides vLLM's own at
    most. Never raises: a metric is not worth a request."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._metrics: dict[str, Any] = {}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for key, value in transfer_stats_data.items():
            name, label, label_value = split_key(key)
            values = [*self.per_engine_labelvalues[engine_idx], *([label_value] if label else [])]
            try:
                if name.startswith(GAUGE):
                    self._metric(name, label).labels(*values).set(value)
                elif value > 0:
                    self._metric(name, label).labels(*values).inc(value)
            except ValueError as error:
                logger.debug("metric %s: %s", name, error)

    def _metric(self, name: str, label: str) -> Any:
        if name not in self._metrics:
            make = self._gauge_cls if name.startswith(GAUGE) else self._counter_cls
            plain = name.removeprefix(GAUGE)
            self._metrics[name] = make(
                name=METRIC_PREFIX + plain,
                documentation=f"Session KV connector: {plain.replace('_', ' ')}.",
                labelnames=[*self._labelnames, label] if label else self._labelnames,
            )
        return self._metrics[name]


class _Pool:
    """`connector.ports.BlockPool` over vLLM's block pool. Scheduler thread."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def hold(self, blocks: Iterable[BlockId]) -> None:
        self._pool.touch([self._pool.blocks[b] for b in blocks])

    def release(self, blocks: Iterable[BlockId]) -> None:
        # The tail goes first: it is the first to be evicted.
        self._pool.free_blocks([self._pool.blocks[b] for b in reversed(list(blocks))])

    def free_share(self) -> float:
        return self._pool.get_num_free_blocks() / self._pool.num_gpu_blocks


def hash_seed(algorithm: str) -> str:
    """Fingerprint of what this engine's block hashes start from."""
    seed = resolve_none_hash_seed(get_hash_fn_by_name(algorithm))
    if seed != resolve_none_hash_seed(get_hash_fn_by_name(algorithm)):
        logger.warning(
            "Block hashes of %s are random per process: no other engine, and not this one after a "
            "restart, will find what it saves. Set PYTHONHASHSEED to the same value on every "
            "engine, or use --prefix-caching-hash-algo sha256.",
            algorithm,
        )
    return seed


class SessionKVConnector(KVConnectorBase_V1):
    """Session-aware connector. One instance per role; see the module."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._config = parse_config(transfer.kv_connector_extra_config)
        check_supported(vllm_config, kv_cache_config)
        self._clock = SystemClock()
        self._core: ConnectorScheduler | None = None
        self._side: SchedulerSide | None = None
        self._worker: StoreWorker | None = None
        self._report: WorkerReport | None = None
        self._requests: dict[str, Request] = {}
        if role is KVConnectorRole.SCHEDULER:
            self._choose_failure_policy()
            self._open_scheduler()

    def _choose_failure_policy(self) -> None:
        """A lost cache entry must never fail a request, whatever vLLM's default is."""
        transfer = self._kv_transfer_config
        if transfer.kv_load_failure_policy != self._config.load_failure_policy:
            transfer.kv_load_failure_policy = self._config.load_failure_policy
            logger.warning(
                'SessionKVConnector sets kv_load_failure_policy to "recompute", so that a block '
                "the store has lost is computed again and fails no request. Under MultiConnector "
                "this can't be done from here: give the outer --kv-transfer-config "
                '"kv_load_failure_policy": "recompute".'
            )

    def _open_scheduler(self) -> None:
        engine = Engine(
            tokens_per_block=self._kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size,
            ranks=self._vllm_config.parallel_config.tensor_parallel_size,
            object_bytes=object_bytes(payload_bytes(self._kv_cache_config)),
            num_blocks=self._kv_cache_config.num_blocks,
        )
        algorithm = self._vllm_config.cache_config.prefix_caching_hash_algo
        spec = namespace_spec(
            self._config,
            self._vllm_config,
            self._kv_cache_config,
            current_platform.device_type,
            hash_seed(algorithm),
        )
        self._side = open_scheduler_side(self._config, engine.object_bytes, spec, self._clock)
        self._core = ConnectorScheduler(
            self._config, engine, self._side.index, self._clock, self._side.naming.namespace_of
        )
        logger.info("SessionKVConnector: namespace %s", self._core.namespace.hex())

    # -- scheduler role ----------------------------------------------------------------------

    @property
    def _scheduler(self) -> ConnectorScheduler:
        assert self._core is not None, "a scheduler hook was called on a worker"
        return self._core

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: a dropped save is a future miss."""
        return False

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """References on blocks are taken here; and a reset of vLLM's prefix cache, which fails
        while any block is held, first lets go of all of them."""
        self._scheduler.bind_block_pool(_Pool(gpu_block_pool))
        reset, core = gpu_block_pool.reset_prefix_cache, self._scheduler

        def reset_prefix_cache() -> bool:
            core.drop_holds()
            return reset()

        gpu_block_pool.reset_prefix_cache = reset_prefix_cache  # type: ignore[method-assign]

    def on_new_request(self, request: Request) -> None:
        self._requests[request.request_id] = request
        sampling = request.sampling_params
        said = Said(
            session_id=request.session_id,
            cache_salt=request.cache_salt,
            extra_args=sampling.extra_args if sampling is not None else None,
            kv_transfer_params=request.kv_transfer_params,
            kv_hints=request.kv_hints,
        )
        self._scheduler.on_new_request(request, said)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tokens = self._scheduler.match(RequestId(request.request_id), num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        table = [BlockId(b) for b in blocks.get_block_ids()[0]]
        id_ = RequestId(request.request_id)
        self._scheduler.on_allocated(id_, table, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        for request_id in scheduler_output.preempted_req_ids or ():
            self._scheduler.on_preempted(RequestId(request_id))
        state = scheduler_output.kv_connector_block_state
        parts = []
        for request_id, tokens in scheduler_output.num_scheduled_tokens.items():
            request = self._requests.get(request_id)
            if request is not None:
                parts.append(
                    Scheduled(
                        request=RequestId(request_id),
                        num_computed_tokens=request.num_computed_tokens,
                        num_scheduled_tokens=tokens,
                        blocks=partial(_table, state, request_id),
                    )
                )
        return StepMetadata(self._scheduler.build_step(parts))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, Reports):
            self._scheduler.on_reports(meta.reports)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._requests.pop(request.request_id, None)
        params = self._scheduler.on_finished(
            RequestId(request.request_id),
            request.num_computed_tokens,
            [BlockId(b) for b in block_ids],
        )
        return False, params

    def has_pending_push_work(self) -> bool:
        return self._scheduler.has_pending_work()

    def reset_cache(self) -> bool:
        self._scheduler.reset_cache(self._config.weights_version or secrets.token_hex(8))
        return True

    # -- worker role -------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker = open_worker_side(
            self._config,
            get_tensor_model_parallel_rank(),
            kv_caches,
            self._kv_cache_config.num_blocks,
            self._clock,
        )

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Before the forward pass: saves that have lost their blocks end."""
        if self._worker is not None and isinstance(kv_connector_metadata, StepMetadata):
            self._worker.revoke(kv_connector_metadata.step)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        meta = self._get_connector_metadata()
        assert isinstance(meta, StepMetadata)
        if self._worker is not None and not meta.step.empty:
            self._worker.submit(meta.step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: a request runs only once its blocks are there."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kw: Any
    ) -> None:
        """Saves are planned by block, after the forward pass."""

    def wait_for_save(self) -> None:
        """Blocks that are being saved are held by the scheduler: nothing to wait for."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Every load that ended on this rank, well or not, exactly once."""
        self._report = self._worker.poll() if self._worker is not None else None
        results = self._report.results if self._report is not None else ()
        loads = {str(r.request) for r in results if r.kind is JobKind.LOAD}
        return KVConnectorTransferResults(finished_recving=loads)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of the loads reported just now that do not hold what was promised."""
        results = self._report.results if self._report is not None else ()
        return {
            int(block)
            for r in results
            if r.kind is JobKind.LOAD
            for block, outcome in zip(r.blocks, r.outcomes, strict=True)
            if outcome != BlockOutcome.OK
        }

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report, self._report = self._report, None
        if report is None or not (report.results or report.counters):
            return None
        return Reports([report])

    # -- both --------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        data: Data = self._core.take_stats() if self._core is not None else {}
        return SessionKVStats(data) if data else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return SessionKVStats(dict(data or {}))

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> KVConnectorPromMetrics:
        return SessionKVPromMetrics(*args, **kwargs)

    def shutdown(self) -> None:
        if self._side is not None:
            self._side.close(CLOSE_TIMEOUT_S)
        if self._worker is not None:
            self._worker.close(CLOSE_TIMEOUT_S)


def _table(state: Any, request_id: str) -> list[BlockId]:
    tables = state.get_block_ids(request_id) if state is not None else None
    return [BlockId(b) for b in tables[0]] if tables else []


plugin.register()
