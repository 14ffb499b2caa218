"""Every way a request can come in, one row each. A row without a row in the tests' table of
session ids fails a test, so no entrance can be added that loses the id."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import msgspec

from engine_shim.frontend import chat, completions, native, responses, tokens_in
from engine_shim.frontend.bodies import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    NativeBody,
    ResponsesBody,
    TokensBody,
)
from engine_shim.frontend.plan import Planner


class Kind(enum.StrEnum):
    """How an entrance is reached."""

    HTTP = "http"
    GRPC = "grpc"
    PYTHON = "python"


class Entrance(msgspec.Struct, frozen=True):
    """path: URL path, gRPC method, or module:attribute."""

    name: str
    kind: Kind
    path: str


class HttpEntrance(Entrance, frozen=True, kw_only=True):
    """body: what JSON is decoded to. plan: body to work. session_of: the body's session id, as
    the client sent it."""

    body: type[GenerationBody]
    plan: Planner
    session_of: Callable[[Any], object] = lambda body: body.session_id


def _http(name: str, path: str, body: type[GenerationBody], plan: Planner) -> HttpEntrance:
    return HttpEntrance(name, Kind.HTTP, path, body=body, plan=plan)


HTTP_ENTRANCES: tuple[HttpEntrance, ...] = (
    _http("completions", "/v1/completions", CompletionBody, completions.plan),
    _http("chat", "/v1/chat/completions", ChatBody, chat.plan),
    _http("responses", "/v1/responses", ResponsesBody, responses.plan),
    _http("tokens-in", "/inference/v1/generate", TokensBody, tokens_in.plan),
    HttpEntrance(
        "native", Kind.HTTP, "/generate",
        body=NativeBody, plan=native.plan, session_of=native.session_of,
    ),
)  # fmt: skip

GRPC_PACKAGE = "session_kv.shim.v1"
GRPC_SERVICE = f"{GRPC_PACKAGE}.ShimEngine"
GRPC_ENTRANCES: tuple[Entrance, ...] = (
    Entrance("grpc", Kind.GRPC, f"/{GRPC_SERVICE}/Generate"),
    Entrance("grpc-stream", Kind.GRPC, f"/{GRPC_SERVICE}/GenerateStream"),
)

PYTHON_ENTRANCES: tuple[Entrance, ...] = (
    Entrance("python-generate", Kind.PYTHON, "engine_shim.llm:LLM.generate"),
    Entrance("python-add-request", Kind.PYTHON, "engine_shim.llm:LLM.add_request"),
    Entrance("client-generate", Kind.PYTHON, "engine_shim.client:AsyncClient.generate"),
    Entrance("client-stream-in", Kind.PYTHON, "engine_shim.client:AsyncClient.generate_stream"),
)

ENTRANCES: tuple[Entrance, ...] = (*HTTP_ENTRANCES, *GRPC_ENTRANCES, *PYTHON_ENTRANCES)
