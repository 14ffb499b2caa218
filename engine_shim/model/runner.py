"""Runs the model for the requests of a step. Used by the engine's one thread."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from engine_shim.config import EngineConfig
from engine_shim.model.sampler import sample
from engine_shim.model.transformer import Transformer, make_caches
from engine_shim.scheduler_output import Sampled, Work


class ModelRunner:
    """Model, KV caches of all ranks, and the tokens of the requests it has seen."""

    def __init__(self, config: EngineConfig) -> None:
        if config.cpu_threads:
            torch.set_num_threads(config.cpu_threads)
        self._config = config
        self._device = torch.device(config.device)
        self.caches: list[list[Tensor]] = make_caches(config)
        """[rank][layer], see `connector_port.ConnectorWorker.register_kv_caches`."""
        self.model = Transformer(config, self.caches)
        self._tokens: dict[str, list[int]] = {}

    def execute(self, work: Sequence[Work]) -> dict[str, Sampled]:
        """Compute a step; the sampled token of each request that samples, by request id.

        The runner appends what it samples to its own copy of the tokens, so the next step may be
        planned before this one's outcome is known.
        """
        if not work:
            return {}
        tokens: list[int] = []
        rows: list[int] = []
        sampling: list[Work] = []
        for part in work:
            if part.token_ids is not None:
                self._tokens[part.request_id] = list(part.token_ids)
            known = self._tokens[part.request_id]
            end = part.start + part.count
            assert end <= len(known), f"{part.request_id}: {end} tokens asked, {len(known)} known"
            tokens.extend(known[part.start : end])
            if part.samples:
                assert end == len(known), f"{part.request_id} samples in the middle"
                rows.append(len(tokens) - 1)
                sampling.append(part)
        batch = self.model.attention.batch(
            [(part.start, part.count, part.block_ids) for part in work]
        )
        logits = self.model.forward(
            torch.tensor(tokens, device=self._device),
            batch,
            torch.tensor(rows, dtype=torch.int64, device=self._device),
        )
        found: dict[str, Sampled] = {}
        if sampling:
            for part, chosen in zip(sampling, sample(logits, sampling), strict=True):
                self._tokens[part.request_id].append(chosen.token_id)
                found[part.request_id] = chosen
        return found

    def forget(self, request_ids: Iterable[str]) -> None:
        """These requests have ended."""
        for request_id in request_ids:
            self._tokens.pop(request_id, None)
