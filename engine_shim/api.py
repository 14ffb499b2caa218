"""Types that callers of the engine see: of the async client and of the in-process `LLM`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from engine_shim.protocol import (
    FinishReason,
    KvHintsEnvelope,
    SamplingParams,
    TokenLogprobs,
    Usage,
)

Prompt = str | Sequence[int]
"""Text, or token ids."""


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of a request beside prompt and sampling.

    request_id: the caller's id; the engine's own adds a random suffix, so it need not be unique.
    session_id: already resolved (connector.session.resolve_session_id).
    kv_transfer_params: for the connector. trace_headers: passed through.
    """

    request_id: str | None = None
    session_id: str | None = None
    cache_salt: str | None = None
    priority: int = 0
    kv_transfer_params: dict[str, Any] | None = None
    kv_hints: KvHintsEnvelope | None = None
    trace_headers: Mapping[str, str] | None = None


class InputChunk(msgspec.Struct, frozen=True):
    """One piece of streaming input. params: None keeps the request's own."""

    prompt: Prompt
    params: SamplingParams | None = None


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What is new of one sequence.

    text: new text, stop string removed (unless asked for); incomplete UTF-8 is kept back.
    token_ids: new tokens, the ones of a cut-off stop string included.
    finish_reason: with the last delta (of a piece of input, if `awaiting_input`).
    usage: with the first and with the last delta.
    """

    request_id: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    usage: Usage | None = None
    kv_transfer_params: dict[str, Any] | None = None
    awaiting_input: bool = False


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole sequence: the deltas of one request, added up."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None
    usage: Usage
    kv_transfer_params: dict[str, Any] | None


class CloseResult(msgspec.Struct, frozen=True):
    """Answer to close_session.

    existed: the engine knew the session. freed_tokens: tokens of cache blocks freed by this call.
    pending: a turn of the session is still running; its tags go when it ends.
    legacy: it was a legacy session (open_session); the session cache was not touched.
    """

    existed: bool
    freed_tokens: int = 0
    pending: bool = False
    legacy: bool = False


def join(deltas: Sequence[Delta]) -> Completion:
    """Add up all deltas of one finished request; the last one has its finish_reason."""
    last = deltas[-1]
    assert last.finish_reason is not None and last.usage is not None
    return Completion(
        request_id=last.request_id,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        usage=last.usage,
        kv_transfer_params=last.kv_transfer_params,
    )
