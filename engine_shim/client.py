"""The async client: starts or joins an engine process and talks to it.

Owned by one asyncio event loop; every method is called on it. Each wait has a deadline. When the
engine dies, everyone who waits for it gets EngineDead.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Any

import msgspec

from connector.clock import Clock, SystemClock
from engine_shim.api import CloseResult, Delta, InputChunk, Prompt, RequestOptions
from engine_shim.config import EngineConfig
from engine_shim.detokenizer import Sequence
from engine_shim.engine_link import EngineLink, Stream
from engine_shim.engine_process import EngineProcess
from engine_shim.errors import EngineDead, EngineTimeout, InvalidRequest
from engine_shim.protocol import (
    AbortMessage,
    EngineCoreRequest,
    EngineInfo,
    FinishReason,
    MessageType,
    SamplingParams,
)
from engine_shim.validation import (
    build_message,
    check_options,
    check_params,
    check_tokens,
    fan_out,
    stop_list,
    tokenize,
)

__all__ = ["AsyncClient", "fan_out"]

START_TIMEOUT_S = 120.0
UTILITY_TIMEOUT_S = 30.0
OUTPUT_TIMEOUT_S = 300.0
LEGACY_SESSIONS_MAX = 1024
NO_OPTIONS = RequestOptions()


class AsyncClient:
    """See the module. Use `async with await AsyncClient.start(config) as client`."""

    def __init__(
        self,
        link: EngineLink,
        process: EngineProcess | None = None,
        output_timeout_s: float = OUTPUT_TIMEOUT_S,
        clock: Clock | None = None,
    ) -> None:
        """Use `start` or `connect`."""
        self._link = link
        self._process = process
        self._output_timeout_s = output_timeout_s
        self._clock = clock or SystemClock()
        self._by_caller: dict[str, set[str]] = {}
        self._legacy: set[str] = set()
        self.info: EngineInfo = link.info

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        timeout_s: float = START_TIMEOUT_S,
        output_timeout_s: float = OUTPUT_TIMEOUT_S,
    ) -> AsyncClient:
        """Start an engine process of our own; it ends with `shutdown` or with this process.

        Raises ConfigError, EngineDead (it ended at start; the message has its last words),
        EngineTimeout.
        """
        process = await EngineProcess.start(config.check())
        try:
            link = await EngineLink.open(process.address, timeout_s, process.ended)
        except BaseException:
            await process.stop()
            raise
        process.on_end(link.die)
        return cls(link, process, output_timeout_s)

    @classmethod
    async def connect(
        cls,
        address: str,
        *,
        timeout_s: float = START_TIMEOUT_S,
        output_timeout_s: float = OUTPUT_TIMEOUT_S,
    ) -> AsyncClient:
        """Join a running engine at a ZMQ address. Raises WireError, EngineTimeout."""
        return cls(await EngineLink.open(address, timeout_s), None, output_timeout_s)

    @property
    def address(self) -> str:
        """Where another client can `connect`."""
        return self._link.address

    @property
    def process(self) -> EngineProcess | None:
        """The engine's process if it is ours."""
        return self._process

    @property
    def errored(self) -> bool:
        """True once the engine is dead."""
        return self._link.dead is not None

    # ---- requests -----------------------------------------------------------------------------

    def generate(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions | None = None
    ) -> AsyncIterator[Delta]:
        """One sequence (`params.n` must be 1, see `fan_out`), as it is made.

        Raises InvalidRequest and EngineDead here, before the first `await`; while iterating
        EngineDead, EngineTimeout (no progress for `output_timeout_s`), RequestFailed. Closing or
        cancelling the iterator aborts the request.
        """
        message = self._message(prompt, params, options or NO_OPTIONS)
        return self._generate(message, options or NO_OPTIONS)

    def generate_stream(
        self,
        chunks: AsyncIterator[InputChunk],
        params: SamplingParams,
        options: RequestOptions | None = None,
    ) -> AsyncIterator[Delta]:
        """Streaming input: each chunk extends the same request; deltas as in `generate`.

        Stop strings and n > 1 are refused. An error raised by `chunks` ends the request.
        """
        options = options or NO_OPTIONS
        if stop_list(params):
            raise InvalidRequest("stop strings are not served with streaming input", "stop")
        message = self._message((0,), params, options)
        return self._generate_stream(chunks, message, options)

    def _message(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions
    ) -> EngineCoreRequest:
        if self._link.dead is not None:
            raise EngineDead(self._link.dead)
        check_options(options)
        check_params(params)
        if params.n != 1:
            raise InvalidRequest("n > 1 must be fanned out by the front end", "n")
        tokens = tokenize(prompt)
        check_tokens(tokens, self.info.max_model_len, self.info.vocab_size)
        stem = options.request_id or "req"
        request_id = f"{stem}-{secrets.token_hex(6)}"
        arrival_s = self._clock.wall_ms() / 1000
        return build_message(tokens, params, options, request_id, arrival_s)

    async def _generate(
        self, message: EngineCoreRequest, options: RequestOptions
    ) -> AsyncIterator[Delta]:
        params = message.sampling_params
        assert params is not None
        with self._registered(message, options) as stream:
            try:
                await self._link.send(MessageType.ADD, message)
                async for delta in self._deltas(stream):
                    yield delta
            finally:
                if not stream.sequence.ended:
                    await self._abort_quietly(message.request_id)

    async def _generate_stream(
        self, chunks: AsyncIterator[InputChunk], message: EngineCoreRequest, options: RequestOptions
    ) -> AsyncIterator[Delta]:
        with self._registered(message, options) as stream:
            feeder = asyncio.ensure_future(self._feed(chunks, message, stream))
            try:
                async for delta in self._deltas(stream):
                    yield delta
            finally:
                feeder.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await feeder
                if not stream.sequence.ended:
                    await self._abort_quietly(message.request_id)

    async def _feed(
        self, chunks: AsyncIterator[InputChunk], template: EngineCoreRequest, stream: Stream
    ) -> None:
        """Send the pieces of input; whatever goes wrong is raised to the reader of the stream."""
        fed = False
        try:
            async for chunk in chunks:
                params = chunk.params or template.sampling_params
                assert params is not None
                if stop_list(params) or params.n != 1:
                    raise InvalidRequest("stop strings and n > 1 are not served here", "stop")
                tokens = tokenize(chunk.prompt)
                check_params(params)
                check_tokens(tokens, self.info.max_model_len, self.info.vocab_size)
                piece = msgspec.structs.replace(
                    template, prompt_token_ids=tokens, sampling_params=params, resumable=True
                )
                await self._link.send(MessageType.ADD, piece)
                fed = True
            if fed:
                await self._link.send(MessageType.ADD, template)
            else:
                stream.close()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            stream.fail(error)

    @contextlib.contextmanager
    def _registered(self, message: EngineCoreRequest, options: RequestOptions) -> Any:
        """The stream of outputs of a request, known to `abort` while it runs."""
        params = message.sampling_params
        assert params is not None
        caller_id = options.request_id or message.request_id
        stream = Stream(Sequence(caller_id, params))
        self._link.streams[message.request_id] = stream
        self._by_caller.setdefault(caller_id, set()).add(message.request_id)
        try:
            yield stream
        finally:
            self._link.streams.pop(message.request_id, None)
            ids = self._by_caller[caller_id]
            ids.discard(message.request_id)
            if not ids:
                del self._by_caller[caller_id]

    async def _deltas(self, stream: Stream) -> AsyncIterator[Delta]:
        while True:
            try:
                async with asyncio.timeout(self._output_timeout_s):
                    delta = await stream.next()
            except TimeoutError:
                raise EngineTimeout(
                    f"no output of the engine for {self._output_timeout_s} s"
                ) from None
            if delta is None:
                return
            yield delta
            if delta.finish_reason is not None and not delta.awaiting_input:
                return

    async def _abort_quietly(self, internal_id: str) -> None:
        with contextlib.suppress(EngineDead, EngineTimeout):
            await self._link.send(MessageType.ABORT, AbortMessage([internal_id]))

    async def abort(self, request_id: str) -> None:
        """End every running request with this caller's id (all children of `n > 1`)."""
        ids = sorted(self._by_caller.get(request_id, ()))
        if ids:
            await self._link.send(MessageType.ABORT, AbortMessage(ids, FinishReason.ABORT))

    # ---- calls --------------------------------------------------------------------------------

    async def reset_prefix_cache(self, reset_external: bool = False) -> bool:
        """Forget the engine's own prefix cache; False while any block is in use.

        reset_external: also tell the connector to stop using what it stored so far.
        """
        return bool(await self._call("reset_prefix_cache", reset_external))

    async def open_session(
        self, session_id: str | None = None, capacity_tokens: int | None = None
    ) -> str:
        """Legacy path: take an id for `session_params`. InvalidRequest if it is taken.

        The engine knows nothing of it: whoever serves `session_params` keeps the tokens.
        """
        session_id = session_id or secrets.token_hex(16)
        check_options(RequestOptions(session_id=session_id))
        if session_id in self._legacy:
            raise InvalidRequest("this session is open already; close it first", "session_id")
        if len(self._legacy) >= LEGACY_SESSIONS_MAX:
            raise InvalidRequest(
                f"{LEGACY_SESSIONS_MAX} legacy sessions are open; close one", "session_id",
                status=429,
            )  # fmt: skip
        self._legacy.add(session_id)
        return session_id

    async def close_session(self, session_id: str, cache_salt: str | None = None) -> CloseResult:
        """End a session in the engine and, through the connector, in the store.

        An id opened by `open_session` closes that legacy session only.
        """
        check_options(RequestOptions(session_id=session_id, cache_salt=cache_salt))
        if session_id in self._legacy:
            self._legacy.discard(session_id)
            return CloseResult(existed=True, legacy=True)
        result = await self._call("close_session", session_id, cache_salt)
        return msgspec.convert(result, CloseResult)

    async def stats(self) -> Mapping[str, object]:
        """Counters and gauges of the engine; the connector's under "connector"."""
        return dict(await self._call("stats"))

    async def check_integrity(self) -> list[str]:
        """All violations the engine finds in its own books; empty if none."""
        return list(await self._call("check_integrity"))

    async def _call(self, method: str, *args: object) -> Any:
        return await self._link.call(method, list(args), UTILITY_TIMEOUT_S)

    async def shutdown(self) -> None:
        """Stop the engine if it is ours; close the link. Open requests get EngineDead."""
        await self._link.close()
        if self._process is not None:
            await self._process.stop()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.shutdown()
