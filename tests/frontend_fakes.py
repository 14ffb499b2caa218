"""An engine in memory for the front end's tests, and a server to reach it over real HTTP.

The engine's reply is a function of prompt and position, so that equal requests give equal text.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

import httpx
import uvicorn

from engine_shim.api import CloseResult, Delta, Prompt, RequestOptions
from engine_shim.errors import InvalidRequest
from engine_shim.protocol import EngineInfo, FinishReason, SamplingParams, TokenLogprobs, Usage
from engine_shim.tokenizer import PRINTABLE, decode, encode
from tests.waiting import eventually

MAX_MODEL_LEN = 2048
INFO = EngineInfo(
    engine_version="0", max_model_len=MAX_MODEL_LEN, block_size=16, num_blocks=128, vocab_size=264,
    max_num_seqs=8, tp_size=1, device="cpu", session_cache=True, connector=True,
)  # fmt: skip


@dataclass
class Seen:
    """One request as it reached the engine."""

    prompt: list[int]
    params: SamplingParams
    options: RequestOptions


@dataclass
class FakeEngine:
    """See the module. gate: when it is cleared, replies stop before their second token."""

    info: EngineInfo = INFO
    errored: bool = False
    seen: list[Seen] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    closed: list[tuple[str, str | None]] = field(default_factory=list)
    opened: list[str] = field(default_factory=list)
    failure: Exception | None = None
    fail_after: int = 0
    gate: asyncio.Event | None = None
    stats_value: Mapping[str, object] = field(default_factory=dict)
    handoff: dict[str, Any] | None = None

    def generate(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions | None = None
    ) -> AsyncIterator[Delta]:
        tokens = encode(prompt) if isinstance(prompt, str) else list(prompt)
        options = options or RequestOptions()
        limit = MAX_MODEL_LEN - len(tokens)
        if limit < 1:
            raise InvalidRequest(
                f"the prompt has {len(tokens)} tokens, the context {MAX_MODEL_LEN}", "prompt",
                "context_length_exceeded",
            )  # fmt: skip
        if params.max_tokens is not None and params.max_tokens < 1:
            raise InvalidRequest("max_tokens must be at least 1", "max_tokens")
        self.seen.append(Seen(tokens, params, options))
        count = min(limit, params.max_tokens or 20)
        return self._reply(tokens, count, params, options)

    async def _reply(
        self, prompt: list[int], count: int, params: SamplingParams, options: RequestOptions
    ) -> AsyncGenerator[Delta, None]:
        name = options.request_id or "-"
        ended = False
        try:
            for index in range(count):
                if self.failure is not None and index == self.fail_after:
                    raise self.failure
                if index and self.gate is not None:
                    await self.gate.wait()
                await asyncio.sleep(0)
                token = reply_token(prompt, index)
                last = index == count - 1
                usage = Usage(len(prompt), 16, 32, index + 1)
                yield Delta(
                    request_id=name,
                    text=decode([token]),
                    token_ids=(token,),
                    logprobs=logprobs(token, params.logprobs),
                    finish_reason=FinishReason.LENGTH if last else None,
                    usage=usage if last or index == 0 else None,
                    kv_transfer_params=self.handoff if last else None,
                )
            ended = True
        finally:
            if not ended:
                self.aborted.append(name)

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def reset_prefix_cache(self, reset_external: bool = False) -> bool:
        return True

    async def open_session(
        self, session_id: str | None = None, capacity_tokens: int | None = None
    ) -> str:
        session_id = session_id or f"made-{len(self.opened)}"
        self.opened.append(session_id)
        return session_id

    async def close_session(self, session_id: str, cache_salt: str | None = None) -> CloseResult:
        self.closed.append((session_id, cache_salt))
        legacy = session_id in self.opened
        return CloseResult(True, 0 if legacy else 48, legacy=legacy)

    async def stats(self) -> Mapping[str, object]:
        return self.stats_value


def reply_token(prompt: list[int], index: int) -> int:
    """The token at a position of the reply to a prompt."""
    digest = hashlib.sha256(repr((prompt, index)).encode()).digest()
    return PRINTABLE[digest[0] % len(PRINTABLE)]


def reply_text(prompt: list[int], count: int) -> str:
    return decode([reply_token(prompt, index) for index in range(count)])


def logprobs(token: int, alternatives: int | None) -> tuple[TokenLogprobs, ...]:
    if alternatives is None:
        return ()
    top = [(token, -0.5), (65, -1.5), (66, -2.5)][:alternatives]
    return (TokenLogprobs(token, -0.5, 0, top),)


def asgi_client(app: Any) -> httpx.AsyncClient:
    """A client that calls the application in this loop."""
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://shim")


@contextlib.contextmanager
def served(app: Any) -> Iterator[str]:
    """The application behind a real socket, in a thread of the test; its base URL."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = Thread(target=lambda: asyncio.run(server.serve([listener])), daemon=True)
        thread.start()
        try:
            eventually(lambda: server.started, what="the server to start")
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(10)
