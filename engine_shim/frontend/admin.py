"""Paths that are no way in for prompts: models, health, metrics, caches, sessions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from connector.errors import SessionIdError
from connector.session import check_session_id
from engine_shim.errors import InvalidRequest
from engine_shim.frontend.bodies import CloseSessionBody, OpenSessionBody, decode_body
from engine_shim.frontend.identity import header_text, reply_header
from engine_shim.frontend.metrics import CONTENT_TYPE, FrontendMetrics
from engine_shim.frontend.replies import error_reply, json_reply, read_body
from engine_shim.frontend.state import Frontend, connector_stats
from engine_shim.identity import identify


def routes(frontend: Frontend, metrics: FrontendMetrics) -> list[Route]:
    """All administration routes."""
    async def models(request: Request) -> Response:
        return json_reply({"object": "list", "data": [model_card(frontend)]})

    async def model(request: Request) -> Response:
        frontend.check_model(request.path_params["name"])
        return json_reply(model_card(frontend))

    async def health(request: Request) -> Response:
        return Response(status_code=503 if frontend.engine.errored else 200)

    async def metric(request: Request) -> Response:
        text = metrics.render(await frontend.engine.stats())
        return Response(text, headers={"content-type": CONTENT_TYPE})

    async def info(request: Request) -> Response:
        return json_reply(engine_info(frontend, await frontend.engine.stats()))

    async def reset(request: Request) -> Response:
        external = request.query_params.get("reset_external", "").lower() in ("1", "true")
        done = await frontend.engine.reset_prefix_cache(external)
        return json_reply({"success": done})

    async def open_session(request: Request) -> Response:
        return await _open_session(frontend, request)

    async def close_session(request: Request) -> Response:
        return await _close_session(frontend, request)

    def guarded(handle: Callable[[Request], Awaitable[Response]]) -> Any:
        async def run(request: Request) -> Response:
            try:
                return await handle(request)
            except Exception as error:
                return error_reply(error)

        return run

    return [
        Route("/v1/models", guarded(models)),
        Route("/v1/models/{name:path}", guarded(model)),
        Route("/health", guarded(health)),
        Route("/ping", guarded(health)),
        Route("/metrics", guarded(metric)),
        Route("/session_kv/info", guarded(info)),
        Route("/reset_prefix_cache", guarded(reset), methods=["POST"]),
        Route("/open_session", guarded(open_session), methods=["POST"]),
        Route("/close_session", guarded(close_session), methods=["POST"]),
    ]


def model_card(frontend: Frontend) -> dict[str, Any]:
    """The served model as OpenAI lists it, with vLLM's `max_model_len`."""
    name = frontend.config.served_model_name
    return {
        "id": name,
        "object": "model",
        "created": frontend.started,
        "owned_by": "session-kv",
        "root": name,
        "parent": None,
        "max_model_len": frontend.engine.info.max_model_len,
    }


def engine_info(frontend: Frontend, stats: Any) -> dict[str, Any]:
    """What a proxy or an operator asks of an engine. namespace: hex; empty without a connector."""
    engine = frontend.engine.info
    connector = connector_stats(stats)
    return {
        "model": frontend.config.served_model_name,
        "engine": engine.engine_version,
        "namespace": str(connector.get("namespace", "")),
        "connector": engine.connector,
        "session_cache": engine.session_cache,
        "block_size": engine.block_size,
        "num_blocks": engine.num_blocks,
        "max_model_len": engine.max_model_len,
        "tp_size": engine.tp_size,
        "device": engine.device,
        "bytes_per_token": frontend.config.bytes_per_token,
    }


async def _open_session(frontend: Frontend, request: Request) -> Response:
    """SGLang's: the reply is the session's id, as a JSON string."""
    body = decode_body(await read_body(request) or b"{}", OpenSessionBody)
    if body.session_id is not None:
        try:
            check_session_id(body.session_id)
        except SessionIdError as error:
            raise InvalidRequest(str(error), param="session_id") from error
        if not body.session_id:
            raise InvalidRequest("session_id is empty; leave it out to get one", "session_id")
    session_id = await frontend.engine.open_session(body.session_id, body.capacity_of_str_len)
    try:
        frontend.legacy.open(session_id, body.capacity_of_str_len)
    except InvalidRequest:
        await frontend.engine.close_session(session_id)
        raise
    return json_reply(session_id, reply_header(session_id))


async def _close_session(frontend: Frontend, request: Request) -> Response:
    """Ends a session here and in the store; says what that freed. Unknown ids are no error: the
    store may know a session that this engine never served."""
    body = decode_body(await read_body(request) or b"{}", CloseSessionBody)
    headers = header_text(request.scope["headers"])
    identity = identify(body.session_id, headers, header_names=frontend.config.session_headers)
    session_id = identity.session_id
    if session_id is None:
        raise InvalidRequest("session_id is missing; name the session to close", "session_id")
    frontend.legacy.close(session_id)
    result = await frontend.engine.close_session(session_id, body.cache_salt)
    value = {
        "success": True,
        "session_id": session_id,
        "existed": result.existed,
        "freed_tokens": result.freed_tokens,
        "pending": result.pending,
        "legacy": result.legacy,
    }
    return json_reply(value, reply_header(session_id))
