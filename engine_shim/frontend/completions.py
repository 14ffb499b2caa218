"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine_shim.api import Completion, Delta
from engine_shim.errors import InvalidRequest
from engine_shim.frontend import sse
from engine_shim.frontend.bodies import CompletionBody, refuse_unsupported
from engine_shim.frontend.chat_template import encode_text
from engine_shim.frontend.plan import (
    Context,
    Plan,
    finish_label,
    handoff,
    openai_usage,
    token_text,
    total_usage,
    with_xargs,
)
from engine_shim.protocol import TokenLogprobs, Usage
from engine_shim.tokenizer import decode


def plan(body: CompletionBody, context: Context) -> Plan:
    """Raises InvalidRequest."""
    refuse_unsupported(body)
    if body.echo and body.logprobs is not None:
        raise InvalidRequest("echo with logprobs is not supported; send one of them", param="echo")
    prompts = prompt_tokens(body.prompt)
    params = with_xargs(body.sampling(body.max_tokens or 16, body.logprobs), context.identity)
    return Plan(prompts, params, CompletionShape(body, context, prompts), bool(body.stream))


def prompt_tokens(prompt: str | list[Any], field: str = "prompt") -> list[list[int]]:
    """Text, texts, token ids or lists of them, as one list of token ids per prompt."""
    if isinstance(prompt, str):
        prompts = [encode_text(prompt, field)]
    elif all(isinstance(part, int) for part in prompt):
        prompts = [list(prompt)]
    elif all(isinstance(part, str) for part in prompt):
        prompts = [encode_text(part, field) for part in prompt]
    elif all(isinstance(part, list) for part in prompt):
        prompts = [list(part) for part in prompt]
    else:
        raise InvalidRequest(f"{field} mixes texts and token ids; send one kind", param=field)
    if not all(prompts):
        raise InvalidRequest(f"{field} is empty; send at least one token", param=field)
    return prompts


class CompletionShape:
    """See plan.Shape."""

    def __init__(self, body: CompletionBody, context: Context, prompts: list[list[int]]) -> None:
        self._prompts = prompts if body.echo else None
        self._n = body.n or 1
        options = body.stream_options
        self._include_usage = bool(options and options.include_usage)
        self._each_usage = bool(options and options.continuous_usage_stats)
        self._logprobs = body.logprobs is not None
        self._offsets = [0] * (len(prompts) * self._n)
        self._begun = [False] * len(self._offsets)
        self._head = {
            "id": f"cmpl-{context.request_id}",
            "object": "text_completion",
            "created": context.created,
            "model": context.model,
        }

    def full(self, results: Sequence[Completion]) -> dict[str, Any]:
        """See plan.Shape."""
        choices = [
            self._choice(index, result.text, result, result.logprobs)
            for index, result in enumerate(results)
        ]
        usage = total_usage([result.usage for result in results], self._n)
        return {
            **self._head,
            "choices": choices,
            "usage": openai_usage(usage),
            "kv_transfer_params": handoff(results),
        }

    def begin(self) -> list[bytes]:
        """See plan.Shape."""
        return []

    def chunk(self, index: int, delta: Delta) -> list[bytes]:
        """See plan.Shape."""
        if not (delta.text or delta.token_ids or delta.finish_reason is not None):
            return []
        choice = self._choice(index, delta.text, delta, delta.logprobs)
        frame: dict[str, Any] = {**self._head, "choices": [choice]}
        if self._each_usage and delta.usage is not None:
            frame["usage"] = openai_usage(delta.usage)
        elif self._include_usage:
            frame["usage"] = None
        return [sse.data(frame)]

    def end(self, usages: Sequence[Usage], last: Sequence[Delta]) -> list[bytes]:
        """See plan.Shape."""
        if not self._include_usage:
            return [sse.DONE]
        usage = openai_usage(total_usage(usages, self._n))
        return [sse.data({**self._head, "choices": [], "usage": usage}), sse.DONE]

    def _choice(
        self,
        index: int,
        text: str,
        ended: Delta | Completion,
        logprobs: Sequence[TokenLogprobs],
    ) -> dict[str, Any]:
        if self._prompts is not None and not self._begun[index]:
            text = decode(self._prompts[index // self._n]) + text
        self._begun[index] = True
        found = self._logprobs_json(index, logprobs) if self._logprobs else None
        return {
            "index": index,
            "text": text,
            "logprobs": found,
            "finish_reason": finish_label(ended),
            "stop_reason": ended.stop_reason,
        }

    def _logprobs_json(self, index: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        offsets = []
        for entry in entries:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(token_text(entry.token_id))
        return {
            "tokens": [token_text(entry.token_id) for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [
                {token_text(token): value for token, value in entry.top} for entry in entries
            ],
            "text_offset": offsets,
        }
