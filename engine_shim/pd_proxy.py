"""The P/D proxy: one OpenAI-compatible address before prefill and decode engines.

A request's prompt goes to a prefill engine with an answer of one token; its reply names the last
block that it stores (the hand-off); the proxy waits until the index has that block, and then hands
the request to a decode engine, which loads the prompt instead of computing it. Whatever of this
fails costs speed only: the decode engine computes what it can't load.

One asyncio loop. Nothing here outlives its request: a client that goes cancels both sides.
"""

from __future__ import annotations

import enum
from typing import Any, Protocol

import httpx
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from connector.clock import Clock, SystemClock
from connector.session import DEFAULT_HEADERS
from engine_shim.errors import InvalidRequest
from engine_shim.frontend.identity import header_text, reply_header
from engine_shim.frontend.metrics import CONTENT_TYPE
from engine_shim.frontend.replies import error_reply, json_reply, read_body
from engine_shim.identity import identify
from engine_shim.pd_proxy_bodies import PARAMS, PATHS, is_batch, mapping_of, parse
from engine_shim.pd_proxy_fleet import Fleet, Role
from engine_shim.pd_proxy_metrics import ProxyMetrics
from engine_shim.pd_proxy_relay import Relay, Turn, Unavailable

CLOSE_TIMEOUT_S = 10.0


class Committed(enum.StrEnum):
    """How the wait for a hand-off's block ended."""

    YES = "yes"
    ABANDONED = "abandoned"  # its save failed: it will never come
    LATE = "late"  # not within the deadline
    UNKNOWN = "unknown"  # the index could not be asked


class StorePort(Protocol):
    """The proxy's view of the session index. Event-loop thread; no method blocks the loop."""

    async def wait_committed(self, namespace: str, tip: str, timeout_s: float) -> Committed:
        """Until the block `tip` (hex) of `namespace` (hex) can be loaded, or `timeout_s`."""

    async def where(self, session_id: str, cache_salt: str | None) -> dict[str, Any] | None:
        """What the index knows of a session, as JSON; None if it knows none."""

    async def aclose(self) -> None:
        """Give the connections back."""


class ProxyConfig(msgspec.Struct, frozen=True):
    """wait_s: for the commit of a hand-off. prefill_timeout_s: for a prefill engine's reply.
    decode_timeout_s: between two pieces of a decode engine's. show_where: answer GET /where, which
    tells whoever asks where a session lives."""

    session_headers: tuple[str, ...] = DEFAULT_HEADERS
    wait_s: float = 2.0
    prefill_timeout_s: float = 120.0
    decode_timeout_s: float = 300.0
    connect_timeout_s: float = 2.0
    requests_max: int = 1024
    show_where: bool = False


class Proxy:
    """What all requests share."""

    def __init__(
        self,
        fleet: Fleet,
        http: httpx.AsyncClient,
        config: ProxyConfig | None = None,
        store: StorePort | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.fleet, self.http, self.store = fleet, http, store
        self.config = config or ProxyConfig()
        self.clock = clock or SystemClock()
        self.metrics = ProxyMetrics(fleet)
        self.running = 0


def build_proxy(proxy: Proxy) -> Starlette:
    """The application. The caller watches health (`fleet.watch`) and closes http and store."""
    pages = _Pages(proxy)
    routes = [Route(path, _relay(proxy, path), methods=["POST"]) for path in PATHS]
    routes += [
        Route("/v1/models", pages.models),
        Route("/health", pages.health),
        Route("/metrics", pages.metrics),
        Route("/close_session", pages.close_session, methods=["POST"]),
    ]
    if proxy.config.show_where:
        routes.append(Route("/where", pages.where))
    return Starlette(routes=routes)


def _relay(proxy: Proxy, path: str) -> Any:
    async def handle(request: Request) -> Any:
        reply: list[tuple[bytes, bytes]] = []
        try:
            if proxy.running >= proxy.config.requests_max:
                raise Unavailable("the proxy has too many requests open; try again")
            body = parse(await read_body(request))
            headers = header_text(request.scope["headers"])
            identity = identify(
                body.get("session_id"), headers, mapping_of(body, "vllm_xargs"),
                mapping_of(body, PARAMS), proxy.config.session_headers,
            )  # fmt: skip
            reply = reply_header(identity.session_id)
        except Unavailable as error:
            proxy.metrics.request(path, "refused")
            return json_reply(error.body, (), 503)
        except InvalidRequest as error:
            proxy.metrics.request(path, "invalid")
            return error_reply(error, reply)
        turn = Turn(
            path=path, body=body, session_id=identity.session_id, headers=headers,
            batch=is_batch(path, body),
        )  # fmt: skip
        return Relay(proxy, turn)

    return handle


class _Pages:
    """What is not relayed."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    async def models(self, request: Request) -> Response:
        """The first engine's that answers: all serve the same model."""
        fleet = self._proxy.fleet
        for engine in [*fleet.engines[Role.DECODE], *fleet.engines[Role.PREFILL]]:
            try:
                reply = await self._proxy.http.get(f"{engine.url}/v1/models")
            except httpx.HTTPError:
                continue
            return Response(reply.content, reply.status_code, media_type="application/json")
        return json_reply(Unavailable("no engine answers").body, (), 503)

    async def health(self, request: Request) -> Response:
        """200 while a decode engine is up: without a prefill engine requests are served, too."""
        fleet = self._proxy.fleet
        good = any(engine.healthy for engine in fleet.engines[Role.DECODE])
        state = {
            engine.name: {"healthy": engine.healthy, "in_flight": engine.in_flight}
            for engine in fleet.all
        }
        return json_reply({"ok": good, "engines": state}, (), 200 if good else 503)

    async def metrics(self, request: Request) -> Response:
        """Prometheus text."""
        text = self._proxy.metrics.render()
        return Response(text, headers={"content-type": CONTENT_TYPE})

    async def where(self, request: Request) -> Response:
        """Where a session is: its engines by affinity, and what the index says."""
        session_id = request.query_params.get("session", "")
        try:
            if not identify(session_id).session_id:
                raise InvalidRequest("the query parameter session is missing", "session")
        except InvalidRequest as error:
            return error_reply(error)
        fleet, store = self._proxy.fleet, self._proxy.store
        salt = request.query_params.get("cache_salt")
        found = {
            "session": session_id,
            "prefill": fleet.affinity[Role.PREFILL].get(session_id),
            "decode": fleet.affinity[Role.DECODE].get(session_id),
            "store": await store.where(session_id, salt) if store is not None else None,
        }
        return json_reply(found, reply_header(session_id))

    async def close_session(self, request: Request) -> Response:
        """Closes the session at every engine that has such a path."""
        try:
            body = parse(await read_body(request) or b"{}")
            headers = header_text(request.scope["headers"])
            names = self._proxy.config.session_headers
            session_id = identify(body.get("session_id"), headers, header_names=names).session_id
            if session_id is None:
                raise InvalidRequest("session_id is missing", "session_id")
        except InvalidRequest as error:
            return error_reply(error)
        freed, closed = 0, []
        for engine in self._proxy.fleet.all:
            reply = await self._close_at(engine.url, {**body, "session_id": session_id})
            if reply is not None:
                freed += int(reply.get("freed_tokens", 0))
                closed.append(engine.name)
        for affinity in self._proxy.fleet.affinity.values():
            affinity.drop(session_id)
        found = {"success": bool(closed), "session_id": session_id, "freed_tokens": freed}
        return json_reply({**found, "engines": closed}, reply_header(session_id))

    async def _close_at(self, url: str, body: dict[str, Any]) -> dict[str, Any] | None:
        try:
            reply = await self._proxy.http.post(
                f"{url}/close_session", json=body, timeout=CLOSE_TIMEOUT_S
            )
            found = reply.json() if reply.status_code == 200 else None
        except (httpx.HTTPError, ValueError):
            return None
        return found if isinstance(found, dict) else None
