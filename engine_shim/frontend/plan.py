"""From a decoded body to what the engine is asked, and back to a reply: the shared part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from connector.clock import Clock
from engine_shim.api import Completion, Delta, RequestOptions
from engine_shim.errors import InvalidRequest
from engine_shim.frontend.bodies import SEQUENCES_MAX, GenerationBody
from engine_shim.frontend.legacy import LegacySessions
from engine_shim.identity import Identity
from engine_shim.protocol import SamplingParams, TokenLogprobs, Usage
from engine_shim.tokenizer import token_bytes


class Context(msgspec.Struct, frozen=True):
    """One request as an entrance sees it, beside its body.

    request_id: the client's, else made here; unique is only what the engine appends to it.
    """

    request_id: str
    created: int
    model: str
    max_model_len: int
    identity: Identity
    legacy: LegacySessions
    clock: Clock


class Shape(Protocol):
    """Makes an entrance's reply of what the engine gave. One object per request.

    Sequences are numbered prompt by prompt: prompt * n + child.
    """

    def full(self, results: Sequence[Completion]) -> dict[str, Any]:
        """The body of a reply that is not streamed."""

    def begin(self) -> list[bytes]:
        """Frames before the first token."""

    def chunk(self, index: int, delta: Delta) -> list[bytes]:
        """Frames of one delta; none if it has nothing for the client."""

    def end(self, usages: Sequence[Usage], last: Sequence[Delta]) -> list[bytes]:
        """Frames after the last token; usages and last deltas by sequence."""


class Plan(msgspec.Struct, frozen=True):
    """prompts x params.n sequences, one reply. on_done: called with the results of a reply that
    came to its end."""

    prompts: list[list[int]]
    params: SamplingParams
    shape: Shape
    stream: bool
    on_done: Callable[[Sequence[Completion]], None] | None = None

    def __post_init__(self) -> None:
        count = len(self.prompts) * self.params.n
        if count > SEQUENCES_MAX:
            raise InvalidRequest(
                f"{len(self.prompts)} prompts x n = {self.params.n} are {count} sequences, at most "
                f"{SEQUENCES_MAX} are served per request; send several requests",
                param="n",
            )


Planner = Callable[[Any, Context], Plan]


def options_of(body: GenerationBody, context: Context) -> RequestOptions:
    """The engine's options: the one identity and what travels with the request."""
    return RequestOptions(
        request_id=context.request_id,
        session_id=context.identity.session_id,
        cache_salt=body.cache_salt,
        priority=body.priority or 0,
        kv_transfer_params=context.identity.kv_transfer_params,
        kv_hints=body.kv_hints,
    )


def with_xargs(params: SamplingParams, identity: Identity) -> SamplingParams:
    """The parameters with the client's extra arguments, the session id not among them."""
    if not identity.xargs:
        return params
    extra = {**(params.extra_args or {}), **identity.xargs}
    return msgspec.structs.replace(params, extra_args=extra)


def total_usage(usages: Sequence[Usage], n: int) -> Usage:
    """Usage of a request: each prompt counted once, as its first child met it; all outputs."""
    first = usages[::n]
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in first),
        local_cached_tokens=sum(usage.local_cached_tokens for usage in first),
        external_cached_tokens=sum(usage.external_cached_tokens for usage in first),
        output_tokens=sum(usage.output_tokens for usage in usages),
    )


def openai_usage(usage: Usage) -> dict[str, Any]:
    """OpenAI's `usage`; how the cached tokens divide is an addition of ours."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": cached_details(usage),
    }


def cached_details(usage: Usage) -> dict[str, int]:
    """local: from the engine's own prefix cache. external: loaded by the connector."""
    return {
        "cached_tokens": usage.cached_tokens,
        "local_cached_tokens": usage.local_cached_tokens,
        "external_cached_tokens": usage.external_cached_tokens,
    }


def handoff(results: Sequence[Completion]) -> dict[str, Any] | None:
    """kv_transfer_params of the reply: of the first sequence that has any, as in vLLM."""
    return next((r.kv_transfer_params for r in results if r.kv_transfer_params), None)


def finish_label(delta: Delta | Completion) -> str | None:
    """OpenAI's finish_reason."""
    return None if delta.finish_reason is None else delta.finish_reason.label


def token_text(token: int) -> str:
    """One token as text, for log-probabilities."""
    return token_bytes(token).decode("utf-8", "replace")


def chat_logprobs(entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """Log-probabilities as chat completions have them."""
    return {
        "content": [
            {
                **_logprob(entry.token_id, entry.logprob),
                "top_logprobs": [_logprob(token, value) for token, value in entry.top],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def _logprob(token: int, value: float) -> dict[str, Any]:
    return {"token": token_text(token), "logprob": value, "bytes": list(token_bytes(token))}
