"""POST /v1/responses: OpenAI's Responses API for one text answer; nothing is stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine_shim.api import Completion, Delta
from engine_shim.errors import InvalidRequest
from engine_shim.frontend import sse
from engine_shim.frontend.bodies import ResponsesBody, refuse_unsupported
from engine_shim.frontend.chat_template import render
from engine_shim.frontend.plan import Context, Plan, handoff, total_usage, with_xargs
from engine_shim.protocol import FinishReason, Usage


def plan(body: ResponsesBody, context: Context) -> Plan:
    """Raises InvalidRequest."""
    refuse_unsupported(body)
    if (body.n or 1) != 1:
        raise InvalidRequest("a response has one answer; leave n out", param="n")
    messages = _messages(body)
    params = with_xargs(body.sampling(body.max_output_tokens, None), context.identity)
    shape = ResponsesShape(body, context)
    return Plan([render(messages, body.tools, "input")], params, shape, bool(body.stream))


def _messages(body: ResponsesBody) -> list[Mapping[str, Any]]:
    """Input items as chat messages; reasoning items of earlier replies are left out."""
    messages: list[Mapping[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for index, item in enumerate(body.input):
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({"role": item.get("role"), "content": item.get("content")})
        elif kind == "function_call":
            call = {"name": item.get("name"), "arguments": item.get("arguments")}
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        elif kind == "function_call_output":
            messages.append({"role": "tool", "content": item.get("output")})
        elif kind != "reasoning":
            raise InvalidRequest(
                f"input[{index}].type is {kind!r}, which this engine does not serve",
                param=f"input[{index}].type",
            )
    return messages


class ResponsesShape:
    """See plan.Shape. Events are numbered, as OpenAI's are."""

    def __init__(self, body: ResponsesBody, context: Context) -> None:
        self._body, self._context = body, context
        self._number = 0
        self._text: list[str] = []
        self._item = f"msg_{context.request_id}"

    def full(self, results: Sequence[Completion]) -> dict[str, Any]:
        """See plan.Shape."""
        result = results[0]
        return self._response(result.text, result.finish_reason, result.usage, handoff(results))

    def begin(self) -> list[bytes]:
        """See plan.Shape."""
        response = self._response(None, None, None, None)
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
            self._event("response.output_item.added", output_index=0, item=self._message(None)),
            self._part_event("response.content_part.added", part=_part("")),
        ]

    def chunk(self, index: int, delta: Delta) -> list[bytes]:
        """See plan.Shape."""
        if not delta.text:
            return []
        self._text.append(delta.text)
        return [self._part_event("response.output_text.delta", delta=delta.text, logprobs=[])]

    def end(self, usages: Sequence[Usage], last: Sequence[Delta]) -> list[bytes]:
        """See plan.Shape."""
        text = "".join(self._text)
        reason = last[0].finish_reason
        response = self._response(text, reason, total_usage(usages, 1), last[0].kv_transfer_params)
        return [
            self._part_event("response.output_text.done", text=text, logprobs=[]),
            self._part_event("response.content_part.done", part=_part(text)),
            self._event("response.output_item.done", output_index=0, item=self._message(text)),
            self._event(f"response.{response['status']}", response=response),
        ]

    def _event(self, kind: str, **fields: Any) -> bytes:
        value = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return sse.event(kind, value)

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._item, output_index=0, content_index=0, **fields)

    def _message(self, text: str | None) -> dict[str, Any]:
        return {
            "type": "message",
            "id": self._item,
            "role": "assistant",
            "status": "in_progress" if text is None else "completed",
            "content": [] if text is None else [_part(text)],
        }

    def _response(
        self,
        text: str | None,
        reason: FinishReason | None,
        usage: Usage | None,
        params: dict[str, Any] | None,
    ) -> dict[str, Any]:
        cut = reason is FinishReason.LENGTH
        status = "in_progress" if text is None else "incomplete" if cut else "completed"
        body = self._body
        return {
            "id": f"resp_{self._context.request_id}",
            "object": "response",
            "created_at": self._context.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._context.model,
            "output": [] if text is None else [self._message(text)],
            "parallel_tool_calls": False,
            "temperature": body.temperature,
            "tool_choice": "none" if not body.tools else body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": body.top_p,
            "usage": None if usage is None else _usage(usage),
            "kv_transfer_params": params,
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "local_cached_tokens": usage.local_cached_tokens,
            "external_cached_tokens": usage.external_cached_tokens,
        },
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
    }
