"""Request bodies, one struct per entrance, and the one way from JSON bytes to them.

Unknown fields are ignored, as OpenAI's clients expect. A field that would change the answer and
that this engine can't honour is refused (`UNSUPPORTED`), never ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from engine_shim.errors import InvalidRequest
from engine_shim.protocol import KvHintsEnvelope, SamplingParams

BODY_BYTES_MAX = 32 << 20
SEQUENCES_MAX = 256
SALT_CHARS_MAX = 1024

PositiveInt = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
TokenId = Annotated[int, Meta(ge=0)]
Temperature = Annotated[float, Meta(ge=0, le=100)]
TopP = Annotated[float, Meta(gt=0, le=1)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Salt = Annotated[str, Meta(min_length=1, max_length=SALT_CHARS_MAX)]


class StreamOptions(msgspec.Struct, frozen=True):
    """OpenAI's, with vLLM's `continuous_usage_stats`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(msgspec.Struct, kw_only=True):
    """What every entrance understands.

    session_id is Any: a value that is no string never counts, and is no error.
    """

    model: str | None = None
    session_id: Any = None
    vllm_xargs: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    kv_hints: KvHintsEnvelope | None = None
    cache_salt: Salt | None = None
    priority: Int64 | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    request_id: str | None = None


class SamplingBody(GenerationBody, kw_only=True):
    """Sampling as OpenAI's and vLLM's bodies spell it; null means the default."""

    n: Annotated[int, Meta(ge=1, le=SEQUENCES_MAX)] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    include_stop_str_in_output: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: dict[str, Any] | None = None
    min_p: float | None = None

    def sampling(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """The engine's parameters; `n` is still in them."""
        return SamplingParams(
            n=self.n or 1,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),
            seed=self.seed,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=bool(self.ignore_eos),
            max_tokens=max_tokens,
            min_tokens=self.min_tokens or 0,
            logprobs=logprobs,
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
        )


class CompletionBody(SamplingBody, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | list[TokenId] | TokenId]
    max_tokens: PositiveInt | None = 16
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


class ChatBody(SamplingBody, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None


class ResponsesBody(SamplingBody, kw_only=True):
    """POST /v1/responses."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: PositiveInt | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    background: bool | None = None
    metadata: dict[str, Any] | None = None


class TokensBody(GenerationBody, kw_only=True):
    """POST /inference/v1/generate: tokens in, tokens out."""

    token_ids: Annotated[list[TokenId], Meta(min_length=1)]
    sampling_params: dict[str, Any]
    output_mode: str = "tokens"
    return_token_ids: bool | None = None
    features: Any = None
    content_parts: Any = None


class SessionParams(msgspec.Struct, frozen=True):
    """SGLang's legacy way to continue a session that the engine remembers.

    rid: the request to go on from; None starts anew. offset: keep this many tokens of it.
    replace: forget what followed it. drop_previous_output: go on from its prompt alone.
    """

    id: str
    rid: str | None = None
    offset: Count | None = None
    replace: bool | None = None
    drop_previous_output: bool | None = None


class NativeBody(GenerationBody, kw_only=True):
    """POST /generate, SGLang's form."""

    text: str | list[str] | None = None
    input_ids: list[TokenId | list[TokenId]] | None = None
    sampling_params: dict[str, Any] | None = None
    session_params: SessionParams | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | None = None


class OpenSessionBody(msgspec.Struct, frozen=True):
    """POST /open_session. capacity_of_str_len: tokens that the session may hold."""

    capacity_of_str_len: PositiveInt | None = None
    session_id: str | None = None


class CloseSessionBody(msgspec.Struct, frozen=True):
    """POST /close_session."""

    session_id: Any = None
    cache_salt: Salt | None = None


B = TypeVar("B", bound=msgspec.Struct)
_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")


def decode_body(raw: bytes, kind: type[B]) -> B:
    """JSON to a struct. Raises InvalidRequest with the name of the field that is wrong."""
    try:
        return msgspec.json.decode(raw or b"null", type=kind)
    except msgspec.ValidationError as error:
        raise invalid_field(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from error


def convert_field(value: Any, kind: type[B], field: str) -> B:
    """A nested object to a struct. Raises InvalidRequest that names `field`."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise invalid_field(error, field) from error


def invalid_field(error: msgspec.ValidationError, prefix: str = "") -> InvalidRequest:
    """msgspec's error as ours: `param` is the field's path."""
    text = str(error)
    found = _PATH.search(text)
    path = found["path"] if found else ""
    missing = re.search(r"missing required field `([^`]+)`", text)
    if missing:
        path = f"{path}.{missing[1]}" if path else missing[1]
    param = ".".join(part for part in (prefix, path) if part) or None
    message = _PATH.sub("", text)
    return InvalidRequest(
        f"{message} (field {param})" if param else message, param=param, code="invalid_type"
    )


# field -> values that change nothing and are therefore accepted.
UNSUPPORTED: Mapping[str, Sequence[object]] = {
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_p": (None, 0),
    "logit_bias": (None, {}),
    "response_format": (None, {"type": "text"}),
    "suffix": (None, ""),
    "best_of": (None, 1),
    "previous_response_id": (None,),
    "background": (None, False),
    "features": (None,),
    "content_parts": (None, []),
    "tool_choice": (None, "none", "auto"),
}


def refuse_unsupported(body: msgspec.Struct) -> None:
    """Raises InvalidRequest for the first field that this engine can't honour."""
    for name, neutral in UNSUPPORTED.items():
        value = getattr(body, name, None)
        if value not in neutral:
            raise InvalidRequest(
                f"{name} is not supported by this engine; leave it out",
                param=name, code="unsupported",
            )  # fmt: skip
