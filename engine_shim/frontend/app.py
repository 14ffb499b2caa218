"""The HTTP front end: an ASGI application over one engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from engine_shim.errors import InvalidRequest
from engine_shim.frontend import admin
from engine_shim.frontend.bodies import decode_body
from engine_shim.frontend.entrances import HTTP_ENTRANCES, HttpEntrance
from engine_shim.frontend.identity import header_text, reply_header
from engine_shim.frontend.merge import close_all
from engine_shim.frontend.metrics import FrontendMetrics
from engine_shim.frontend.plan import Plan, options_of
from engine_shim.frontend.replies import Headers, error_reply, json_reply, read_body
from engine_shim.frontend.run import collect, frames
from engine_shim.frontend.sse import EventStream, until_gone
from engine_shim.frontend.state import REQUEST_ID_HEADER, Frontend
from engine_shim.identity import identify

CLIENT_GONE = 499


def build_app(frontend: Frontend, metrics: FrontendMetrics | None = None) -> Starlette:
    """All HTTP entrances and the administration paths. The engine stays the caller's to stop."""
    counted = metrics or FrontendMetrics()
    routes = [
        Route(row.path, _entrance(row, frontend, counted), methods=["POST"])
        for row in HTTP_ENTRANCES
    ]
    routes += admin.routes(frontend, counted)
    return Starlette(
        routes=routes,
        exception_handlers={HTTPException: _http_error, Exception: _unexpected},
    )


Handler = Callable[[Request], Awaitable[Any]]


def _entrance(row: HttpEntrance, frontend: Frontend, metrics: FrontendMetrics) -> Handler:
    async def handle(request: Request) -> Any:
        reply = await serve(row, frontend, request)
        metrics.count(row.name, reply.status_code if isinstance(reply, Response) else 200)
        return reply

    return handle


async def serve(row: HttpEntrance, frontend: Frontend, request: Request) -> Any:
    """One request at one entrance, from bytes to reply."""
    headers = header_text(request.scope["headers"])
    reply: list[tuple[bytes, bytes]] = []
    try:
        body = decode_body(await read_body(request), row.body)
        identity = identify(
            row.session_of(body), headers, body.vllm_xargs, body.kv_transfer_params,
            frontend.config.session_headers,
        )  # fmt: skip
        reply += reply_header(identity.session_id)
        frontend.check_model(body.model)
        context = frontend.context(identity, headers.get(REQUEST_ID_HEADER) or body.request_id)
        reply.append((REQUEST_ID_HEADER.encode(), context.request_id.encode()))
        plan = row.plan(body, context)
        return await _run(frontend, plan, options_of(body, context), request, reply)
    except ClientDisconnect:
        return Response(status_code=CLIENT_GONE)
    except Exception as error:
        return error_reply(error, reply)


async def _run(
    frontend: Frontend, plan: Plan, options: Any, request: Request, reply: Headers
) -> Any:
    streams = await frontend.open_streams(plan, options)
    if plan.stream:
        return EventStream(frames(plan, streams), reply, lambda: close_all(streams))
    try:
        value = await until_gone(request.receive, collect(plan, streams))
    finally:
        await close_all(streams)
    return Response(status_code=CLIENT_GONE) if value is None else json_reply(value, reply)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
    what = f"{error.detail}: {request.method} {request.url.path}"
    shaped = InvalidRequest(what, code=code, status=error.status_code)
    return error_reply(shaped, [(k.encode(), v.encode()) for k, v in (error.headers or {}).items()])


async def _unexpected(request: Request, error: Exception) -> Response:
    return error_reply(error)
