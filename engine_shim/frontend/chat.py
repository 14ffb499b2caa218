"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine_shim.api import Completion, Delta
from engine_shim.errors import InvalidRequest
from engine_shim.frontend import sse
from engine_shim.frontend.bodies import ChatBody, refuse_unsupported
from engine_shim.frontend.chat_template import render
from engine_shim.frontend.plan import (
    Context,
    Plan,
    chat_logprobs,
    finish_label,
    handoff,
    openai_usage,
    total_usage,
    with_xargs,
)
from engine_shim.protocol import Usage


def plan(body: ChatBody, context: Context) -> Plan:
    """Raises InvalidRequest."""
    refuse_unsupported(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    prompt = render(body.messages, body.tools)
    limit = body.max_completion_tokens or body.max_tokens
    alternatives = (body.top_logprobs or 0) if body.logprobs else None
    params = with_xargs(body.sampling(limit, alternatives), context.identity)
    return Plan([prompt], params, ChatShape(body, context), bool(body.stream))


class ChatShape:
    """See plan.Shape."""

    def __init__(self, body: ChatBody, context: Context) -> None:
        self._n = body.n or 1
        options = body.stream_options
        self._include_usage = bool(options and options.include_usage)
        self._each_usage = bool(options and options.continuous_usage_stats)
        self._logprobs = bool(body.logprobs)
        self._id = f"chatcmpl-{context.request_id}"
        self._created, self._model = context.created, context.model

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id, "object": kind, "created": self._created, "model": self._model,
        }  # fmt: skip

    def full(self, results: Sequence[Completion]) -> dict[str, Any]:
        """See plan.Shape."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": result.text, "refusal": None},
                "logprobs": chat_logprobs(result.logprobs) if self._logprobs else None,
                "finish_reason": finish_label(result),
                "stop_reason": result.stop_reason,
            }
            for index, result in enumerate(results)
        ]
        usage = total_usage([result.usage for result in results], self._n)
        return {
            **self._head("chat.completion"),
            "choices": choices,
            "usage": openai_usage(usage),
            "kv_transfer_params": handoff(results),
        }

    def begin(self) -> list[bytes]:
        """The role of each choice, as OpenAI sends it first."""
        return [
            self._frame(index, {"role": "assistant", "content": ""}, None)
            for index in range(self._n)
        ]

    def chunk(self, index: int, delta: Delta) -> list[bytes]:
        """See plan.Shape."""
        if not (delta.text or delta.token_ids or delta.finish_reason is not None):
            return []
        content = {"content": delta.text} if delta.text or delta.finish_reason is None else {}
        return [self._frame(index, content, delta)]

    def _frame(self, index: int, content: dict[str, Any], delta: Delta | None) -> bytes:
        logprobs = None
        if delta is not None and self._logprobs and delta.logprobs:
            logprobs = chat_logprobs(delta.logprobs)
        choice = {
            "index": index,
            "delta": content,
            "logprobs": logprobs,
            "finish_reason": None if delta is None else finish_label(delta),
        }
        if delta is not None and delta.stop_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        frame: dict[str, Any] = {**self._head("chat.completion.chunk"), "choices": [choice]}
        if self._each_usage and delta is not None and delta.usage is not None:
            frame["usage"] = openai_usage(delta.usage)
        elif self._include_usage:
            frame["usage"] = None
        return sse.data(frame)

    def end(self, usages: Sequence[Usage], last: Sequence[Delta]) -> list[bytes]:
        """See plan.Shape."""
        if not self._include_usage:
            return [sse.DONE]
        usage = openai_usage(total_usage(usages, self._n))
        frame = {**self._head("chat.completion.chunk"), "choices": [], "usage": usage}
        return [sse.data(frame), sse.DONE]
