"""The async client: starts or joins an engine process and talks to it.

Owned by one asyncio event loop; every method is called on it. Each wait has a deadline. When the
engine dies, everyone who waits for it gets EngineDead.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from types import TracebackType

import msgspec

from engine_shim.api import CloseResult, Delta, InputChunk, Prompt, RequestOptions
from engine_shim.config import EngineConfig
from engine_shim.protocol import EngineInfo, SamplingParams

START_TIMEOUT_S = 120.0
UTILITY_TIMEOUT_S = 30.0
OUTPUT_TIMEOUT_S = 300.0


class AsyncClient:
    """See the module. Use `async with await AsyncClient.start(config) as client`."""

    info: EngineInfo

    @classmethod
    async def start(
        cls, config: EngineConfig, *, timeout_s: float = START_TIMEOUT_S
    ) -> AsyncClient:
        """Start an engine process of our own; it ends with `shutdown` or with this process.

        Raises ConfigError, EngineDead (it ended at start; the message has its last words),
        EngineTimeout.
        """
        raise NotImplementedError

    @classmethod
    async def connect(cls, address: str, *, timeout_s: float = START_TIMEOUT_S) -> AsyncClient:
        """Join a running engine at a ZMQ address. Raises WireError, EngineTimeout."""
        raise NotImplementedError

    @property
    def errored(self) -> bool:
        """True once the engine is dead."""
        raise NotImplementedError

    def generate(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions | None = None
    ) -> AsyncIterator[Delta]:
        """One sequence (`params.n` must be 1, see `fan_out`), as it is made.

        Raises InvalidRequest and EngineDead here, before the first `await`; while iterating
        EngineDead, EngineTimeout (no progress for `output_timeout_s`), RequestFailed. Closing or
        cancelling the iterator aborts the request.
        """
        raise NotImplementedError

    def generate_stream(
        self,
        chunks: AsyncIterator[InputChunk],
        params: SamplingParams,
        options: RequestOptions | None = None,
    ) -> AsyncIterator[Delta]:
        """Streaming input: each chunk extends the same request; deltas as in `generate`.

        Stop strings and n > 1 are refused. An error raised by `chunks` ends the request.
        """
        raise NotImplementedError

    async def abort(self, request_id: str) -> None:
        """End every running request with this caller's id (all children of `n > 1`)."""
        raise NotImplementedError

    async def reset_prefix_cache(self, reset_external: bool = False) -> bool:
        """Forget the engine's own prefix cache; False while any block is in use.

        reset_external: also tell the connector to stop using what it stored so far.
        """
        raise NotImplementedError

    async def open_session(
        self, session_id: str | None = None, capacity_tokens: int | None = None
    ) -> str:
        """Legacy path: open a session for `session_params`. InvalidRequest if it is open."""
        raise NotImplementedError

    async def close_session(self, session_id: str, cache_salt: str | None = None) -> CloseResult:
        """End a session in the engine and, through the connector, in the store.

        An id opened by `open_session` closes that legacy session only.
        """
        raise NotImplementedError

    async def stats(self) -> Mapping[str, object]:
        """Counters and gauges of the engine; the connector's under "connector"."""
        raise NotImplementedError

    async def shutdown(self) -> None:
        """Stop the engine if it is ours; close the link. Open requests get EngineDead."""
        raise NotImplementedError

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.shutdown()


def fan_out(
    params: SamplingParams, options: RequestOptions
) -> list[tuple[SamplingParams, RequestOptions]]:
    """The children of a request with `params.n` >= 1; child i samples with seed + i.

    Children share the caller's request id, session id, salt and parameters.
    """
    children = []
    for index in range(params.n):
        seed = None if params.seed is None else params.seed + index
        children.append((msgspec.structs.replace(params, n=1, seed=seed), options))
    return children
