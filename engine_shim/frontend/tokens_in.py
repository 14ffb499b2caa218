"""POST /inference/v1/generate: tokens in, tokens out, as in vLLM 0.32.

vLLM reads the session id of this entrance from the header only; here every channel counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from engine_shim.api import Completion, Delta
from engine_shim.errors import InvalidRequest
from engine_shim.frontend import sse
from engine_shim.frontend.bodies import TokensBody, convert_field, refuse_unsupported
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
from engine_shim.protocol import SamplingParams, TokenLogprobs, Usage

MODES = ("tokens", "text")


def plan(body: TokensBody, context: Context) -> Plan:
    """Raises InvalidRequest."""
    refuse_unsupported(body)
    if body.output_mode not in MODES:
        raise InvalidRequest(
            f"output_mode is {body.output_mode!r}: expected one of {', '.join(MODES)}",
            param="output_mode",
        )
    params = convert_field(body.sampling_params, SamplingParams, "sampling_params")
    if "max_tokens" not in body.sampling_params:
        # The class's default of 16 is for those who build it by hand; here nothing was asked.
        params = msgspec.structs.replace(params, max_tokens=None)
    params = with_xargs(params, context.identity)
    return Plan([body.token_ids], params, TokensShape(body, context, params), bool(body.stream))


class TokensShape:
    """See plan.Shape."""

    def __init__(self, body: TokensBody, context: Context, params: SamplingParams) -> None:
        self._n = params.n
        self._mode = body.output_mode
        self._logprobs = params.logprobs is not None
        options = body.stream_options
        self._include_usage = bool(options and options.include_usage)
        self._each_usage = bool(options and options.continuous_usage_stats)
        self._prompt = body.token_ids if body.return_token_ids else None
        self._id = f"generate-tokens-{context.request_id}"
        self._created, self._model = context.created, context.model

    def full(self, results: Sequence[Completion]) -> dict[str, Any]:
        """See plan.Shape."""
        usage = total_usage([result.usage for result in results], self._n)
        return {
            "request_id": self._id,
            "model": self._model,
            "created": self._created,
            "output_mode": self._mode,
            "choices": [self._choice(i, result) for i, result in enumerate(results)],
            "usage": openai_usage(usage),
            "prompt_token_ids": self._prompt,
            "kv_transfer_params": handoff(results),
        }

    def begin(self) -> list[bytes]:
        """See plan.Shape."""
        return []

    def chunk(self, index: int, delta: Delta) -> list[bytes]:
        """See plan.Shape."""
        wanted = delta.token_ids or delta.finish_reason is not None
        if not wanted and not (self._mode == "text" and delta.text):
            return []
        frame: dict[str, Any] = {
            "request_id": self._id,
            "output_mode": self._mode,
            "choices": [self._choice(index, delta)],
        }
        if self._prompt is not None:
            frame["prompt_token_ids"], self._prompt = self._prompt, None
        if self._each_usage and delta.usage is not None:
            frame["usage"] = openai_usage(delta.usage)
        return [sse.data(frame)]

    def end(self, usages: Sequence[Usage], last: Sequence[Delta]) -> list[bytes]:
        """See plan.Shape."""
        if not self._include_usage:
            return [sse.DONE]
        usage = openai_usage(total_usage(usages, self._n))
        frame = {
            "request_id": self._id, "output_mode": self._mode, "choices": [], "usage": usage,
        }  # fmt: skip
        return [sse.data(frame), sse.DONE]

    def _choice(self, index: int, part: Delta | Completion) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "token_ids": list(part.token_ids),
            "finish_reason": finish_label(part),
            "stop_reason": part.stop_reason,
            "logprobs": None,
        }
        if self._mode == "text":
            choice["text"] = part.text
        if self._logprobs:
            text = self._mode == "text"
            choice["logprobs"] = chat_logprobs(part.logprobs) if text else _by_id(part.logprobs)
        return choice


def _by_id(entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """Log-probabilities with token ids; the chosen token first among the alternatives."""
    content = []
    for entry in entries:
        chosen = {"token_id": entry.token_id, "logprob": entry.logprob, "rank": entry.rank + 1}
        ranked = [
            {"token_id": token, "logprob": value, "rank": rank}
            for rank, (token, value) in enumerate(entry.top, start=1)
        ]
        others = [one for one in ranked if one["token_id"] != entry.token_id]
        content.append({**chosen, "top_logprobs": [chosen, *others]})
    return {"content": content}
