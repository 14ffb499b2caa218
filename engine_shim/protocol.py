"""Messages on the link between a front end and the engine core. The page is docs/WIRE.md.

A message is two ZMQ frames: one byte of `MessageType`, then msgpack. `EngineCoreRequest` has the
field order of vLLM 0.32. Fields are only ever appended: a shorter array (older peer) decodes to
defaults, the unknown tail of a longer one (newer peer) is ignored. A field inserted in the middle
would be mis-slotted in silence, so a link starts with the handshake of `handshake.py`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import msgspec

PROTOCOL_VERSION = "1.0"
MESSAGES_MAX = 10_000
"""Messages that may wait in each direction of a link."""


class MessageType(enum.Enum):
    """First frame. ADD, ABORT and UTILITY have vLLM's values."""

    ADD = b"\x00"  # EngineCoreRequest, to the engine
    ABORT = b"\x01"  # AbortMessage, to the engine
    UTILITY = b"\x03"  # UtilityCall, to the engine
    HELLO = b"\x10"  # Hello, to the engine; the first message of a client
    READY = b"\x11"  # EngineInfo, from the engine: accepted
    REFUSED = b"\x12"  # Refusal, from the engine: not the same protocol
    OUTPUTS = b"\x13"  # EngineCoreOutputs, from the engine
    UTILITY_REPLY = b"\x14"  # UtilityReply, from the engine
    LOST = b"\x15"  # Refusal, from the engine: it gave up on this client and its requests


class FinishReason(enum.IntEnum):
    """Why a request ended; vLLM's values."""

    STOP = 0  # a stop token or a stop string
    LENGTH = 1  # max_tokens or the model's context
    ABORT = 2  # the client gave up
    ERROR = 3  # the engine could not serve it

    @property
    def label(self) -> str:
        """As in OpenAI's `finish_reason`."""
        return self.name.lower()


class SamplingParams(msgspec.Struct, omit_defaults=True):
    """How to choose tokens. Names and defaults are vLLM's; its other fields are ignored here.

    Encoded as a map, so the two classes read each other's fields by name.
    max_tokens: None means up to the model's context. seed: None means a seed of the engine's own.
    logprobs: number of alternatives to report beside each chosen token.
    extra_args: `kv_transfer_params` and `vllm_xargs` travel here.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    include_stop_str_in_output: bool = False
    extra_args: dict[str, Any] | None = None


class KvHintAction(msgspec.Struct, frozen=True):
    """One versioned hint; `payload` is JSON."""

    action_id: str
    action_type: str
    action_version: str
    payload: dict[str, Any]


class KvHintsEnvelope(msgspec.Struct, frozen=True):
    """Hints of an orchestrator about one request's KV."""

    protocol_version: str
    message_id: str
    actions: list[KvHintAction]


class EngineCoreRequest(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One request, or one more piece of input of a resumable one. vLLM 0.32's 22 fields.

    The shim serves text: mm_features, pooling_params, lora_request, data_parallel_rank,
    prompt_embeds and prompt_is_token_ids keep their places and must be None.
    resumable: more input may follow under the same request_id; a message with False ends it.
    abort_immediately: end it at once, so that the connector's clean-up runs.
    """

    request_id: str
    prompt_token_ids: list[int] | None
    mm_features: list[Any] | None
    sampling_params: SamplingParams | None
    pooling_params: Any
    arrival_time: float
    lora_request: Any
    cache_salt: str | None
    data_parallel_rank: int | None
    prompt_embeds: Any = None
    prompt_is_token_ids: list[bool] | None = None
    client_index: int = 0
    current_wave: int = 0
    priority: int = 0
    trace_headers: Mapping[str, str] | None = None
    resumable: bool = False
    external_req_id: str | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    abort_immediately: bool = False
    session_id: str | None = None
    kv_hints: KvHintsEnvelope | None = None


class AbortMessage(msgspec.Struct, array_like=True, frozen=True):
    """End these requests. reason STOP: the front end saw a stop string (a normal end)."""

    request_ids: list[str]
    reason: FinishReason = FinishReason.ABORT


class UtilityCall(msgspec.Struct, array_like=True, frozen=True):
    """A call that is answered by one UtilityReply with the same id."""

    call_id: int
    method: str
    args: list[Any] = []


class UtilityReply(msgspec.Struct, array_like=True, frozen=True):
    """failure: the message if the call failed, else None. result: plain data."""

    call_id: int
    failure: str | None = None
    result: Any = None


class TokenLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Natural logarithms of the probability of a chosen token and of the likeliest ones.

    rank: 0 for the likeliest. top: (token, logprob), best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]] = []


class Usage(msgspec.Struct, array_like=True, frozen=True):
    """Tokens of one request.

    local_cached_tokens: prompt tokens found in the engine's own prefix cache.
    external_cached_tokens: prompt tokens that the connector really loaded (a promised load that
    failed does not count). Both as of the first time the prompt was computed to its end.
    """

    prompt_tokens: int
    local_cached_tokens: int = 0
    external_cached_tokens: int = 0
    output_tokens: int = 0

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return self.local_cached_tokens + self.external_cached_tokens


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """New tokens of one request.

    usage: with the first token and at the end. kv_transfer_params: at the end.
    awaiting_input: finish_reason ends this piece of input only; the resumable request is open.
    error: what went wrong, with FinishReason.ERROR.
    """

    request_id: str
    new_token_ids: list[int]
    new_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    usage: Usage | None = None
    awaiting_input: bool = False
    error: str | None = None

    @property
    def ended(self) -> bool:
        """True for the last output of a request."""
        return self.finish_reason is not None and not self.awaiting_input


class EngineCoreOutputs(msgspec.Struct, array_like=True, gc=False):
    """What one step has for one client."""

    outputs: list[EngineCoreOutput]


class EngineInfo(msgspec.Struct, array_like=True, frozen=True):
    """What a front end needs to know of a running engine; the reply to a good Hello."""

    engine_version: str
    max_model_len: int
    block_size: int
    num_blocks: int
    vocab_size: int
    max_num_seqs: int
    tp_size: int
    device: str
    session_cache: bool
    connector: bool


class Refusal(msgspec.Struct, array_like=True, frozen=True):
    """Why the engine does not go on with this client."""

    message: str
