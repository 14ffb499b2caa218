"""Plugs the session connector into the shim engine: the shim's composition root.

Maps `connector_port` to `connector.scheduler.ConnectorScheduler` and `store_worker.StoreWorker`.
Everything runs on the engine's one thread.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from connector.clock import SystemClock
from connector.config import Config, parse_config
from connector.errors import ConfigError
from connector.ids import BlockId, RequestId
from connector.meta import BlockOutcome, JobKind, StepMeta, WorkerReport
from connector.planner import Engine
from connector.scheduler import ConnectorScheduler, Said, Scheduled
from connector.stats import Data, merge
from engine_shim import connector_port as port
from engine_shim.config import EngineConfig
from engine_shim.hashing import ROOT
from store_worker.assemble import (
    SchedulerSide,
    object_bytes,
    open_scheduler_side,
    open_worker_side,
)
from store_worker.keys import NamespaceSpec
from store_worker.worker import StoreWorker

if TYPE_CHECKING:
    import torch


NAME = "SessionKVConnector"
CLOSE_TIMEOUT_S = 5.0
FLAG_KEYS = ("kv_connector", "kv_role", "kv_connector_extra_config", "kv_load_failure_policy")
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def parse_flag(flag: Mapping[str, Any]) -> Config:
    """The connector's config from `--kv-transfer-config`, as vLLM takes it. Raises ConfigError."""
    for key in flag:
        if key not in FLAG_KEYS and key != "kv_connector_module_path":
            raise ConfigError(key, flag[key], f"one of {', '.join(FLAG_KEYS)}")
    if flag.get("kv_connector") != NAME:
        raise ConfigError("kv_connector", flag.get("kv_connector"), f'"{NAME}"')
    if flag.get("kv_role", "kv_both") != "kv_both":
        raise ConfigError(
            "kv_role", flag["kv_role"], '"kv_both"', 'for prefill/decode set "pd_role" instead'
        )
    extra = flag.get("kv_connector_extra_config") or {}
    if not isinstance(extra, Mapping):
        raise ConfigError("kv_connector_extra_config", extra, "an object")
    return parse_config(extra)


def payload_bytes(config: EngineConfig) -> int:
    """Bytes of one block on one rank: layers x tokens x (K, V) x heads of the rank x head size."""
    model = config.model
    heads = model.num_kv_heads // config.tp_size
    elements = model.num_layers * config.block_size * 2 * heads * model.head_dim
    return elements * DTYPE_BYTES[model.dtype]


def namespace_spec(config: Config, engine: EngineConfig) -> NamespaceSpec:
    """Everything that decides whether two shim engines may share blocks."""
    model = engine.model
    return NamespaceSpec(
        model=model.name,
        revision=config.model_revision,
        kv_dtype=model.dtype,
        tokens_per_block=engine.block_size,
        layers=model.num_layers,
        kv_heads=model.num_kv_heads,
        head_size=model.head_dim,
        layout="shim/[block,token,kv,head,dim]",
        payload_bytes=payload_bytes(engine),
        hash_algorithm="engine-shim sha256",
        hash_seed=ROOT.hex(),
        tenant=config.tenant,
        tp_size=engine.tp_size,
    )


class _Pool:
    """`connector.ports.BlockPool` over the shim's pool."""

    def __init__(self, pool: port.PoolPort) -> None:
        self._pool = pool

    def hold(self, blocks: Sequence[BlockId]) -> None:
        self._pool.touch(blocks)

    def release(self, blocks: Sequence[BlockId]) -> None:
        self._pool.free(blocks)

    def free_share(self) -> float:
        return self._pool.num_free / self._pool.num_blocks


def _table(block_ids: Sequence[int]) -> list[BlockId]:
    return [BlockId(b) for b in block_ids]


class SchedulerHalf:
    """`connector_port.ConnectorScheduler`."""

    def __init__(self, config: Config, engine: EngineConfig) -> None:
        facts = Engine(
            tokens_per_block=engine.block_size,
            ranks=engine.tp_size,
            object_bytes=object_bytes(payload_bytes(engine)),
            num_blocks=engine.num_blocks,
        )
        clock = SystemClock()
        self._config = config
        spec = namespace_spec(config, engine)
        self._side: SchedulerSide = open_scheduler_side(config, facts.object_bytes, spec, clock)
        self._core = ConnectorScheduler(
            config, facts, self._side.index, clock, self._side.naming.namespace_of
        )
        self._totals: Data = {}

    def bind_block_pool(self, pool: port.PoolPort) -> None:
        self._core.bind_block_pool(_Pool(pool))

    def on_new_request(self, request: port.RequestView) -> None:
        said = Said(
            session_id=request.session_id,
            cache_salt=request.cache_salt,
            extra_args=request.extra_args,
            kv_transfer_params=request.kv_transfer_params,
            kv_hints=request.kv_hints,
        )
        self._core.on_new_request(request, said)

    def get_num_new_matched_tokens(
        self, request: port.RequestView, num_computed_tokens: int
    ) -> port.MatchResult:
        tokens = self._core.match(RequestId(request.request_id), num_computed_tokens)
        return port.MatchResult(tokens, bool(tokens))

    def update_state_after_alloc(
        self, request: port.RequestView, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        id_ = RequestId(request.request_id)
        self._core.on_allocated(id_, _table(block_ids), num_external_tokens)

    def build_step(self, output: port.StepOutput) -> object | None:
        for request_id in output.preempted_ids:
            self._core.on_preempted(RequestId(request_id))
        meta = self._core.build_step(
            Scheduled(
                request=RequestId(part.request.request_id),
                num_computed_tokens=part.num_computed_tokens,
                num_scheduled_tokens=part.num_scheduled_tokens,
                blocks=partial(_table, part.block_ids),
            )
            for part in output.scheduled
        )
        return None if meta.empty else meta

    def on_worker_reports(self, reports: Sequence[object]) -> None:
        self._core.on_reports(r for r in reports if isinstance(r, WorkerReport))

    def request_finished(
        self, request: port.RequestView, block_ids: Sequence[int]
    ) -> port.FinishResult:
        params = self._core.on_finished(
            RequestId(request.request_id),
            request.num_computed_tokens,
            _table(block_ids),
        )
        return port.FinishResult(kv_transfer_params=params)

    def has_pending_work(self) -> bool:
        return self._core.has_pending_work()

    def reset_cache(self) -> bool:
        self._core.reset_cache(self._config.weights_version or secrets.token_hex(8))
        return True

    def drop_holds(self) -> None:
        self._core.drop_holds()

    def close_session(self, session_id: str, cache_salt: str | None) -> None:
        self._core.close_session(session_id, cache_salt)

    def check_integrity(self) -> list[str]:
        """See `ConnectorScheduler.check_integrity` of the core."""
        return self._core.check_integrity()

    def stats(self) -> Mapping[str, object]:
        merge(self._totals, self._core.take_stats())
        return {
            **self._totals,
            "open_jobs": self._core.open_jobs(),
            "namespace": self._core.namespace.hex(),
        }

    def shutdown(self) -> None:
        self._side.close(CLOSE_TIMEOUT_S)


OpenWorker = Callable[[Config, int, Sequence["torch.Tensor"], int, SystemClock], StoreWorker]


class WorkerHalf:
    """`connector_port.ConnectorWorker` of one rank. open_worker: how its store worker is made."""

    def __init__(
        self,
        config: Config,
        engine: EngineConfig,
        rank: int,
        open_worker: OpenWorker = open_worker_side,
    ) -> None:
        self._config, self._engine, self._rank = config, engine, rank
        self._open_worker = open_worker
        self._worker: StoreWorker | None = None
        self._meta: StepMeta | None = None

    def register_kv_caches(self, regions: Sequence[torch.Tensor]) -> None:
        self._worker = self._open_worker(
            self._config, self._rank, regions, self._engine.num_blocks, SystemClock()
        )

    def start_step(self, meta: object | None) -> None:
        self._meta = meta if isinstance(meta, StepMeta) else None
        if self._meta is not None and self._worker is not None:
            self._worker.revoke(self._meta)

    def end_step(self) -> None:
        meta, self._meta = self._meta, None
        if meta is not None and self._worker is not None:
            self._worker.submit(meta)

    def poll(self) -> port.WorkerReport:
        if self._worker is None:
            return port.EMPTY_REPORT
        report = self._worker.poll()
        if not report.results and not report.counters:
            return port.EMPTY_REPORT
        loads = [r for r in report.results if r.kind is JobKind.LOAD]
        return port.WorkerReport(
            finished_loads=frozenset(str(r.request) for r in loads),
            failed_blocks=frozenset(
                int(block)
                for r in loads
                for block, outcome in zip(r.blocks, r.outcomes, strict=True)
                if outcome != BlockOutcome.OK
            ),
            payload=report,
        )

    def pending(self) -> int:
        """Jobs of this rank whose results `poll` has not handed out yet."""
        return self._worker.pending() if self._worker is not None else 0

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close(CLOSE_TIMEOUT_S)


def build_connector(engine: EngineConfig) -> port.Connector:
    """`connector_port.ConnectorFactory`. Raises ConfigError."""
    assert engine.kv_transfer_config is not None
    config = parse_flag(engine.kv_transfer_config)
    workers = tuple(WorkerHalf(config, engine, rank) for rank in range(engine.tp_size))
    return port.Connector(scheduler=SchedulerHalf(config, engine), workers=workers)
