"""The gRPC front end over an engine in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from engine_shim.errors import EngineDead, RequestFailed
from engine_shim.frontend.entrances import GRPC_ENTRANCES, GRPC_SERVICE
from engine_shim.frontend.grpc_server import start_grpc
from engine_shim.frontend.state import Frontend
from engine_shim.proto import shim_pb2, shim_pb2_grpc
from engine_shim.tokenizer import encode
from tests.frontend_fakes import FakeEngine, reply_text

Use = Callable[[Any], Awaitable[Any]]


def on_server(engine: FakeEngine, use: Use) -> Any:
    """Runs `use(stub)` against a real server over loopback."""

    async def run() -> Any:
        server, port = await start_grpc(Frontend(engine), "127.0.0.1:0")
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                return await asyncio.wait_for(use(shim_pb2_grpc.ShimEngineStub(channel)), 20)
        finally:
            await server.stop(0)

    return asyncio.run(run())


def request(**fields: Any) -> Any:
    sampling = shim_pb2.Sampling(max_tokens=4, temperature=0.1, n=fields.pop("n", 0))
    return shim_pb2.GenerateRequest(sampling=sampling, **{"text": "ab", **fields})


def test_service_has_the_methods_of_the_entrance_table() -> None:
    service = shim_pb2.DESCRIPTOR.services_by_name["ShimEngine"]
    assert service.full_name == GRPC_SERVICE
    generating = {
        f"/{GRPC_SERVICE}/{method.name}"
        for method in service.methods
        if method.input_type.name == "GenerateRequest"
    }
    assert generating == {row.path for row in GRPC_ENTRANCES}


def test_unary() -> None:
    engine = FakeEngine(handoff={"session_kv": {"num_tokens": 16}})
    ask = request(
        session_id="s", cache_salt="salt", kv_transfer_params={"a": {"n": 3}}, xargs={"b": 1.5}
    )
    reply = on_server(engine, lambda stub: stub.Generate(ask))
    assert reply.choices[0].text == reply_text(encode("ab"), 4)
    assert reply.choices[0].finish_reason == "length"
    assert (reply.usage.prompt_tokens, reply.usage.output_tokens) == (2, 4)
    assert reply.session_id == "s"
    assert reply.kv_transfer_params["session_kv"]["num_tokens"] == 16
    seen = engine.seen[0]
    assert seen.options.session_id == "s" and seen.options.cache_salt == "salt"
    assert seen.options.kv_transfer_params == {"a": {"n": 3}}
    assert seen.params.temperature == 0.1 and seen.params.extra_args == {"b": 1.5}


def test_stream_of_several_choices() -> None:
    engine = FakeEngine()

    async def use(stub: Any) -> list[Any]:
        return [piece async for piece in stub.GenerateStream(request(n=2, session_id="s"))]

    pieces = on_server(engine, use)
    texts = {0: "", 1: ""}
    for piece in pieces:
        texts[piece.choices[0].index] += piece.choices[0].text
    assert texts == dict.fromkeys((0, 1), reply_text(encode("ab"), 4))
    assert [piece.HasField("usage") for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert [seen.options.session_id for seen in engine.seen] == ["s", "s"]


def test_tokens_as_prompt() -> None:
    engine = FakeEngine()
    ask = shim_pb2.GenerateRequest(tokens=shim_pb2.TokenIds(ids=[1, 2]))
    on_server(engine, lambda stub: stub.Generate(ask))
    assert engine.seen[0].prompt == [1, 2] and engine.seen[0].params.max_tokens is None


def test_reply_metadata_has_the_id() -> None:
    async def use(stub: Any) -> Any:
        call = stub.Generate(request(), metadata=(("x-session-id", "from-metadata"),))
        await call
        return dict(await call.initial_metadata())

    assert on_server(FakeEngine(), use)["x-session-id"] == "from-metadata"


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (EngineDead("gone"), grpc.StatusCode.UNAVAILABLE),
        (RequestFailed("no"), grpc.StatusCode.INTERNAL),
        (ZeroDivisionError("detail"), grpc.StatusCode.INTERNAL),
    ],
)
def test_faults_are_statuses(failure: Exception, code: grpc.StatusCode) -> None:
    async def use(stub: Any) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as unary:
            await stub.Generate(request())
        with pytest.raises(grpc.aio.AioRpcError) as stream:
            _ = [piece async for piece in stub.GenerateStream(request())]
        assert unary.value.code() == stream.value.code() == code
        assert "detail" not in (unary.value.details() or "")

    on_server(FakeEngine(failure=failure, fail_after=1), use)


@pytest.mark.parametrize(
    "ask",
    [
        request(session_id="x" * 257),
        request(session_id="a\nb"),
        shim_pb2.GenerateRequest(text="x" * 5000),
    ],
)
def test_bad_input_is_invalid_argument(ask: Any) -> None:
    async def use(stub: Any) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(ask)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert (await stub.Generate(request())).choices

    on_server(FakeEngine(), use)


def test_cancelled_call_aborts_the_request() -> None:
    async def use(stub: Any) -> None:
        engine.gate = asyncio.Event()
        call = stub.GenerateStream(request(request_id="mine"))
        await call.read()
        call.cancel()
        while not engine.aborted:
            await asyncio.sleep(0.005)

    engine = FakeEngine()
    on_server(engine, use)
    assert engine.aborted == ["mine"]


def test_close_session() -> None:
    engine = FakeEngine()
    ask = shim_pb2.CloseSessionRequest(session_id="s", cache_salt="x")
    reply = on_server(engine, lambda stub: stub.CloseSession(ask))
    assert reply.freed_tokens == 48 and engine.closed == [("s", "x")]
