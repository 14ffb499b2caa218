"""The engine core: scheduler, model and connector in one step loop, for use in one thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch

from engine_shim import __version__
from engine_shim.api import CloseResult
from engine_shim.config import EngineConfig
from engine_shim.connector_port import Connector, null_connector
from engine_shim.errors import InvalidRequest
from engine_shim.lifecycle import ClientOutput
from engine_shim.model.runner import ModelRunner
from engine_shim.protocol import EngineCoreRequest, EngineInfo, FinishReason
from engine_shim.scheduler import Scheduler
from engine_shim.scheduler_output import (
    MergedReports,
    ReportMerger,
    Sampled,
    SchedulerOutput,
    Work,
)
from engine_shim.validation import check_message

_Outcome = tuple[SchedulerOutput, dict[str, Sampled], MergedReports]


class Runner(Protocol):
    """What computes steps. `ModelRunner` does."""

    caches: list[list[torch.Tensor]]

    def execute(self, work: Sequence[Work]) -> dict[str, Sampled]:
        """See ModelRunner."""

    def forget(self, request_ids: Iterable[str]) -> None:
        """See ModelRunner."""


class EngineCore:
    """One engine. Everything is called on one thread; `step` does the work."""

    def __init__(
        self,
        config: EngineConfig,
        connector: Connector | None = None,
        runner: Runner | None = None,
    ) -> None:
        """Raises ConfigError. connector: None runs without one. runner: None is the model."""
        self.config = config.check()
        self._connector = connector or null_connector(config.tp_size)
        assert len(self._connector.workers) == config.tp_size, "one connector worker per rank"
        self.has_connector = connector is not None
        self.runner: Runner = runner or ModelRunner(config)
        self.scheduler = Scheduler(config, self._connector.scheduler)
        for rank, worker in enumerate(self._connector.workers):
            worker.register_kv_caches(self.runner.caches[rank])
        self._merger = ReportMerger(config.tp_size)
        # Outcomes not taken in yet; bounded: at most one stays when a step returns.
        self._outcomes: deque[_Outcome] = deque()
        self._steps = 0

    @property
    def info(self) -> EngineInfo:
        """What a front end needs to know."""
        config = self.config
        return EngineInfo(
            engine_version=__version__,
            max_model_len=config.max_model_len,
            block_size=config.block_size,
            num_blocks=config.num_blocks,
            vocab_size=config.model.vocab_size,
            max_num_seqs=config.max_num_seqs,
            tp_size=config.tp_size,
            device=config.device,
            session_cache=self.scheduler.sessions.enabled,
            connector=self.has_connector,
        )

    # ---- requests -----------------------------------------------------------------------------

    def add_request(self, message: EngineCoreRequest, client: bytes = b"") -> None:
        """Queue a request or more input of a resumable one. Whatever is wrong with it becomes an
        ERROR output of that request."""
        try:
            check_message(message, self.config.max_model_len, self.config.model.vocab_size)
        except InvalidRequest as error:
            self.scheduler.refuse(message, client, str(error))
            return
        self.scheduler.add_request(message, client)

    def abort(
        self, request_ids: list[str], reason: FinishReason = FinishReason.ABORT
    ) -> None:
        """End requests now; unknown ids are passed over. Each gets one last output."""
        self.scheduler.finish_ids(request_ids, reason)

    def abort_client(self, client: bytes) -> None:
        """A client is gone: end all its requests."""
        gone = [r.request_id for r in self.scheduler.requests.values() if r.client == client]
        self.scheduler.finish_ids(gone, FinishReason.ABORT)

    # ---- stepping -----------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """True if a step may compute something or produce output now."""
        return self.scheduler.has_work or self.scheduler.has_outputs or bool(self._outcomes)

    @property
    def must_poll(self) -> bool:
        """True while an idle engine must keep stepping for the connector."""
        return self.scheduler.is_waiting or self._connector.scheduler.has_pending_work()

    def step(self) -> tuple[list[ClientOutput], bool]:
        """Plan, compute and take in one step: (outputs, whether anything was computed).

        With async scheduling the outcome taken in is that of the step before.
        """
        self._steps += 1
        output, meta = self.scheduler.schedule()
        self.runner.forget(output.finished_ids)
        workers = self._connector.workers
        for worker in workers:
            worker.start_step(meta)
        sampled = self.runner.execute(output.work())
        for worker in workers:
            worker.end_step()
        reports = self._merger.merge([worker.poll() for worker in workers])
        self._outcomes.append((output, sampled, reports))
        keep = 1 if self.config.async_scheduling and output.planned else 0
        while len(self._outcomes) > keep:
            self.scheduler.update(*self._outcomes.popleft())
        return self.scheduler.take_outputs(), bool(output.planned)

    # ---- calls --------------------------------------------------------------------------------

    def reset_prefix_cache(self, reset_external: bool = False) -> bool:
        """Forget the prefix cache; False while a request uses a block (a connector lets go of
        what it can first). reset_external: tell the connector to forget, too."""
        self._connector.scheduler.drop_holds()
        done = self._connector.scheduler.reset_cache() if reset_external else True
        return self.scheduler.pool.reset_prefix_cache() and done

    def close_session(self, session_id: str, cache_salt: str | None = None) -> CloseResult:
        """End a session here and, through the connector, in the store."""
        result = self.scheduler.sessions.close(session_id, cache_salt)
        self._connector.scheduler.close_session(session_id, cache_salt)
        return result

    def stats(self) -> Mapping[str, object]:
        """Counters and gauges; no ids."""
        scheduler = self.scheduler
        pool = scheduler.pool
        return {
            **scheduler.counters.as_dict(),
            "steps": self._steps,
            "evicted_blocks": pool.num_evicted,
            "num_running": len(scheduler.running),
            "num_waiting": len(scheduler.waiting) + len(scheduler.ready),
            "num_loading": len(scheduler.loading),
            "num_paused": len(scheduler.paused),
            "num_blocks": pool.num_blocks,
            "free_blocks": pool.num_free,
            "cached_blocks": pool.num_cached,
            "session_blocks": pool.num_held,
            "open_sessions": scheduler.sessions.num_sessions,
            "connector": self._connector.scheduler.stats(),
        }

    def check_integrity(self) -> list[str]:
        """All violations of the block pool's and the session cache's promises."""
        return self.scheduler.pool.check_integrity() + self.scheduler.sessions.check_integrity()

    def shutdown(self) -> None:
        """Stop the connector. Not safe to step afterwards."""
        for worker in self._connector.workers:
            worker.shutdown()
        self._connector.scheduler.shutdown()
