"""Engines for the proxy's tests: real HTTP servers whose faults a test chooses."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route

from engine_shim.frontend import sse
from engine_shim.pd_proxy import Committed, Proxy, ProxyConfig, build_proxy
from engine_shim.pd_proxy_bodies import PATHS
from engine_shim.pd_proxy_fleet import Affinity, Fleet, Limits, Role
from engine_shim.pd_proxy_start import http_client
from tests.frontend_fakes import served

PIECES = 3


@dataclass
class FakePD:
    """One engine. hold: replies wait while it is set to a cleared event. break_after: pieces of a
    stream before the connection breaks. vllm: it has no info page."""

    name: str
    namespace: str = "aa"
    status: int = 200
    hand_off: bool = True
    vllm: bool = False
    healthy: bool = True
    break_after: int | None = None
    hold: asyncio.Event | None = None
    seen: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    left: int = 0
    open: int = 0
    closed: list[str] = field(default_factory=list)

    def app(self) -> Starlette:
        routes = [Route(path, self.generate, methods=["POST"]) for path in PATHS]
        routes += [Route("/health", self.health), Route("/v1/models", self.models)]
        routes += [Route("/metrics", self.metrics)]
        if not self.vllm:
            routes += [
                Route("/session_kv/info", self.info),
                Route("/close_session", self.close, methods=["POST"]),
            ]
        return Starlette(routes=routes)

    async def health(self, request: Request) -> Response:
        return Response(status_code=200 if self.healthy else 503)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "m", "object": "model"}]})

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse("other_metric 1.0\n")

    async def info(self, request: Request) -> Response:
        return JSONResponse({"namespace": self.namespace})

    async def close(self, request: Request) -> Response:
        self.closed.append((await request.json())["session_id"])
        return JSONResponse({"success": True, "freed_tokens": 16})

    async def generate(self, request: Request) -> Any:
        body = json.loads(await request.body())
        self.seen.append(body)
        self.headers.append(dict(request.headers))
        if self.status != 200:
            error = {"message": f"{self.name} says no", "type": "x", "param": None, "code": "y"}
            return JSONResponse({"error": error}, self.status)
        if body.get("stream"):
            return sse.EventStream(self._events())
        reply = await sse.until_gone(request.receive, self._whole())
        return Response(status_code=499) if reply is None else reply

    @contextlib.asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        self.open += 1
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            self.left += 1
            raise
        finally:
            self.open -= 1

    async def _whole(self) -> Response:
        async with self._running():
            if self.hold is not None:
                await self.hold.wait()
            reply = {
                "id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m",
                "choices": [
                    {
                        "index": 0, "text": self.name, "finish_reason": "stop", "logprobs": None,
                        "message": {"role": "assistant", "content": self.name},
                    }
                ],
            }  # fmt: skip
            if self.hand_off:
                inner = {"tip": "beef", "namespace": self.namespace, "num_tokens": 16}
                reply["kv_transfer_params"] = {"session_kv": inner}
            return JSONResponse(reply)

    async def _events(self) -> Any:
        async with self._running():
            for index in range(PIECES):
                if index == self.break_after:
                    raise ConnectionError("broken on purpose")
                choice = {"index": 0, "text": self.name, "delta": {"content": self.name}}
                yield sse.data({"id": "1", "object": "x", "model": "m", "choices": [choice]})
                if self.hold is not None:
                    await self.hold.wait()
        yield sse.DONE


@dataclass
class FakeStore:
    """See pd_proxy.StorePort."""

    outcome: Committed | Exception = Committed.YES
    hold: asyncio.Event | None = None
    asked: list[tuple[str, str, float]] = field(default_factory=list)
    left: int = 0

    async def wait_committed(self, namespace: str, tip: str, timeout_s: float) -> Committed:
        self.asked.append((namespace, tip, timeout_s))
        try:
            if self.hold is not None:
                await self.hold.wait()
        except asyncio.CancelledError:
            self.left += 1
            raise
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    async def where(self, session_id: str, cache_salt: str | None) -> dict[str, Any] | None:
        return {"home": "node-1", "salt": cache_salt}

    async def aclose(self) -> None:
        pass


@dataclass
class Rig:
    """A proxy before fake engines, all over real HTTP."""

    prefill: list[FakePD]
    decode: list[FakePD]
    urls: dict[str, str]
    url: str = ""
    proxy: Proxy | None = None

    @property
    def live(self) -> Proxy:
        assert self.proxy is not None
        return self.proxy

    def reset(self) -> None:
        """As if nothing had happened yet."""
        for engine in (*self.prefill, *self.decode):
            engine.__init__(engine.name)  # type: ignore[misc]
        for known in self.live.fleet.all:
            known.healthy, known.namespace, known.in_flight = True, None, 0
        for role in Role:
            self.live.fleet.affinity[role] = Affinity(64)


def fakes(prefill: int = 1, decode: int = 2, **fields: Any) -> tuple[list[FakePD], list[FakePD]]:
    return (
        [FakePD(f"P{i}", **fields) for i in range(prefill)],
        [FakePD(f"D{i}", **fields) for i in range(decode)],
    )


@contextlib.contextmanager
def rig(
    engines: tuple[list[FakePD], list[FakePD]],
    config: ProxyConfig | None = None,
    store: FakeStore | None = None,
    limits: Limits | None = None,
) -> Iterator[Rig]:
    """Everything started; ended when the context is left."""
    prefill, decode = engines
    with engine_server((*prefill, *decode)) as urls:
        made = Rig(prefill, decode, urls)
        with restarted(made, config, store, limits) as made.url:
            yield made


@contextlib.contextmanager
def engine_server(engines: Sequence[FakePD]) -> Iterator[dict[str, str]]:
    """All engines behind one socket, each below its name; URLs by name."""
    app = Starlette(routes=[Mount(f"/{engine.name}", engine.app()) for engine in engines])
    with served(app) as url:
        yield {engine.name: f"{url}/{engine.name}" for engine in engines}


@contextlib.contextmanager
def restarted(
    made: Rig,
    config: ProxyConfig | None = None,
    store: FakeStore | None = None,
    limits: Limits | None = None,
) -> Iterator[str]:
    """A fresh proxy before the same engines; its URL."""
    prefill = [made.urls[engine.name] for engine in made.prefill]
    decode = [made.urls[engine.name] for engine in made.decode]
    fleet = Fleet(prefill, decode, limits)
    before = made.proxy
    with served(_Lazy(made, fleet, config, store)) as url:
        yield url
    made.proxy = before or made.proxy


class _Lazy:
    """The proxy's client belongs to the loop that serves: it is made with the first request."""

    def __init__(self, made: Rig, fleet: Fleet, config: Any, store: Any) -> None:
        self._made, self._fleet, self._config, self._store = made, fleet, config, store
        self._app: Starlette | None = None
        self._stack = contextlib.AsyncExitStack()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        assert self._app is not None
        await self._app(scope, receive, send)

    async def _lifespan(self, receive: Any, send: Any) -> None:
        await receive()
        http = await self._stack.enter_async_context(http_client())
        self._made.proxy = Proxy(self._fleet, http, self._config, self._store)
        self._app = build_proxy(self._made.proxy)
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._stack.aclose()
        await send({"type": "lifespan.shutdown.complete"})
