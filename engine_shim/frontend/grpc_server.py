"""The gRPC front end: unary and streaming, on the same loop and engine as HTTP."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf import json_format, struct_pb2

from engine_shim.api import Delta, RequestOptions, join
from engine_shim.errors import EngineDead, EngineTimeout, InvalidRequest
from engine_shim.frontend.chat_template import encode_text
from engine_shim.frontend.identity import REPLY_HEADER
from engine_shim.frontend.merge import close_all, merged
from engine_shim.frontend.plan import finish_label, total_usage
from engine_shim.frontend.run import error_body
from engine_shim.frontend.state import REQUEST_ID_HEADER, Frontend
from engine_shim.identity import Identity, identify
from engine_shim.proto import shim_pb2, shim_pb2_grpc
from engine_shim.protocol import SamplingParams, Usage

MESSAGE_BYTES_MAX = 32 << 20
CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
}


async def start_grpc(frontend: Frontend, address: str) -> tuple[grpc.aio.Server, int]:
    """A running server and its port. address: host:port, port 0 for any. Stop it yourself.

    Raises OSError if the address can't be had.
    """
    limits = [
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ]
    server = grpc.aio.server(options=limits)
    shim_pb2_grpc.add_ShimEngineServicer_to_server(Servicer(frontend), server)
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise OSError(f"gRPC can't listen on {address}: {error}") from error
    await server.start()
    return server, port


class Servicer(shim_pb2_grpc.ShimEngineServicer):
    """See shim.proto."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def Generate(self, request: Any, context: Any) -> Any:
        """See shim.proto."""
        try:
            call = await _Call.open(self._frontend, request, context)
            return await call.whole()
        except Exception as error:
            await _abort(context, error)

    async def GenerateStream(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """See shim.proto."""
        try:
            call = await _Call.open(self._frontend, request, context)
            async for piece in call.pieces():
                yield piece
        except Exception as error:
            await _abort(context, error)

    async def CloseSession(self, request: Any, context: Any) -> Any:
        """See shim.proto."""
        try:
            if not request.session_id:
                raise InvalidRequest("session_id is missing", "session_id")
            identity = identify(request.session_id)
            assert identity.session_id is not None
            salt = request.cache_salt if request.HasField("cache_salt") else None
            result = await self._frontend.engine.close_session(identity.session_id, salt)
            return shim_pb2.CloseSessionReply(
                existed=result.existed, freed_tokens=result.freed_tokens, pending=result.pending
            )
        except Exception as error:
            await _abort(context, error)


class _Call:
    """One request: its streams, and the replies made of them."""

    def __init__(
        self, identity: Identity, request_id: str, n: int, streams: list[AsyncIterator[Delta]]
    ) -> None:
        self._identity, self._request_id, self._n = identity, request_id, n
        self._streams = streams

    @classmethod
    async def open(cls, frontend: Frontend, request: Any, context: Any) -> _Call:
        """Checked and begun. Raises InvalidRequest."""
        metadata = _metadata(context)
        identity = identify(
            request.session_id if request.HasField("session_id") else None,
            metadata,
            _plain(request.xargs) if request.HasField("xargs") else None,
            _plain(request.kv_transfer_params) if request.HasField("kv_transfer_params") else None,
            frontend.config.session_headers,
        )
        if identity.session_id is not None and identity.session_id.isascii():
            sent = ((REPLY_HEADER.lower(), identity.session_id),)
            await context.send_initial_metadata(sent)
        own = request.request_id or metadata.get(REQUEST_ID_HEADER)
        request_id = frontend.context(identity, own).request_id
        params = sampling(request.sampling, identity)
        options = RequestOptions(
            request_id=request_id,
            session_id=identity.session_id,
            cache_salt=request.cache_salt if request.HasField("cache_salt") else None,
            priority=request.priority,
            kv_transfer_params=identity.kv_transfer_params,
        )
        streams = await frontend.open_sequences([_prompt(request)], params, options)
        return cls(identity, request_id, params.n, streams)

    async def whole(self) -> Any:
        """The unary reply."""
        deltas: list[list[Delta]] = [[] for _ in self._streams]
        async with aclosing(merged(self._streams)) as items:
            async for index, delta in items:
                deltas[index].append(delta)
        results = [join(one) for one in deltas]
        choices = [
            shim_pb2.Choice(
                index=index,
                text=result.text,
                token_ids=result.token_ids,
                finish_reason=finish_label(result),
            )
            for index, result in enumerate(results)
        ]
        usage = total_usage([result.usage for result in results], self._n)
        params = next((r.kv_transfer_params for r in results if r.kv_transfer_params), None)
        return self._reply(choices, usage, params)

    async def pieces(self) -> AsyncIterator[Any]:
        """The replies of a stream."""
        usages = [Usage(0)] * len(self._streams)
        running = len(self._streams)
        try:
            async with aclosing(merged(self._streams)) as items:
                async for index, delta in items:
                    usages[index] = delta.usage or usages[index]
                    running -= delta.finish_reason is not None
                    choice = shim_pb2.Choice(
                        index=index,
                        text=delta.text,
                        token_ids=delta.token_ids,
                        finish_reason=finish_label(delta) or "",
                    )
                    usage = None if running else total_usage(usages, self._n)
                    yield self._reply([choice], usage, delta.kv_transfer_params)
        finally:
            await close_all(self._streams)

    def _reply(
        self, choices: list[Any], usage: Usage | None, params: Mapping[str, Any] | None
    ) -> Any:
        reply = shim_pb2.GenerateReply(
            request_id=self._request_id,
            choices=choices,
            session_id=self._identity.session_id or "",
        )
        if usage is not None:
            reply.usage.prompt_tokens = usage.prompt_tokens
            reply.usage.output_tokens = usage.output_tokens
            reply.usage.local_cached_tokens = usage.local_cached_tokens
            reply.usage.external_cached_tokens = usage.external_cached_tokens
        if params is not None:
            reply.kv_transfer_params.update(params)
        return reply


def _metadata(context: Any) -> dict[str, str]:
    """The call's metadata as headers; the first of several equal names wins."""
    found: dict[str, str] = {}
    for name, value in context.invocation_metadata() or ():
        if isinstance(value, str):
            found.setdefault(name.lower(), value)
    return found


def _prompt(request: Any) -> list[int]:
    if request.WhichOneof("prompt") == "tokens":
        return list(request.tokens.ids)
    return encode_text(request.text, "text")


def sampling(sent: Any, identity: Identity) -> SamplingParams:
    """The engine's parameters of a Sampling message."""

    def given(name: str, default: Any) -> Any:
        return getattr(sent, name) if sent.HasField(name) else default

    return SamplingParams(
        n=sent.n or 1,
        # A float of the wire has 24 bits: 0.1 comes as 0.10000000149.
        temperature=round(given("temperature", 1.0), 6),
        top_p=round(given("top_p", 1.0), 6),
        top_k=given("top_k", 0),
        seed=given("seed", None),
        stop=list(sent.stop) or None,
        stop_token_ids=list(sent.stop_token_ids) or None,
        ignore_eos=sent.ignore_eos,
        max_tokens=given("max_tokens", None),
        min_tokens=sent.min_tokens,
        extra_args=identity.xargs,
    )


def _plain(value: struct_pb2.Struct) -> dict[str, Any]:
    """A Struct as a dict; its numbers are doubles, so whole ones become int again."""
    found: dict[str, Any] = _whole(json_format.MessageToDict(value))
    return found


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _whole(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_whole(one) for one in value]
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        return int(value)
    return value


async def _abort(context: Any, error: Exception) -> None:
    """End the call with a status. Raises grpc's own AbortError."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    status, body = error_body(error)
    code = CODES.get(status, grpc.StatusCode.INTERNAL)
    if isinstance(error, EngineDead):
        code = grpc.StatusCode.UNAVAILABLE
    elif isinstance(error, EngineTimeout):
        code = grpc.StatusCode.DEADLINE_EXCEEDED
    await context.abort(code, body["error"]["message"])
