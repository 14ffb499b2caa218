"""What the proxy makes of a client's request for each engine. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from connector.session import FIELD
from engine_shim.errors import InvalidRequest
from engine_shim.frontend.identity import REPLY_HEADER

HAND_OFF = "session_kv"
PARAMS = "kv_transfer_params"
TOKENS_IN = "/inference/v1/generate"
# path -> the field that limits the answer.
PATHS: Mapping[str, str] = {
    "/v1/completions": "max_tokens",
    "/v1/chat/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
    TOKENS_IN: "max_tokens",
}
# Of no use for one token that nobody reads, or refused together with it.
NOT_FOR_PREFILL = frozenset(
    {
        "stream", "stream_options", "n", "best_of", "logprobs", "top_logprobs", "echo",
        "min_tokens", "max_completion_tokens", "prompt_logprobs",
    }
)  # fmt: skip
# Headers that belong to one connection, or that the proxy sets itself.
NOT_FORWARDED = frozenset(
    {
        "host", "content-length", "content-type", "transfer-encoding", "connection", "keep-alive",
        "te", "trailer", "upgrade", "expect", "accept-encoding", "proxy-authorization",
        "proxy-connection", REPLY_HEADER.lower(),
    }
)  # fmt: skip


def parse(raw: bytes) -> dict[str, Any]:
    """A request's JSON object, which can be written as JSON again. Raises InvalidRequest."""
    try:
        body: dict[str, Any] = msgspec.json.decode(raw, type=dict[str, Any])
        msgspec.json.encode(body)
        return body
    except (msgspec.MsgspecError, UnicodeError, OverflowError, RecursionError) as error:
        raise InvalidRequest(
            f"the body is not a JSON object: {error}", code="invalid_json"
        ) from error


def mapping_of(body: Mapping[str, Any], field: str) -> dict[str, Any] | None:
    """An object field, or None; whatever else it may be is the engine's to refuse."""
    value = body.get(field)
    return dict(value) if isinstance(value, Mapping) else None


def prefill_body(path: str, body: Mapping[str, Any], session_id: str | None) -> dict[str, Any]:
    """The prompt, with an answer of one token, never streamed: no streamed reply has a hand-off."""
    limit = PATHS[path]
    made = {key: value for key, value in body.items() if key not in NOT_FOR_PREFILL}
    if path == TOKENS_IN:
        sampling = mapping_of(body, "sampling_params") or {}
        kept = {key: value for key, value in sampling.items() if key not in NOT_FOR_PREFILL}
        made["sampling_params"] = {**kept, limit: 1}
    else:
        made[limit] = 1
    made["stream"] = False
    return _owned(made, session_id, None)


def decode_body(
    body: Mapping[str, Any], session_id: str | None, hand_off: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The client's request, with the prefill engine's hand-off if there is one."""
    return _owned(dict(body), session_id, hand_off)


def _owned(
    body: dict[str, Any], session_id: str | None, hand_off: Mapping[str, Any] | None
) -> dict[str, Any]:
    """With the resolved id in its field. A hand-off that the client itself sent is dropped: the
    proxy is the one who knows."""
    params = mapping_of(body, PARAMS)
    if params is not None or hand_off is not None:
        kept = {key: value for key, value in (params or {}).items() if key not in (HAND_OFF, FIELD)}
        body[PARAMS] = {**kept, **(hand_off or {})}
        if not body[PARAMS]:
            del body[PARAMS]
    body.pop(FIELD, None)
    if session_id is not None:
        body[FIELD] = session_id
    return body


def is_batch(path: str, body: Mapping[str, Any]) -> bool:
    """Several prompts: a reply has one hand-off only, so none of them gets one."""
    prompt = body.get("prompt") if path == "/v1/completions" else None
    if not isinstance(prompt, list):
        return False
    return len(prompt) > 1 and not isinstance(prompt[0], int)


def hand_off_of(reply: object) -> dict[str, Any] | None:
    """`kv_transfer_params` of a prefill reply, if it holds a hand-off with a tip."""
    params = reply.get(PARAMS) if isinstance(reply, Mapping) else None
    inner = params.get(HAND_OFF) if isinstance(params, Mapping) else None
    usable = isinstance(inner, Mapping) and isinstance(inner.get("tip"), str) and inner["tip"]
    return {HAND_OFF: dict(inner)} if usable and isinstance(inner, Mapping) else None


def forwarded_headers(
    headers: Mapping[str, str], session_header: list[tuple[bytes, bytes]]
) -> list[tuple[bytes, bytes]]:
    """The client's headers as an engine gets them, with the resolved id in `X-Session-ID`."""
    kept = [
        (name.encode(), value.encode())
        for name, value in headers.items()
        if name.lower() not in NOT_FORWARDED
    ]
    return [*kept, *session_header, (b"content-type", b"application/json")]
