"""Starting the proxy: waits for the engines, refuses those that can't share blocks, then serves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import httpx
import msgspec
import uvicorn

from connector.clock import Clock, SystemClock
from connector.errors import ConfigError
from engine_shim.frontend.server import DRAIN_S, KEEP_ALIVE_S, Server, address_of, bind, run_until
from engine_shim.pd_proxy import Proxy, ProxyConfig, StorePort, build_proxy
from engine_shim.pd_proxy_bodies import HAND_OFF, PARAMS
from engine_shim.pd_proxy_fleet import Engine, Fleet, Limits

log = logging.getLogger(__name__)

HEALTH_INTERVAL_S = 2.0
START_TIMEOUT_S = 120.0
ASK_TIMEOUT_S = 30.0
LOOK_AGAIN_S = 0.2
CONNECTIONS_MAX = 2048
_IN_METRICS = re.compile(r'session_kv_info\{[^}]*namespace="([0-9a-f]+)"')


class StartOptions(msgspec.Struct, frozen=True):
    """prefill, decode: base URLs. start_timeout_s: for all engines to be up."""

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8100
    log_level: str = "warning"
    start_timeout_s: float = START_TIMEOUT_S
    config: ProxyConfig = ProxyConfig()
    limits: Limits = Limits()


def check_urls(prefill: Sequence[str], decode: Sequence[str]) -> None:
    """Raises ConfigError."""
    for key, urls in (("prefill", prefill), ("decode", decode)):
        if not urls:
            raise ConfigError(key, urls, "at least one URL")
        for url in urls:
            parsed = httpx.URL(url)
            if parsed.scheme not in ("http", "https") or not parsed.host:
                raise ConfigError(key, url, "a URL such as http://127.0.0.1:8000")
    if len(set(decode)) != len(decode) or len(set(prefill)) != len(prefill):
        raise ConfigError("decode", decode, "each engine once")


@contextlib.asynccontextmanager
async def http_client() -> AsyncIterator[httpx.AsyncClient]:
    """The proxy's client: no proxies of the environment, no compression (bytes pass through)."""
    limits = httpx.Limits(max_connections=CONNECTIONS_MAX, max_keepalive_connections=256)
    headers = {"accept-encoding": "identity"}
    async with httpx.AsyncClient(limits=limits, headers=headers, trust_env=False) as client:
        yield client


async def wait_up(
    fleet: Fleet, http: httpx.AsyncClient, timeout_s: float, clock: Clock | None = None
) -> None:
    """Until every engine answers. Raises ConfigError, naming those that don't, at the deadline."""
    clock = clock or SystemClock()
    end = clock.now() + timeout_s
    while True:
        await fleet.check_health(http)
        down = [engine.url for engine in fleet.all if not engine.healthy]
        if not down:
            return
        if clock.now() >= end:
            raise ConfigError(
                "engines", down, f"engines that answer /health within {timeout_s:g} s"
            )
        await asyncio.sleep(LOOK_AGAIN_S)


async def check_namespaces(fleet: Fleet, http: httpx.AsyncClient) -> None:
    """Learn each engine's namespace. Raises ConfigError if two differ, naming all."""
    for engine in fleet.all:
        engine.namespace = await namespace_of(engine, http)
        if engine.namespace is None:
            log.warning("%s (%s) does not tell its namespace", engine.name, engine.url)
    known = {engine.url: engine.namespace for engine in fleet.all if engine.namespace}
    if len(set(known.values())) > 1:
        raise ConfigError(
            "engines", known, "engines of one namespace",
            "give all the same model, dtype, block size, tensor-parallel size and tenant",
        )  # fmt: skip


async def namespace_of(engine: Engine, http: httpx.AsyncClient) -> str | None:
    """An engine's namespace (hex): the shim's info page, else a metric, else the hand-off of a
    prompt of one block; None if it tells in none of these ways."""
    info = await _get_json(http, f"{engine.url}/session_kv/info")
    if info is not None:
        return str(info.get("namespace") or "") or None
    with contextlib.suppress(httpx.HTTPError):
        text = (await http.get(f"{engine.url}/metrics", timeout=ASK_TIMEOUT_S)).text
        if found := _IN_METRICS.search(text):
            return found[1]
    return await _probe(engine, http)


async def _probe(engine: Engine, http: httpx.AsyncClient) -> str | None:
    models = await _get_json(http, f"{engine.url}/v1/models")
    cards = (models or {}).get("data") or []
    if not cards:
        return None
    body = {
        "model": cards[0]["id"], "prompt": "namespace probe " * 32, "max_tokens": 1,
        PARAMS: {HAND_OFF: {"probe": True}},
    }  # fmt: skip
    try:
        reply = await http.post(
            f"{engine.url}/v1/completions", json=body, timeout=ASK_TIMEOUT_S
        )
        params = reply.json().get(PARAMS)
    except (httpx.HTTPError, ValueError, AttributeError):
        return None
    inner = params.get(HAND_OFF) if isinstance(params, Mapping) else None
    return str(inner.get("namespace") or "") or None if isinstance(inner, Mapping) else None


async def _get_json(http: httpx.AsyncClient, url: str) -> dict[str, Any] | None:
    try:
        reply = await http.get(url, timeout=ASK_TIMEOUT_S)
        found = reply.json() if reply.status_code == 200 else None
    except (httpx.HTTPError, ValueError):
        return None
    return found if isinstance(found, dict) else None


async def serve_proxy(
    options: StartOptions, say: Callable[[str], None], store: StorePort | None = None
) -> int:
    """Run until SIGTERM or SIGINT; the exit code. Raises ConfigError.

    store: closed at the end; None: no waiting for commits here, the decode engines do it.
    """
    check_urls(options.prefill, options.decode)
    fleet = Fleet(options.prefill, options.decode, options.limits)
    async with contextlib.AsyncExitStack() as stack:
        if store is not None:
            stack.push_async_callback(store.aclose)
        listener = stack.enter_context(bind(options.host, options.port))
        http = await stack.enter_async_context(http_client())
        await wait_up(fleet, http, options.start_timeout_s)
        await check_namespaces(fleet, http)
        proxy = Proxy(fleet, http, options.config, store)
        watch = asyncio.create_task(fleet.watch(http, HEALTH_INTERVAL_S))
        stack.callback(watch.cancel)
        server = Server(
            uvicorn.Config(
                build_proxy(proxy),
                log_level=options.log_level,
                access_log=False,
                lifespan="off",
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=DRAIN_S,
            )
        )
        await run_until(server, listener, lambda: say(address_of(listener)))
    return 0
