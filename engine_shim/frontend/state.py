"""What all handlers of one front end share."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec

from connector.clock import Clock, SystemClock
from connector.session import DEFAULT_HEADERS
from engine_shim.api import Delta, RequestOptions
from engine_shim.client import fan_out
from engine_shim.errors import InvalidRequest
from engine_shim.frontend.engine import EnginePort
from engine_shim.frontend.legacy import LegacySessions
from engine_shim.frontend.merge import close_all
from engine_shim.frontend.plan import Context, Plan
from engine_shim.identity import Identity
from engine_shim.protocol import SamplingParams

REQUEST_ID_HEADER = "x-request-id"
REQUEST_ID_CHARS_MAX = 128
DEFAULT_MODEL = "shim"


class FrontendConfig(msgspec.Struct, frozen=True):
    """session_headers: as in the connector's config. bytes_per_token: KV of one token on all
    ranks. block_size: tokens per block."""

    served_model_name: str = DEFAULT_MODEL
    session_headers: tuple[str, ...] = DEFAULT_HEADERS
    bytes_per_token: int = 0


class Frontend:
    """The engine, the config and what the front end itself remembers."""

    def __init__(
        self, engine: EnginePort, config: FrontendConfig | None = None, clock: Clock | None = None
    ) -> None:
        self.engine = engine
        self.config = config or FrontendConfig()
        self.clock = clock or SystemClock()
        self.legacy = LegacySessions()
        self.started = self.now()

    def now(self) -> int:
        """Seconds since the epoch."""
        return self.clock.wall_ms() // 1000

    def check_model(self, model: str | None) -> None:
        """Raises InvalidRequest (404) for a model that is not served."""
        if model not in (None, "", self.config.served_model_name):
            raise InvalidRequest(
                f"the model {model!r} does not exist; this server has"
                f" {self.config.served_model_name!r}",
                param="model", code="model_not_found", status=404,
            )  # fmt: skip

    def context(self, identity: Identity, request_id: str | None) -> Context:
        """A request's context; an id of the client's that is unfit is replaced."""
        return Context(
            request_id=_fit(request_id) or uuid.uuid4().hex,
            created=self.now(),
            model=self.config.served_model_name,
            max_model_len=self.engine.info.max_model_len,
            identity=identity,
            legacy=self.legacy,
            clock=self.clock,
        )

    async def open_streams(
        self, plan: Plan, options: RequestOptions
    ) -> list[AsyncIterator[Delta]]:
        """One stream per sequence of the plan; see `open_sequences`."""
        return await self.open_sequences(plan.prompts, plan.params, options)

    async def open_sequences(
        self, prompts: Sequence[list[int]], params: SamplingParams, options: RequestOptions
    ) -> list[AsyncIterator[Delta]]:
        """prompts x params.n streams; close them all. Raises InvalidRequest, leaving none open."""
        check_sendable(params, options)
        streams: list[AsyncIterator[Delta]] = []
        try:
            for prompt in prompts:
                for child_params, child in fan_out(params, options):
                    streams.append(self.engine.generate(prompt, child_params, child))
        except BaseException:
            await close_all(streams)
            raise
        return streams


def check_sendable(params: SamplingParams, options: RequestOptions) -> None:
    """Whatever a client put into its free-form fields must fit into a message to the engine.

    Raises InvalidRequest.
    """
    try:
        msgspec.msgpack.encode((params, options))
    except (OverflowError, RecursionError, TypeError, ValueError) as error:
        raise InvalidRequest(
            f"a value in vllm_xargs, kv_transfer_params or kv_hints can't be sent on: {error}",
            code="invalid_value",
        ) from error


def _fit(request_id: str | None) -> str:
    """The id if a header can carry it, else an empty string."""
    text = request_id or ""
    usable = text.isprintable() and text.isascii() and text == text.strip()
    return text if usable and len(text) <= REQUEST_ID_CHARS_MAX else ""


def connector_stats(stats: Mapping[str, object]) -> Mapping[str, Any]:
    """The connector's part of the engine's stats; empty without one."""
    found = stats.get("connector")
    return found if isinstance(found, Mapping) else {}
