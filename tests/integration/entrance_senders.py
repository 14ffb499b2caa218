"""How a test sends one request through each entrance of the shim, and what the store thread saw.

`SENDERS` has a row for every row of `ENTRANCES`; a test compares the two.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import os
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc

from connector.session import session_key, short
from engine_shim.api import InputChunk, RequestOptions
from engine_shim.client import AsyncClient
from engine_shim.config import EngineConfig, ModelConfig
from engine_shim.errors import InvalidRequest
from engine_shim.llm import LLM
from engine_shim.proto import shim_pb2, shim_pb2_grpc
from engine_shim.protocol import SamplingParams
from tests.shim_server import SMALL, ShimServer

T = TypeVar("T")

SECRET = "5e" * 32
TENANT = "tests"
STORE_LINE = re.compile(
    r"(?P<kind>save|load) job=\d+ request=(?P<stem>\S+)-(?P<own>[0-9a-z]+) session=(?P<digest>\S+)"
)
FIELDS = ("body", "headers", "xargs", "params")


def flag(**extra: Any) -> dict[str, Any]:
    """`--kv-transfer-config` with a store in the engine's own process."""
    return {
        "kv_connector": "SessionKVConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "store": "memory://", "session_secret": SECRET, "tenant": TENANT, **extra,
        },
    }  # fmt: skip


def digest(session_id: str | None, cache_salt: str | None = None) -> str:
    """How the store thread names a session."""
    if session_id is None:
        return "-"
    return short(session_key(bytes.fromhex(SECRET), TENANT, cache_salt, session_id))


@dataclass
class Ask:
    """One request. stem: its id, as the client gives it; the prompt is made of it."""

    stem: str
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    xargs: dict[str, Any] | None = None
    params: dict[str, Any] | None = None

    @property
    def prompt(self) -> str:
        """Three blocks that no other request has."""
        return f"{self.stem:-<48}"


@dataclass
class Sent:
    """status: as in HTTP. session: of the reply, None without one, or where there is none."""

    status: int
    session: str | None = None


def seen(text: str) -> dict[str, set[str]]:
    """Session digests that store threads logged, by the stem of the request."""
    found: dict[str, set[str]] = {}
    for line in STORE_LINE.finditer(text):
        found.setdefault(line["stem"], set()).add(line["digest"])
    return found


# ---- HTTP -------------------------------------------------------------------------------------


def http(path: str, make: Callable[[Ask], dict[str, Any]]) -> Callable[[Any, Ask], Sent]:
    def send(server: ShimServer, ask: Ask) -> Sent:
        body = {**make(ask), "request_id": ask.stem}
        if ask.body is not None:
            body["session_id"] = ask.body
        if ask.xargs is not None:
            body["vllm_xargs"] = ask.xargs
        if ask.params is not None:
            body["kv_transfer_params"] = ask.params
        headers = {name: value.encode() for name, value in ask.headers.items()}
        reply = server.http.post(server.url + path, json=body, headers=headers)
        raw = [value for name, value in reply.headers.raw if name.lower() == b"x-session-id"]
        return Sent(reply.status_code, raw[0].decode() if raw else None)

    return send


def sampling(ask: Ask) -> dict[str, Any]:
    return {"token_ids": list(ask.prompt.encode()), "sampling_params": {"max_tokens": 1}}


# ---- gRPC -------------------------------------------------------------------------------------


def over_grpc(stream: bool) -> Callable[[Any, Ask], Sent]:
    def send(server: ShimServer, ask: Ask) -> Sent:
        fields = {"session_id": ask.body, "xargs": ask.xargs, "kv_transfer_params": ask.params}
        request = shim_pb2.GenerateRequest(
            request_id=ask.stem,
            text=ask.prompt,
            sampling=shim_pb2.Sampling(max_tokens=1),
            **{name: value for name, value in fields.items() if value is not None},
        )
        metadata = [(name.lower(), value) for name, value in ask.headers.items()]
        with grpc.insecure_channel(server.grpc) as channel:
            stub = shim_pb2_grpc.ShimEngineStub(channel)
            try:
                if stream:
                    replies = list(stub.GenerateStream(request, metadata=metadata, timeout=30))
                else:
                    replies = [stub.Generate(request, metadata=metadata, timeout=30)]
            except grpc.RpcError as error:
                assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, error
                return Sent(400)
        return Sent(200, replies[-1].session_id or None)

    return send


# ---- Python -----------------------------------------------------------------------------------


class Python:
    """Both in-process APIs, and everything that their store threads logged."""

    def __init__(self, llm: LLM, client: AsyncClient, runner: asyncio.Runner) -> None:
        self.llm, self.client, self.runner = llm, client, runner
        self.words = io.StringIO()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """In the client's loop. What its engine process says, it writes to our standard error."""
        with contextlib.redirect_stderr(self.words):
            return self.runner.run(work)

    def log(self) -> str:
        """All lines so far."""
        self.run(asyncio.sleep(0.001))
        return self.words.getvalue()


@contextlib.contextmanager
def python_apis() -> Iterator[Python]:
    """An engine in this process, and one in a process of its own with a client here."""
    config = EngineConfig(
        model=ModelConfig(**json.loads(SMALL)), num_blocks=256, max_model_len=2048,
        kv_transfer_config=flag(),
    )  # fmt: skip
    words = io.StringIO()
    handler = logging.StreamHandler(words)
    logger = logging.getLogger("store_worker")
    before = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    with asyncio.Runner() as runner:
        llm = LLM(config)
        os.environ["SESSION_KV_LOG_LEVEL"] = "debug"
        try:
            client = runner.run(AsyncClient.start(config))
        finally:
            del os.environ["SESSION_KV_LOG_LEVEL"]
        apis = Python(llm, client, runner)
        apis.words = words
        try:
            yield apis
        finally:
            runner.run(client.shutdown())
            llm.shutdown()
            logger.removeHandler(handler)
            logger.setLevel(before)


def over_python(call: Callable[[Python, Ask, SamplingParams, RequestOptions], None]) -> Any:
    def send(apis: Python, ask: Ask) -> Sent:
        params = SamplingParams(max_tokens=1, extra_args=ask.xargs)
        options = RequestOptions(
            request_id=ask.stem, session_id=ask.body, kv_transfer_params=ask.params
        )
        try:
            call(apis, ask, params, options)
        except InvalidRequest as error:
            return Sent(error.status)
        return Sent(200)

    return send


def llm_generate(apis: Python, ask: Ask, params: SamplingParams, options: RequestOptions) -> None:
    apis.llm.generate([ask.prompt], params, options)
    assert apis.llm.drain()


def llm_add_request(
    apis: Python, ask: Ask, params: SamplingParams, options: RequestOptions
) -> None:
    apis.llm.add_request(ask.prompt, params, options)
    assert apis.llm.drain()


def client_generate(
    apis: Python, ask: Ask, params: SamplingParams, options: RequestOptions
) -> None:
    async def run() -> None:
        async for _ in apis.client.generate(ask.prompt, params, options):
            pass

    apis.run(run())


def client_stream_in(
    apis: Python, ask: Ask, params: SamplingParams, options: RequestOptions
) -> None:
    async def pieces() -> AsyncIterator[InputChunk]:
        for part in (ask.prompt[:20], ask.prompt[20:]):
            yield InputChunk(part)

    async def run() -> None:
        async for _ in apis.client.generate_stream(pieces(), params, options):
            pass

    apis.run(run())


# name of the entrance -> (how to send, channels that it has)
SENDERS: dict[str, tuple[Callable[[Any, Ask], Sent], tuple[str, ...]]] = {
    "completions": (
        http("/v1/completions", lambda ask: {"prompt": ask.prompt, "max_tokens": 1}), FIELDS,
    ),
    "chat": (
        http(
            "/v1/chat/completions",
            lambda ask: {"messages": [{"role": "user", "content": ask.prompt}], "max_tokens": 1},
        ),
        FIELDS,
    ),
    "responses": (
        http("/v1/responses", lambda ask: {"input": ask.prompt, "max_output_tokens": 1}), FIELDS,
    ),
    "tokens-in": (http("/inference/v1/generate", sampling), FIELDS),
    "native": (
        http(
            "/generate",
            lambda ask: {"text": ask.prompt, "sampling_params": {"max_new_tokens": 1}},
        ),
        FIELDS,
    ),
    "grpc": (over_grpc(stream=False), FIELDS),
    "grpc-stream": (over_grpc(stream=True), FIELDS),
    "python-generate": (over_python(llm_generate), ("body", "xargs", "params")),
    "python-add-request": (over_python(llm_add_request), ("body", "xargs", "params")),
    "client-generate": (over_python(client_generate), ("body", "xargs", "params")),
    "client-stream-in": (over_python(client_stream_in), ("body", "xargs", "params")),
}  # fmt: skip
