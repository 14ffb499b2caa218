"""Our connector and vLLM's own for Mooncake, each with its lookups timed where vLLM's scheduler
makes them: one JSON line per request in the file that `LOOKUPS` of the environment names.

`spent_s`: the scheduler thread was inside the connector; `waited_s`: from the request's arrival at
the scheduler to the answer; `calls`: how often it asked; `tokens`: what was promised.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.connector import (
    MooncakeStoreConnector,
)

from connector.vllm_adapter import SessionKVConnector

LOOKUPS = "SKV_BENCH_LOOKUPS"


class _Lookup:
    """One request's: began is a clock reading."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.spent_s, self.calls = 0.0, 0


class _Timed:
    """Mixed in before a connector class. Scheduler thread."""

    _lookups: dict[str, _Lookup]

    def on_new_request(self, request: Any) -> None:
        self.__dict__.setdefault("_lookups", {})
        one = self._lookups[request.request_id] = _Lookup()
        super().on_new_request(request)  # type: ignore[misc]
        one.spent_s += time.perf_counter() - one.began

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        began = time.perf_counter()
        found = super().get_num_new_matched_tokens(request, num_computed_tokens)  # type: ignore[misc]
        now = time.perf_counter()
        one = self._lookups.get(request.request_id)
        if one is not None:
            one.spent_s += now - began
            one.calls += 1
            if found[0] is not None:
                self._write(self._lookups.pop(request.request_id), now, found[0])
        return found

    @staticmethod
    def _write(one: _Lookup, now: float, tokens: int) -> None:
        line = {
            "spent_s": one.spent_s, "waited_s": now - one.began, "calls": one.calls,
            "tokens": tokens,
        }  # fmt: skip
        with Path(os.environ[LOOKUPS]).open("a") as file:
            file.write(json.dumps(line) + "\n")


class TimedSessionKV(_Timed, SessionKVConnector):
    """Ours."""


class TimedMooncakeStore(_Timed, MooncakeStoreConnector):
    """vLLM's own."""
