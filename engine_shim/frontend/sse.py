"""Server-sent events, and a reply that ends as soon as its client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.types import Message, Receive, Scope, Send

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


def data(value: object) -> bytes:
    """One unnamed event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def event(name: str, value: object) -> bytes:
    """One named event."""
    return b"event: " + name.encode() + b"\n" + data(value)


class EventStream:
    """An ASGI reply of events.

    The generator is closed, and then `on_end` called, whatever happens: at its end, when the client
    goes, when the server stops, also before the first event (when closing it would do nothing).
    """

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        headers: Sequence[tuple[bytes, bytes]] = (),
        on_end: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._frames, self._on_end = frames, on_end
        self._headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            *headers,
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_gone(receive, self._send_all(send))
        finally:
            await self._frames.aclose()
            if self._on_end is not None:
                await self._on_end()

    async def _send_all(self, send: Callable[[Message], Awaitable[None]]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        async for frame in self._frames:
            await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def until_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, which is cancelled, and None returned, once the client has gone.

    The request's body must have been read.
    """
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        return None
    finally:
        await end_tasks(task, watch)


async def end_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancel and wait; results and errors are dropped."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
