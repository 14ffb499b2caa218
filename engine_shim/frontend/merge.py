"""Several sequences as one stream of deltas, with nothing left running whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import TypeVar

T = TypeVar("T")

WAITING_MAX = 64
"""Deltas of one request that wait for a slow client; then its sequences wait, too."""


async def close_all(streams: Sequence[AsyncIterator[T]]) -> None:
    """End every stream; an engine aborts the request of a stream that had not ended."""
    for stream in streams:
        aclose = getattr(stream, "aclose", None)
        if aclose is not None:
            with contextlib.suppress(Exception):
                await aclose()


async def merged(streams: Sequence[AsyncIterator[T]]) -> AsyncGenerator[tuple[int, T], None]:
    """(index of the stream, item) in order of arrival, until all have ended.

    The first stream that raises ends all; its error is raised here. Closing or cancelling this
    generator closes all streams.
    """
    queue: asyncio.Queue[tuple[int, T | None, BaseException | None]] = asyncio.Queue(WAITING_MAX)
    tasks = [asyncio.create_task(_pump(i, stream, queue)) for i, stream in enumerate(streams)]
    running = len(tasks)
    try:
        while running:
            index, item, error = await queue.get()
            if error is not None:
                raise error
            if item is None:
                running -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await close_all(streams)


async def _pump(
    index: int,
    stream: AsyncIterator[T],
    queue: asyncio.Queue[tuple[int, T | None, BaseException | None]],
) -> None:
    try:
        async for item in stream:
            await queue.put((index, item, None))
    except Exception as error:
        await queue.put((index, None, error))
    else:
        await queue.put((index, None, None))
