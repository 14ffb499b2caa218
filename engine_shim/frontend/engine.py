"""What the front ends need of an engine. `engine_shim.client.AsyncClient` is the real one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Protocol

from engine_shim.api import CloseResult, Delta, Prompt, RequestOptions
from engine_shim.protocol import EngineInfo, SamplingParams


class EnginePort(Protocol):
    """See `AsyncClient` for what each method promises. Event-loop thread only."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def errored(self) -> bool: ...

    def generate(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions | None = None
    ) -> AsyncIterator[Delta]: ...

    async def abort(self, request_id: str) -> None: ...

    async def reset_prefix_cache(self, reset_external: bool = False) -> bool: ...

    async def open_session(
        self, session_id: str | None = None, capacity_tokens: int | None = None
    ) -> str: ...

    async def close_session(
        self, session_id: str, cache_salt: str | None = None
    ) -> CloseResult: ...

    async def stats(self) -> Mapping[str, object]: ...
