"""From a request's outputs to the deltas its reader sees: text, stop strings, counts.

Used by whoever reads outputs: the async client (event loop) or `LLM` (its thread).
"""

from __future__ import annotations

import codecs

import msgspec

from engine_shim.api import Delta
from engine_shim.errors import RequestFailed
from engine_shim.protocol import (
    EngineCoreOutput,
    FinishReason,
    SamplingParams,
    TokenLogprobs,
)
from engine_shim.tokenizer import token_bytes
from engine_shim.validation import stop_list


class TextStream:
    """Text of tokens as they come. Keeps back what may be part of a character or a stop string."""

    def __init__(self, stops: list[str], include_stop: bool = False, min_tokens: int = 0) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = stops
        self._include = include_stop
        self._min_tokens = min_tokens
        self._seen = 0
        self._kept = ""
        self.stopped: str | None = None
        """The stop string that was met; nothing comes after it."""

    def push(self, token: int) -> str:
        """New text that is sure to stay."""
        self._seen += 1
        self._kept += self._decoder.decode(token_bytes(token))
        if self._seen >= self._min_tokens:
            found = [(at, stop) for stop in self._stops if (at := self._kept.find(stop)) >= 0]
            if found:
                at, self.stopped = min(found, key=lambda hit: (hit[0], -len(hit[1])))
                return self._take(at + len(self.stopped) if self._include else at)
        return self._take(len(self._kept) - self._held())

    def finish(self) -> str:
        """What was kept back."""
        self._kept += self._decoder.decode(b"", final=True)
        return self._take(len(self._kept))

    def _take(self, count: int) -> str:
        text, self._kept = self._kept[:count], self._kept[count:]
        return text

    def _held(self) -> int:
        """Length of the longest end of the kept text that begins a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(self._kept)), 0, -1):
            if any(stop.startswith(self._kept[-length:]) for stop in self._stops):
                return length
        return 0


class Sequence:
    """One sequence as it is read: outputs in, deltas out.

    request_id: the caller's. When `wants_stop` turns true a stop string was met: end the request
    with FinishReason.STOP, and go on until the delta with a finish_reason.
    """

    def __init__(self, request_id: str, params: SamplingParams) -> None:
        self._request_id = request_id
        self._params = params
        self._text = self._new_text(params)
        self._tokens = 0
        self.ended = False

    @staticmethod
    def _new_text(params: SamplingParams) -> TextStream:
        stops = stop_list(params)
        return TextStream(stops, params.include_stop_str_in_output, params.min_tokens)

    @property
    def wants_stop(self) -> bool:
        """A stop string was met and the engine does not know yet."""
        return self._text.stopped is not None and not self.ended

    def take(self, output: EngineCoreOutput) -> Delta | None:
        """What an output brings; None if nothing. Raises RequestFailed for an ERROR output."""
        if output.finish_reason is FinishReason.ERROR:
            self.ended = True
            raise RequestFailed(output.error or "the engine failed this request")
        text, tokens, logprobs = self._take_tokens(output)
        usage = output.usage
        if output.finish_reason is not None:
            if self._text.stopped is None:
                text += self._text.finish()
            if usage is not None:
                usage = msgspec.structs.replace(usage, output_tokens=self._tokens)
        elif not tokens:
            return None
        delta = Delta(
            request_id=self._request_id,
            text=text,
            token_ids=tokens,
            logprobs=logprobs,
            finish_reason=self._reason(output),
            stop_reason=self._stop_reason(output),
            usage=usage,
            kv_transfer_params=output.kv_transfer_params,
            awaiting_input=output.awaiting_input,
        )
        if output.awaiting_input:
            self._text, self._tokens = self._new_text(self._params), 0
        self.ended = output.ended
        return delta

    def _stop_reason(self, output: EngineCoreOutput) -> int | str | None:
        if output.finish_reason is None:
            return None
        return self._text.stopped or output.stop_reason

    def _reason(self, output: EngineCoreOutput) -> FinishReason | None:
        """A stop string decides, also if the engine ended for another reason meanwhile."""
        if output.finish_reason is not None and self._text.stopped is not None:
            return FinishReason.STOP
        return output.finish_reason

    def _take_tokens(
        self, output: EngineCoreOutput
    ) -> tuple[str, tuple[int, ...], tuple[TokenLogprobs, ...]]:
        """Text, tokens and logprobs up to a stop string, if one is met."""
        text, count = "", 0
        for token in output.new_token_ids:
            if self._text.stopped is not None:
                break
            text += self._text.push(token)
            count += 1
        self._tokens += count
        logprobs = (output.new_logprobs or [])[:count]
        return text, tuple(output.new_token_ids[:count]), tuple(logprobs)


def merge(first: Delta, second: Delta) -> Delta:
    """Two deltas of one sequence as one; the first must not have a finish_reason."""
    assert first.finish_reason is None
    return msgspec.structs.replace(
        second,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs + second.logprobs,
        usage=second.usage or first.usage,
    )


