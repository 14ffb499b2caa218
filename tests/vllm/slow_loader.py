"""Another connector, to sit beside ours under MultiConnector: an asynchronous load that takes as
long as the test wants, and then turns out to have failed, so that vLLM computes everything.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
)

PARAM = "slow_tokens"


class Gate:
    """Shared by both roles in one process: loads end once it is open."""

    open = False


@dataclass
class SlowLoads(KVConnectorMetadata):
    """Loads that start with a step: request id to blocks."""

    loads: dict[str, list[int]] = field(default_factory=dict)


class SlowLoader(KVConnectorBase_V1):
    """Promises as many tokens as the request's kv_transfer_params say under `slow_tokens`."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._new = SlowLoads()
        self._open: dict[str, list[int]] = {}
        self._bad: set[int] = set()
        self._done: set[str] = set()

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int):  # type: ignore[no-untyped-def]
        tokens = (request.kv_transfer_params or {}).get(PARAM, 0)
        if request.request_id in self._done or tokens <= num_computed_tokens:
            return 0, False
        return tokens - num_computed_tokens, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._done.add(request.request_id)
            self._new.loads[request.request_id] = list(blocks.get_block_ids()[0])

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        new, self._new = self._new, SlowLoads()
        return new

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        meta = self._get_connector_metadata()
        assert isinstance(meta, SlowLoads)
        self._open.update(meta.loads)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if not Gate.open:
            return KVConnectorTransferResults()
        ended, self._open = self._open, {}
        self._bad = {block for blocks in ended.values() for block in blocks}
        return KVConnectorTransferResults(finished_recving=set(ended))

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self._bad = self._bad, set()
        return bad

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...
