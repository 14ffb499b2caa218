"""Runs a plan's sequences and hands what comes to its shape."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

from engine_shim.api import Completion, Delta, join
from engine_shim.errors import EngineDead, EngineTimeout, InvalidRequest, RequestFailed, ShimError
from engine_shim.frontend import sse
from engine_shim.frontend.merge import merged
from engine_shim.frontend.plan import Plan
from engine_shim.protocol import Usage

log = logging.getLogger(__name__)

# (status, OpenAI's error type) of what is not the client's fault.
SERVER_FAULTS: dict[type[ShimError], tuple[int, str]] = {
    EngineDead: (503, "service_unavailable"),
    EngineTimeout: (504, "timeout"),
    RequestFailed: (500, "internal_error"),
}


def error_body(error: Exception) -> tuple[int, dict[str, Any]]:
    """HTTP status and OpenAI-shaped body for whatever a request ended with."""
    if isinstance(error, InvalidRequest):
        return error.status, dict(error.as_openai())
    status, kind = SERVER_FAULTS.get(type(error), (500, "internal_error"))  # type: ignore[arg-type]
    if not isinstance(error, ShimError):
        log.error("a request failed unexpectedly", exc_info=error)
        error = RequestFailed("internal error; the server's log has more")
    body = {"message": str(error), "type": kind, "param": None, "code": kind}
    return status, {"error": body}


async def collect(plan: Plan, streams: Sequence[AsyncIterator[Delta]]) -> Any:
    """The reply's body, once all sequences have ended. Raises what a sequence raised."""
    deltas: list[list[Delta]] = [[] for _ in streams]
    async with aclosing(merged(streams)) as items:
        async for index, delta in items:
            deltas[index].append(delta)
    results = [join(one) for one in deltas]
    _done(plan, results)
    return plan.shape.full(results)


async def frames(
    plan: Plan, streams: Sequence[AsyncIterator[Delta]]
) -> AsyncGenerator[bytes, None]:
    """The reply's events. An error after the first becomes an event, then the stream ends."""
    usages: list[Usage] = [Usage(0)] * len(streams)
    deltas: list[list[Delta]] = [[] for _ in streams]
    try:
        for frame in plan.shape.begin():
            yield frame
        async with aclosing(merged(streams)) as items:
            async for index, delta in items:
                deltas[index] = [*deltas[index], delta] if plan.on_done else [delta]
                usages[index] = delta.usage or usages[index]
                for frame in plan.shape.chunk(index, delta):
                    yield frame
        _done(plan, [join(one) for one in deltas])
        for frame in plan.shape.end(usages, [one[-1] for one in deltas]):
            yield frame
    except Exception as error:
        yield sse.data(error_body(error)[1])
        yield sse.DONE


def _done(plan: Plan, results: Sequence[Completion]) -> None:
    if plan.on_done is not None:
        plan.on_done(results)
