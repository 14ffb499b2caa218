"""One request through the proxy: prefill, wait for the commit, decode, and the reply's bytes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
from starlette.types import Receive, Scope, Send

from engine_shim.frontend import sse
from engine_shim.frontend.identity import reply_header
from engine_shim.pd_proxy_bodies import (
    HAND_OFF,
    decode_body,
    forwarded_headers,
    hand_off_of,
    prefill_body,
)
from engine_shim.pd_proxy_fleet import Engine, Role

if TYPE_CHECKING:
    from engine_shim.pd_proxy import Proxy

log = logging.getLogger(__name__)

TRIES = 2
REPLY_BYTES_MAX = 64 << 20
NOT_DOWN = (httpx.ReadTimeout, httpx.PoolTimeout, httpx.LocalProtocolError)
ENGINE_HEADERS = {Role.PREFILL: b"x-session-kv-prefill", Role.DECODE: b"x-session-kv-decode"}


class Turn(msgspec.Struct, frozen=True):
    """One request. batch: it has several prompts."""

    path: str
    body: dict[str, Any]
    session_id: str | None
    headers: Mapping[str, str]
    batch: bool


class Unavailable(Exception):
    """No engine could serve the request."""

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI-shaped."""
        return {
            "error": {
                "message": str(self),
                "type": "service_unavailable",
                "param": None,
                "code": "service_unavailable",
            }
        }


class Refused(Exception):
    """An engine refused the request itself: its reply is the client's."""

    def __init__(self, reply: httpx.Response) -> None:
        super().__init__(f"status {reply.status_code}")
        self.reply = reply


class Relay:
    """The reply to one request, as an ASGI application."""

    def __init__(self, proxy: Proxy, turn: Turn) -> None:
        self._proxy, self._turn = proxy, turn
        self._prefilled_by = ""
        self._begun = False
        self._outcome = "cancelled"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._proxy.running += 1
        try:
            await sse.until_gone(receive, self._run(send))
        finally:
            self._proxy.running -= 1
            self._proxy.metrics.request(self._turn.path, self._outcome)

    async def _run(self, send: Send) -> None:
        try:
            hand_off = await self._prefill()
            if hand_off is not None:
                await self._wait(hand_off)
            await self._decode(hand_off, send)
        except Refused as refused:
            self._outcome = "invalid"
            await self._send_whole(send, refused.reply.status_code, refused.reply.content)
        except Unavailable as error:
            self._outcome = "broken" if self._begun else "no_engine"
            await self._send_error(send, error)
        except Exception:
            log.exception("a request failed unexpectedly")
            self._outcome = "failed"
            await self._send_error(send, Unavailable("internal error; the proxy's log has more"))

    # ---- prefill ------------------------------------------------------------------------------

    async def _prefill(self) -> dict[str, Any] | None:
        """The hand-off; None if there is none to be had, and decode does it all. Raises Refused."""
        turn = self._turn
        body = prefill_body(turn.path, turn.body, turn.session_id)
        tried: set[str] = set()
        while len(tried) < TRIES:
            engine = self._choose(Role.PREFILL, tried)
            if engine is None:
                return None
            tried.add(engine.name)
            reply = await self._ask(engine, body)
            if reply is not None:
                self._prefilled_by = engine.name
                return self._usable(engine, reply)
        return None

    async def _ask(self, engine: Engine, body: dict[str, Any]) -> httpx.Response | None:
        """A prefill engine's good reply, or None if another should be asked. Raises Refused."""
        began = self._proxy.clock.now()
        timeout = httpx.Timeout(
            self._proxy.config.prefill_timeout_s, connect=self._proxy.config.connect_timeout_s
        )
        with self._using(engine):
            try:
                reply = await self._proxy.http.post(
                    engine.url + self._turn.path,
                    content=msgspec.json.encode(body),
                    headers=self._headers(),
                    timeout=timeout,
                )
            except httpx.HTTPError as error:
                self._failed(engine, error)
                return None
        self._proxy.metrics.took("prefill", self._proxy.clock.now() - began)
        return self._judged(engine, reply)

    def _judged(self, engine: Engine, reply: httpx.Response) -> httpx.Response | None:
        """The reply if it is good, None after a fault of the engine. Raises Refused."""
        if reply.status_code < 400:
            self._proxy.metrics.call(engine.name, "ok")
            return reply
        if reply.status_code < 500 and reply.status_code not in (408, 429):
            self._proxy.metrics.call(engine.name, "client_error")
            raise Refused(reply)
        self._proxy.metrics.call(engine.name, "server_error")
        return None

    def _usable(self, engine: Engine, reply: httpx.Response) -> dict[str, Any] | None:
        try:
            hand_off = hand_off_of(reply.json())
        except ValueError:
            hand_off = None
        if hand_off is None or self._turn.batch:
            return None
        engine.namespace = str(hand_off[HAND_OFF].get("namespace") or "") or engine.namespace
        return hand_off

    async def _wait(self, hand_off: Mapping[str, Any]) -> None:
        """Until the index has the hand-off's block. However that ends, the decode engine is asked
        next: it waits on its own, and then computes what is missing."""
        store = self._proxy.store
        if store is None:
            return
        inner = hand_off[HAND_OFF]
        clock = self._proxy.clock
        began = clock.now()
        namespace = str(inner.get("namespace", ""))
        wait_s = self._proxy.config.wait_s
        try:
            outcome = str(await store.wait_committed(namespace, inner["tip"], wait_s))
        except Exception:
            log.warning("the wait for a hand-off failed; decode goes on alone", exc_info=True)
            outcome = "unknown"
        self._proxy.metrics.wait(outcome, clock.now() - began)

    # ---- decode -------------------------------------------------------------------------------

    async def _decode(self, hand_off: dict[str, Any] | None, send: Send) -> None:
        """Raises Unavailable, Refused."""
        turn = self._turn
        tried: set[str] = set()
        while len(tried) < TRIES:
            engine = self._choose(Role.DECODE, tried)
            if engine is None:
                break
            tried.add(engine.name)
            given = hand_off if self._same_namespace(engine, hand_off) else None
            body = decode_body(turn.body, turn.session_id, given)
            if await self._stream(engine, body, send):
                return
        raise Unavailable("no decode engine could serve the request; try again")

    def _same_namespace(self, engine: Engine, hand_off: Mapping[str, Any] | None) -> bool:
        """False if the decode engine is known to share nothing with the one that prefilled."""
        if hand_off is None or engine.namespace is None:
            return True
        return bool(hand_off[HAND_OFF].get("namespace") == engine.namespace)

    async def _stream(self, engine: Engine, body: dict[str, Any], send: Send) -> bool:
        """Pass the engine's reply on. False if it failed before its first byte, so that another
        may be asked. Raises Unavailable if it broke later, and Refused."""
        config, began = self._proxy.config, self._proxy.clock.now()
        request = self._proxy.http.build_request(
            "POST",
            engine.url + self._turn.path,
            content=msgspec.json.encode(body),
            headers=self._headers(),
            timeout=httpx.Timeout(config.decode_timeout_s, connect=config.connect_timeout_s),
        )
        with self._using(engine):
            try:
                reply = await self._proxy.http.send(request, stream=True)
            except httpx.HTTPError as error:
                self._failed(engine, error)
                return False
            async with contextlib.aclosing(_Closing(reply)):
                self._proxy.metrics.took("decode_first", self._proxy.clock.now() - began)
                return await self._pass_on(engine, reply, send)

    async def _pass_on(self, engine: Engine, reply: httpx.Response, send: Send) -> bool:
        try:
            if reply.status_code >= 400:
                await reply.aread()  # an error's body is what `_judged` may hand to the client
                return self._judged(engine, reply) is not None
            if "text/event-stream" not in reply.headers.get("content-type", ""):
                content = await _read_all(reply)
                self._served(engine)
                await self._send_whole(send, reply.status_code, content, engine)
                return True
            await self._send_start(send, reply.status_code, reply, engine)
            async for piece in reply.aiter_raw():
                await _send_body(send, piece, more=True)
        except httpx.HTTPError as error:
            self._failed(engine, error)
            if self._begun:
                raise Unavailable("the decode engine was lost in mid-reply") from error
            return False
        self._served(engine)
        await _send_body(send, b"", more=False)
        return True

    # ---- shared -------------------------------------------------------------------------------

    def _choose(self, role: Role, tried: set[str]) -> Engine | None:
        fleet, session_id = self._proxy.fleet, self._turn.session_id
        engine = fleet.choose(role, session_id, tried)
        if engine is not None:
            before = fleet.affinity[role].get(session_id)
            self._proxy.metrics.placed(role, before, engine.name)
            fleet.affinity[role].put(session_id, engine.name)
        return engine

    @contextlib.contextmanager
    def _using(self, engine: Engine) -> Any:
        engine.in_flight += 1
        try:
            yield
        finally:
            engine.in_flight -= 1

    def _failed(self, engine: Engine, error: httpx.HTTPError) -> None:
        """Down until it answers a health check, unless it is only slow or the fault is ours."""
        self._proxy.metrics.call(engine.name, "unreachable")
        if not isinstance(error, NOT_DOWN):
            engine.healthy = False
        log.warning("%s: %s %s", engine.name, type(error).__name__, error)

    def _served(self, engine: Engine) -> None:
        self._proxy.metrics.call(engine.name, "ok")
        self._outcome = "ok"

    def _headers(self) -> list[tuple[bytes, bytes]]:
        return forwarded_headers(self._turn.headers, reply_header(self._turn.session_id))

    def _reply_headers(self, kind: str, engine: Engine | None) -> list[tuple[bytes, bytes]]:
        found = [(b"content-type", kind.encode()), *reply_header(self._turn.session_id)]
        if self._prefilled_by:
            found.append((ENGINE_HEADERS[Role.PREFILL], self._prefilled_by.encode()))
        if engine is not None:
            found.append((ENGINE_HEADERS[Role.DECODE], engine.name.encode()))
        return found

    async def _send_start(
        self, send: Send, status: int, reply: httpx.Response, engine: Engine
    ) -> None:
        headers = self._reply_headers(reply.headers.get("content-type", ""), engine)
        self._begun = True
        await send({"type": "http.response.start", "status": status, "headers": headers})

    async def _send_whole(
        self, send: Send, status: int, content: bytes, engine: Engine | None = None
    ) -> None:
        headers = self._reply_headers("application/json", engine)
        self._begun = True
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await _send_body(send, content, more=False)

    async def _send_error(self, send: Send, error: Unavailable) -> None:
        """As a status, or, in mid-stream, as the last events."""
        if not self._begun:
            await self._send_whole(send, 503, msgspec.json.encode(error.body))
            return
        await _send_body(send, sse.data(error.body) + sse.DONE, more=False)


class _Closing:
    """`aclosing` over httpx's reply, which is closed also when the read was cancelled."""

    def __init__(self, reply: httpx.Response) -> None:
        self._reply = reply

    async def aclose(self) -> None:
        await self._reply.aclose()


async def _read_all(reply: httpx.Response) -> bytes:
    """A whole reply of bounded size. Raises Unavailable above the limit."""
    parts, size = [], 0
    async for piece in reply.aiter_raw():
        size += len(piece)
        if size > REPLY_BYTES_MAX:
            raise Unavailable(f"the reply is over {REPLY_BYTES_MAX} bytes; ask for a stream")
        parts.append(piece)
    return b"".join(parts)


async def _send_body(send: Send, body: bytes, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


