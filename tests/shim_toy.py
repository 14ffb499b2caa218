"""ToyConnector for engines with the real model: all layers of a rank as one region."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine_shim.config import EngineConfig
from engine_shim.connector_port import Connector
from tests.shim_kit import Faults, ToyConnector, ToyWorker


class _Layers:
    """Indexing like one cache tensor, over all layers."""

    def __init__(self, regions: Sequence[torch.Tensor]) -> None:
        self._regions = regions

    def __getitem__(self, block: int) -> torch.Tensor:
        return torch.stack([region[block] for region in self._regions])

    def __setitem__(self, block: int, value: torch.Tensor | float) -> None:
        for index, region in enumerate(self._regions):
            region[block] = value[index] if isinstance(value, torch.Tensor) else value


class _Worker(ToyWorker):
    def register_kv_caches(self, regions: Sequence[torch.Tensor]) -> None:
        self.cache = _Layers(regions)  # type: ignore[assignment]


def one_region(config: EngineConfig) -> Connector:
    """A `connector_port.ConnectorFactory`."""
    assert config.kv_transfer_config is not None
    toy = ToyConnector(config, Faults(**config.kv_transfer_config.get("faults", {})))
    return Connector(toy, tuple(_Worker(toy, rank) for rank in range(config.tp_size)))
