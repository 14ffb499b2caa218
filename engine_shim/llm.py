"""The engine in this process, without a socket: `LLM.generate`, or `add_request` and `step`.

Used by one thread.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence as Many

import msgspec

from connector.clock import Clock, SystemClock
from engine_shim.api import CloseResult, Completion, Delta, Prompt, RequestOptions, join
from engine_shim.config import EngineConfig
from engine_shim.connector_port import Connector
from engine_shim.detokenizer import Sequence
from engine_shim.engine import EngineCore
from engine_shim.engine_proc import build_connector
from engine_shim.errors import InvalidRequest, RequestFailed
from engine_shim.protocol import EngineCoreRequest, FinishReason, SamplingParams
from engine_shim.validation import (
    build_message,
    check_options,
    check_params,
    check_tokens,
    fan_out,
    tokenize,
)

NO_OPTIONS = RequestOptions()
IDLE_WAIT_S = 0.001

_Child = tuple[EngineCoreRequest, Sequence]


class LLM:
    """See the module."""

    def __init__(
        self,
        config: EngineConfig | None = None,
        connector: Connector | None = None,
        clock: Clock | None = None,
    ) -> None:
        """connector: None takes the one that config.kv_transfer_config asks for, if any.

        Raises ConfigError.
        """
        config = config or EngineConfig()
        self.core = EngineCore(config, connector or build_connector(config.check()))
        self._clock = clock or SystemClock()
        self._ids = itertools.count()
        self._sequences: dict[str, Sequence] = {}
        self._open_inputs: dict[str, EngineCoreRequest] = {}
        self._idle = threading.Event()

    def generate(
        self,
        prompts: Many[Prompt],
        params: SamplingParams | None = None,
        options: RequestOptions | Many[RequestOptions] | None = None,
    ) -> list[list[Completion]]:
        """For each prompt, its `params.n` completions. One thread, until all have ended.

        Raises InvalidRequest before anything runs, RequestFailed.
        """
        params = params or SamplingParams()
        each = [options] * len(prompts) if isinstance(options, RequestOptions) else options
        each = each or [NO_OPTIONS] * len(prompts)
        if len(each) != len(prompts):
            raise InvalidRequest(f"{len(each)} options for {len(prompts)} prompts", "options")
        children = [
            [self._prepare(prompt, child, own) for child, _ in fan_out(params, own)]
            for prompt, own in zip(prompts, each, strict=True)
        ]
        deltas: dict[str, list[Delta]] = {}
        for message in (m for group in children for m in group):
            self._enter(*message)
            deltas[message[0].request_id] = []
        while any(request_id in self._sequences for request_id in deltas):
            for request_id, delta in self.step():
                deltas.setdefault(request_id, []).append(delta)
        return [[join(deltas[m[0].request_id]) for m in group] for group in children]

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        resumable: bool = False,
    ) -> str:
        """Queue one sequence (`n` must be 1); its id in what `step` returns.

        resumable: more input follows by `add_input`. Raises InvalidRequest.
        """
        params = params or SamplingParams()
        if params.n != 1:
            raise InvalidRequest("n > 1 is served by generate", "n")
        message, sequence = self._prepare(prompt, params, options or NO_OPTIONS)
        if resumable:
            message.resumable = True
            self._open_inputs[message.request_id] = message
        self._enter(message, sequence)
        return message.request_id

    def add_input(self, request_id: str, prompt: Prompt | None) -> None:
        """More input of a resumable request; None: there will be no more. Raises InvalidRequest."""
        template = self._open_inputs.get(request_id)
        if template is None:
            raise InvalidRequest("this request takes no input", "request_id")
        if prompt is None:
            del self._open_inputs[request_id]
            self.core.add_request(msgspec.structs.replace(template, resumable=False))
            return
        tokens = tokenize(prompt)
        config = self.core.config
        check_tokens(tokens, config.max_model_len, config.model.vocab_size)
        self.core.add_request(msgspec.structs.replace(template, prompt_token_ids=tokens))

    def _prepare(self, prompt: Prompt, params: SamplingParams, options: RequestOptions) -> _Child:
        check_params(params)
        check_options(options)
        tokens = tokenize(prompt)
        config = self.core.config
        check_tokens(tokens, config.max_model_len, config.model.vocab_size)
        request_id = f"{options.request_id or 'req'}-{next(self._ids)}"
        arrival_s = self._clock.wall_ms() / 1000
        message = build_message(tokens, params, options, request_id, arrival_s)
        return message, Sequence(options.request_id or request_id, params)

    def _enter(self, message: EngineCoreRequest, sequence: Sequence) -> None:
        self._sequences[message.request_id] = sequence
        self.core.add_request(message)

    def step(self) -> list[tuple[str, Delta]]:
        """One step of the engine: (id given by add_request, what is new).

        Raises RequestFailed if a request came to an engine-side error; the others go on.
        """
        outputs, computed = self.core.step()
        if not outputs and not computed:
            # Only the connector can bring news; its threads need this one's interpreter lock.
            self._idle.wait(IDLE_WAIT_S)
        found: list[tuple[str, Delta]] = []
        failure: RequestFailed | None = None
        for _, output in outputs:
            sequence = self._sequences.get(output.request_id)
            if sequence is None:
                continue
            try:
                delta = sequence.take(output)
            except RequestFailed as error:
                failure, delta = error, None
            if sequence.wants_stop:
                self.core.abort([output.request_id], FinishReason.STOP)
            if sequence.ended:
                del self._sequences[output.request_id]
                self._open_inputs.pop(output.request_id, None)
            if delta is not None:
                found.append((output.request_id, delta))
        if failure is not None:
            raise failure
        return found

    @property
    def has_work(self) -> bool:
        """True while a request is open, or the connector wants steps."""
        return bool(self._sequences) or self.core.has_work or self.core.must_poll

    def drain(self, steps_max: int = 100_000) -> bool:
        """Step until nothing is left to do, the connector's work included; False if it is not."""
        for _ in range(steps_max):
            if not self.has_work:
                return True
            self.step()
        return not self.has_work

    def abort(self, request_id: str) -> None:
        """End a request by the id of add_request; its last delta comes with the next step."""
        self.core.abort([request_id])

    def reset_prefix_cache(self, reset_external: bool = False) -> bool:
        """See EngineCore."""
        return self.core.reset_prefix_cache(reset_external)

    def close_session(self, session_id: str, cache_salt: str | None = None) -> CloseResult:
        """See EngineCore."""
        check_options(RequestOptions(session_id=session_id, cache_salt=cache_salt))
        return self.core.close_session(session_id, cache_salt)

    def shutdown(self) -> None:
        """Stop the connector."""
        self.core.shutdown()
