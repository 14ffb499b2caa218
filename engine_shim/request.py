"""The scheduler's state of one request. Owned by the scheduler thread."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping
from typing import Any

from engine_shim.hashing import extend_chain
from engine_shim.protocol import (
    EngineCoreRequest,
    FinishReason,
    KvHintsEnvelope,
    SamplingParams,
    Usage,
)
from engine_shim.session_cache import Session

INPUTS_MAX = 64
"""Pieces of streaming input that may wait for their turn; more is an error of the client."""


class RequestStatus(enum.Enum):
    """Where a request is.

        WAITING ──► WAITING_FOR_REMOTE_KV ──► WAITING (with blocks) ──► RUNNING ──► FINISHED
           └──────────────────────────────────────────────────────────►   │ ▲
                        PREEMPTED (no blocks) ◄────────────────────────────┤ │
                        WAITING_FOR_INPUT (resumable, with blocks) ◄───────┘ └ from both

    It may go to FINISHED from every state.
    """

    WAITING = enum.auto()
    WAITING_FOR_REMOTE_KV = enum.auto()
    WAITING_FOR_INPUT = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED = enum.auto()


class Request:
    """A request as the engine has it; `connector_port.RequestView` is its public part.

    num_computed_tokens: tokens whose KV exists or is in a scheduled step.
    num_placeholders: tokens that scheduled steps will sample and that are not known yet.
    num_in_flight: scheduled steps of it whose outcome is not processed yet.
    num_drop: of those, how many count for nothing, because the request was rolled back.
    num_cached_blocks: blocks of it, from the first, that are registered in the prefix cache.
    send_tokens: the workers must be given all tokens with its next step.
    resumed: it lost its blocks and has not been scheduled since.
    delay_free: the connector sends its blocks on; they are kept until it says so.
    """

    def __init__(
        self, message: EngineCoreRequest, client: bytes, block_size: int, seed: int = 0
    ) -> None:
        params = message.sampling_params
        assert params is not None and message.prompt_token_ids is not None
        self.request_id = message.request_id
        self.client = client
        self.session_id = message.session_id
        self.cache_salt = message.cache_salt
        self.priority = message.priority
        self.arrival_time = message.arrival_time
        self.kv_hints: KvHintsEnvelope | None = message.kv_hints
        self.params: SamplingParams = params
        self.block_size = block_size
        self.token_ids: list[int] = list(message.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.block_hashes: list[bytes] = []
        self.extend_hashes()

        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.num_placeholders = 0
        self.num_in_flight = 0
        self.num_drop = 0
        self.num_preemptions = 0
        self.num_cached_blocks = 0
        self.block_ids: list[int] = []
        self.send_tokens = True
        self.resumed = False
        self.delay_free = False
        self.seed = seed if params.seed is None else params.seed

        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.session: Session | None = None
        self.local_cached_tokens = 0
        self.external_cached_tokens = 0
        self.prefilled = False

        self.resumable = message.resumable
        # Bounded by INPUTS_MAX, see Scheduler.add_request. None: no more input will come.
        self.inputs: deque[EngineCoreRequest | None] = deque(maxlen=INPUTS_MAX + 1)

    # ---- what the connector reads -------------------------------------------------------------

    @property
    def extra_args(self) -> Mapping[str, Any] | None:
        """`vllm_xargs` and the like."""
        return self.params.extra_args

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        """From `extra_args["kv_transfer_params"]`; None if it is not an object or empty."""
        found = (self.params.extra_args or {}).get("kv_transfer_params")
        return found if isinstance(found, dict) and found else None

    @property
    def num_tokens(self) -> int:
        """Known tokens, generated ones included."""
        return len(self.token_ids)

    @property
    def aborted(self) -> bool:
        """True if the client gave up, or the engine did."""
        return self.finish_reason in (FinishReason.ABORT, FinishReason.ERROR)

    # ---- the scheduler's --------------------------------------------------------------------

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens known so far (of the current piece of input)."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_planned_tokens(self) -> int:
        """Known tokens and those that scheduled steps will add."""
        return len(self.token_ids) + self.num_placeholders

    def extend_hashes(self) -> None:
        """Hash the blocks that have become full."""
        extend_chain(self.block_hashes, self.token_ids, self.block_size, self.cache_salt)

    def append_token(self, token: int) -> None:
        """One more generated token."""
        self.token_ids.append(token)
        if len(self.token_ids) % self.block_size == 0:
            self.extend_hashes()

    def roll_back(self, num_computed_tokens: int) -> None:
        """Go back to `num_computed_tokens`; what scheduled steps bring for it counts no more."""
        self.num_computed_tokens = num_computed_tokens
        self.num_drop = self.num_in_flight
        self.num_placeholders = 0
        self.send_tokens = True

    def extend_prompt(self, message: EngineCoreRequest) -> None:
        """Go on with the next piece of streaming input.

        What was generated so far becomes part of the prompt, but for the last token, whose KV
        was never computed (as in vLLM).
        """
        keep = len(self.token_ids) - (1 if self.num_output_tokens else 0)
        del self.token_ids[keep:]
        del self.block_hashes[keep // self.block_size :]
        self.token_ids.extend(message.prompt_token_ids or ())
        self.extend_hashes()
        self.num_prompt_tokens = len(self.token_ids)
        if message.sampling_params is not None:
            self.params = message.sampling_params
        self.arrival_time = message.arrival_time
        self.finish_reason = self.stop_reason = None
        self.prefilled = False
        self.send_tokens = True

    def usage(self) -> Usage:
        """Counts for the client."""
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            local_cached_tokens=self.local_cached_tokens,
            external_cached_tokens=self.external_cached_tokens,
            output_tokens=self.num_output_tokens,
        )
