"""POST /generate: SGLang's form, with `session_id`, or the legacy `session_params`."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from engine_shim.api import Completion, Delta
from engine_shim.errors import InvalidRequest
from engine_shim.frontend import sse
from engine_shim.frontend.bodies import (
    SEQUENCES_MAX,
    Count,
    Int64,
    NativeBody,
    PositiveInt,
    Temperature,
    TokenId,
    TopP,
    convert_field,
    refuse_unsupported,
)
from engine_shim.frontend.completions import prompt_tokens
from engine_shim.frontend.plan import Context, Plan, finish_label, handoff, with_xargs
from engine_shim.protocol import FinishReason, SamplingParams, TokenLogprobs, Usage

MAX_NEW_TOKENS = 128


class NativeSampling(msgspec.Struct):
    """`sampling_params` by SGLang's names and defaults."""

    max_new_tokens: PositiveInt | None = MAX_NEW_TOKENS
    min_new_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    sampling_seed: Int64 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Meta(ge=1, le=SEQUENCES_MAX)] | None = None
    no_stop_trim: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_p: float | None = None

    def params(self, logprobs: int | None) -> SamplingParams:
        """The engine's parameters. SGLang's top_k of -1 and of 2**30 mean "all"."""
        top_k = self.top_k or 0
        return SamplingParams(
            n=self.n or 1,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=top_k if 0 < top_k < 1 << 30 else 0,
            seed=self.sampling_seed,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=bool(self.ignore_eos),
            max_tokens=self.max_new_tokens,
            min_tokens=self.min_new_tokens or 0,
            logprobs=logprobs,
            include_stop_str_in_output=bool(self.no_stop_trim),
        )


def plan(body: NativeBody, context: Context) -> Plan:
    """Raises InvalidRequest."""
    prompts, batch = _prompts(body)
    sampling = convert_field(body.sampling_params or {}, NativeSampling, "sampling_params")
    refuse_unsupported(sampling)
    params = with_xargs(sampling.params(0 if body.return_logprob else None), context.identity)
    rids = _rids(body, len(prompts) * params.n)
    on_done = None
    if body.session_params is not None:
        prompts, on_done = _continue_session(body, context, prompts, rids)
    shape = NativeShape(rids, batch or params.n > 1, bool(body.return_logprob))
    return Plan(prompts, params, shape, bool(body.stream), on_done)


def session_of(body: NativeBody) -> object:
    """The body's id for resolution. Raises InvalidRequest if it is given in both ways."""
    if body.session_params is None:
        return body.session_id
    if body.session_id is not None:
        raise InvalidRequest(
            "session_id and session_params are both set; send session_id (the engine keeps no"
            " prompt), or the legacy session_params after /open_session",
            param="session_params", code="conflicting_session",
        )  # fmt: skip
    return body.session_params.id


def _prompts(body: NativeBody) -> tuple[list[list[int]], bool]:
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequest("send one of text and input_ids", param="text")
    if body.text is not None:
        return prompt_tokens(body.text, "text"), isinstance(body.text, list)  # type: ignore[arg-type]
    assert body.input_ids is not None
    batch = bool(body.input_ids) and isinstance(body.input_ids[0], list)
    return prompt_tokens(list(body.input_ids), "input_ids"), batch


def _rids(body: NativeBody, count: int) -> list[str]:
    """One id per sequence: the caller's where there is one for each."""
    if isinstance(body.rid, str) and count == 1:
        return [body.rid]
    if isinstance(body.rid, list):
        if len(body.rid) != count:
            raise InvalidRequest(
                f"rid has {len(body.rid)} ids for {count} sequences", param="rid"
            )
        return list(body.rid)
    return [uuid.uuid4().hex for _ in range(count)]


def _continue_session(
    body: NativeBody, context: Context, prompts: list[list[int]], rids: list[str]
) -> tuple[list[list[int]], Any]:
    params = body.session_params
    assert params is not None
    if len(rids) != 1:
        raise InvalidRequest("session_params takes one prompt and n = 1", param="session_params")
    whole = context.legacy.prompt(params, prompts[0])

    def done(results: Sequence[Completion]) -> None:
        context.legacy.finished(params, rids[0], whole, list(results[0].token_ids))

    return [whole], done


class NativeShape:
    """See plan.Shape. A stream repeats the whole text so far in each frame, as SGLang's does."""

    def __init__(self, rids: list[str], many: bool, logprobs: bool) -> None:
        self._rids, self._many, self._logprobs = rids, many, logprobs
        self._text = [""] * len(rids)
        self._tokens: list[list[int]] = [[] for _ in rids]
        self._entries: list[list[TokenLogprobs]] = [[] for _ in rids]
        self._usage = [Usage(0)] * len(rids)

    def full(self, results: Sequence[Completion]) -> Any:
        """One object; a list of them for a batch or n > 1."""
        replies = [self._reply(i, result, result) for i, result in enumerate(results)]
        for reply, result in zip(replies, results, strict=True):
            reply["kv_transfer_params"] = handoff([result])
        return replies if self._many else replies[0]

    def begin(self) -> list[bytes]:
        """See plan.Shape."""
        return []

    def chunk(self, index: int, delta: Delta) -> list[bytes]:
        """See plan.Shape."""
        self._text[index] += delta.text
        self._tokens[index] += delta.token_ids
        self._entries[index] += delta.logprobs
        if delta.usage is not None:
            self._usage[index] = delta.usage
        whole = Completion(
            request_id=delta.request_id,
            text=self._text[index],
            token_ids=tuple(self._tokens[index]),
            logprobs=tuple(self._entries[index]),
            finish_reason=delta.finish_reason or FinishReason.STOP,
            stop_reason=delta.stop_reason,
            usage=self._usage[index],
            kv_transfer_params=None,
        )
        return [sse.data(self._reply(index, whole, delta))]

    def end(self, usages: Sequence[Usage], last: Sequence[Delta]) -> list[bytes]:
        """See plan.Shape."""
        return [sse.DONE]

    def _reply(self, index: int, whole: Completion, ended: Delta | Completion) -> dict[str, Any]:
        usage = whole.usage
        meta: dict[str, Any] = {
            "id": self._rids[index],
            "finish_reason": _finish(ended, len(whole.token_ids)),
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": len(whole.token_ids),
            "cached_tokens": usage.cached_tokens,
        }
        if self._logprobs:
            meta["output_token_logprobs"] = [
                [entry.logprob, entry.token_id, None] for entry in whole.logprobs
            ]
        reply = {"text": whole.text, "output_ids": list(whole.token_ids), "meta_info": meta}
        return {**reply, "index": index} if self._many else reply


def _finish(ended: Delta | Completion, length: int) -> dict[str, Any] | None:
    label = finish_label(ended)
    if label is None:
        return None
    if label == "length":
        return {"type": label, "length": length}
    return {"type": label, "matched": ended.stop_reason} if label == "stop" else {"type": label}
