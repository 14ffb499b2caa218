"""Checks of requests: at the client's edge, and again where the engine receives them.

Pure functions. Every refusal is an InvalidRequest that names the field, the value and the remedy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from connector import hints
from connector.errors import HintError, SessionIdError
from connector.session import check_session_id
from engine_shim.api import Prompt, RequestOptions
from engine_shim.errors import InvalidRequest
from engine_shim.identity import identify
from engine_shim.protocol import EngineCoreRequest, SamplingParams
from engine_shim.tokenizer import encode

N_MAX = 128
LOGPROBS_MAX = 20
STOPS_MAX = 16
STOP_CHARS_MAX = 256
SALT_BYTES_MAX = 256
REQUEST_ID_CHARS_MAX = 256
TEMPERATURE_MAX = 10.0
_SEED_LIMIT = 1 << 63

_UNSERVED = (
    "mm_features",
    "pooling_params",
    "lora_request",
    "data_parallel_rank",
    "prompt_embeds",
    "prompt_is_token_ids",
)


def check_params(params: SamplingParams) -> SamplingParams:
    """Itself, if it can be served. Raises InvalidRequest."""
    _check_int("n", params.n, 1, N_MAX)
    _check_float("temperature", params.temperature, 0.0, TEMPERATURE_MAX)
    _check_float("top_p", params.top_p, 0.0, 1.0)
    if params.top_p == 0.0:
        raise InvalidRequest("top_p must be above 0 (use temperature 0 for greedy)", "top_p")
    _check_int("top_k", params.top_k, -1, 1 << 31)
    _check_int("min_tokens", params.min_tokens, 0, 1 << 31)
    if params.max_tokens is not None:
        _check_int("max_tokens", params.max_tokens, 1, 1 << 31)
        if params.min_tokens > params.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({params.min_tokens}) is above max_tokens ({params.max_tokens})",
                "min_tokens",
            )
    if params.seed is not None:
        _check_int("seed", params.seed, -_SEED_LIMIT, _SEED_LIMIT - 1)
    if params.logprobs is not None:
        _check_int("logprobs", params.logprobs, 0, LOGPROBS_MAX)
    _check_stops(stop_list(params))
    return params


def stop_list(params: SamplingParams) -> list[str]:
    """The stop strings, however they were given."""
    if params.stop is None:
        return []
    return [params.stop] if isinstance(params.stop, str) else params.stop


def _check_stops(stops: Sequence[str]) -> None:
    if len(stops) > STOPS_MAX:
        raise InvalidRequest(f"{len(stops)} stop strings, at most {STOPS_MAX} are served", "stop")
    for stop in stops:
        if not isinstance(stop, str) or not 0 < len(stop) <= STOP_CHARS_MAX:
            raise InvalidRequest(
                f"a stop string must have 1 to {STOP_CHARS_MAX} characters", "stop"
            )


def _check_int(name: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be an integer, got {_shown(value)}", name)
    if not least <= value <= most:
        raise InvalidRequest(f"{name} = {value} must be from {least} to {most}", name)


def _check_float(name: str, value: object, least: float, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidRequest(f"{name} must be a finite number, got {_shown(value)}", name)
    if not least <= value <= most:
        raise InvalidRequest(f"{name} = {value} must be from {least} to {most}", name)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def tokenize(prompt: Prompt) -> list[int]:
    """Token ids of a prompt. Raises InvalidRequest."""
    if isinstance(prompt, str):
        try:
            tokens = encode(prompt)
        except UnicodeEncodeError as error:
            raise InvalidRequest("the prompt is not valid Unicode", "prompt") from error
    else:
        tokens = list(prompt)
    if not tokens:
        raise InvalidRequest("the prompt is empty; send at least one token", "prompt")
    return tokens


def check_tokens(tokens: Sequence[int], max_model_len: int, vocab_size: int) -> None:
    """Raises InvalidRequest for ids outside the vocabulary or a prompt that leaves no room."""
    if len(tokens) >= max_model_len:
        raise InvalidRequest(
            f"the prompt has {len(tokens)} tokens; the model's context is {max_model_len} tokens,"
            " of which at least one is for the answer; shorten the prompt",
            "prompt",
            "context_length_exceeded",
        )
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"token id {_shown(token)} is not in the vocabulary (0 to {vocab_size - 1})",
                "prompt",
            )


def check_options(options: RequestOptions) -> RequestOptions:
    """Itself, if it is acceptable. Raises InvalidRequest."""
    if options.session_id:
        try:
            check_session_id(options.session_id)
        except SessionIdError as error:
            raise InvalidRequest(str(error), "session_id", "invalid_session_id") from error
    if options.cache_salt is not None and not 0 < len(options.cache_salt) <= SALT_BYTES_MAX:
        raise InvalidRequest(
            f"cache_salt must have 1 to {SALT_BYTES_MAX} characters", "cache_salt"
        )
    if options.request_id is not None and len(options.request_id) > REQUEST_ID_CHARS_MAX:
        raise InvalidRequest(
            f"request id is longer than {REQUEST_ID_CHARS_MAX} characters", "request_id"
        )
    return options


def fan_out(
    params: SamplingParams, options: RequestOptions
) -> list[tuple[SamplingParams, RequestOptions]]:
    """The children of a request with `params.n` >= 1; child i samples with seed + i.

    Children share the caller's request id, session id, salt and parameters. Raises InvalidRequest.
    """
    check_params(params)
    children = []
    for index in range(params.n):
        seed = None if params.seed is None else params.seed + index
        children.append((msgspec.structs.replace(params, n=1, seed=seed), options))
    return children


def build_message(
    tokens: list[int],
    params: SamplingParams,
    options: RequestOptions,
    request_id: str,
    arrival_time: float,
) -> EngineCoreRequest:
    """The message of a checked request. arrival_time: seconds since the epoch.

    Callers without HTTP are served alike: an id in extra_args or kv_transfer_params counts if
    options has none, and no copy of it is left there. Raises InvalidRequest.
    """
    found = identify(options.session_id, None, params.extra_args, options.kv_transfer_params)
    extra = dict(found.xargs or {})
    if found.kv_transfer_params is not None:
        extra["kv_transfer_params"] = found.kv_transfer_params
    params = msgspec.structs.replace(params, extra_args=extra or None)
    check_hints(options.kv_hints, found.kv_transfer_params, found.session_id)
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=tokens,
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=arrival_time,
        lora_request=None,
        cache_salt=options.cache_salt,
        data_parallel_rank=None,
        priority=options.priority,
        trace_headers=options.trace_headers,
        external_req_id=options.request_id,
        session_id=found.session_id,
        kv_hints=options.kv_hints,
    )


def check_hints(
    envelope: object, kv_transfer_params: Mapping[str, Any] | None, session_id: str | None
) -> None:
    """Hints come as an envelope of their own, or in kv_transfer_params. Raises InvalidRequest."""
    if envelope is None:
        envelope = (kv_transfer_params or {}).get(hints.FIELD)
    try:
        hints.parse_hints(envelope, session_id, None)
    except HintError as error:
        raise InvalidRequest(str(error), hints.FIELD) from error


def check_message(message: EngineCoreRequest, max_model_len: int, vocab_size: int) -> None:
    """What an engine checks of a message from any peer. Raises InvalidRequest."""
    for name in _UNSERVED:
        if getattr(message, name):
            raise InvalidRequest(f"{name} is not served by this engine", name)
    if not message.request_id:
        raise InvalidRequest("the request id is empty", "request_id")
    if message.sampling_params is None:
        raise InvalidRequest("sampling_params are missing", "sampling_params")
    if not message.prompt_token_ids:
        raise InvalidRequest("the prompt is empty; send at least one token", "prompt")
    check_params(message.sampling_params)
    check_tokens(message.prompt_token_ids, max_model_len, vocab_size)
    check_options(RequestOptions(session_id=message.session_id, cache_salt=message.cache_salt))
