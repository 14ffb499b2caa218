"""Our session rules and our golden wire vectors against vLLM's own code: no server, no engine.

The golden tables are the ones that every front end is tested with (tests/wire/golden).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pydantic
import pytest
from starlette.requests import Request as HttpRequest
from vllm import SamplingParams as VllmSampling
from vllm.entrypoints.generate.base.serving import GenerateBaseServing
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.v1.engine import EngineCoreRequest as VllmRequest
from vllm.v1.kv_hints import KvHintsEnvelope as VllmHints
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from connector.errors import SessionIdError
from connector.session import DEFAULT_HEADERS, resolve_session_id
from engine_shim import protocol

GOLDEN = Path(__file__).resolve().parents[1] / "wire" / "golden"
SESSIONS = json.loads((GOLDEN / "session_resolution.json").read_text(encoding="utf-8"))["cases"]
REQUESTS = json.loads((GOLDEN / "engine_core_request_vllm.json").read_text(encoding="utf-8"))

USER = [{"role": "user", "content": "hi"}]
ENTRANCES: dict[str, tuple[type[pydantic.BaseModel], dict[str, Any]]] = {
    "chat": (ChatCompletionRequest, {"model": "m", "messages": USER}),
    "completions": (CompletionRequest, {"model": "m", "prompt": "hi"}),
    "responses": (ResponsesRequest, {"model": "m", "input": "hi"}),
}


def body_of(entrance: str, case: dict[str, Any]) -> pydantic.BaseModel:
    """vLLM's own request object for a case. Raises ValidationError where vLLM says 400."""
    cls, fields = ENTRANCES[entrance]
    more = {
        "session_id": case.get("body"),
        "vllm_xargs": case.get("xargs"),
        "kv_transfer_params": case.get("kv_transfer_params"),
    }
    return cls(**fields, **{name: value for name, value in more.items() if value is not None})


def http_of(case: dict[str, Any]) -> HttpRequest:
    """A raw request with the case's headers, as an ASGI server hands it over."""
    headers = [
        (name.lower().encode(), value.encode("latin-1"))
        for name, value in (case.get("headers") or {}).items()
    ]
    return HttpRequest({"type": "http", "headers": headers})


def accepted(case: dict[str, Any]) -> bool:
    """Would vLLM take it, and does it look at the same headers?"""
    if tuple(case.get("header_names", DEFAULT_HEADERS)) != DEFAULT_HEADERS:
        return False
    try:
        body_of("chat", case)
    except pydantic.ValidationError:
        return False
    return True


ACCEPTED = [case for case in SESSIONS if accepted(case)]


def test_vllm_accepts_most_of_the_table() -> None:
    assert len(ACCEPTED) > len(SESSIONS) * 2 // 3
    refused = [case for case in SESSIONS if case not in ACCEPTED]
    assert all(
        not isinstance(case.get("body", ""), str)
        or "header_names" in case
        or any(not isinstance(v, str) for v in (case.get("xargs") or {}).values())
        for case in refused
    ), "vLLM refuses non-strings, and knows no other header"


@pytest.mark.parametrize("entrance", ENTRANCES)
@pytest.mark.parametrize("case", ACCEPTED, ids=lambda case: str(case["name"]))
def test_vllms_resolution_and_ours_agree(entrance: str, case: dict[str, Any]) -> None:
    """What vLLM puts on the Request, and what our adapter makes of all that a Request has."""
    body, http = body_of(entrance, case), http_of(case)
    theirs = GenerateBaseServing._get_session_id(body, http)  # type: ignore[arg-type]
    extra = {**(case.get("xargs") or {}), "kv_transfer_params": case.get("kv_transfer_params")}
    channels = {"body": theirs, "xargs": extra, "kv_transfer_params": extra["kv_transfer_params"]}
    if case.get("error"):
        with pytest.raises(SessionIdError):
            resolve_session_id(**channels)
        return
    assert resolve_session_id(**channels) == case["expect"]
    own = {k: case.get(k) for k in ("body", "headers", "xargs")}
    assert resolve_session_id(**own) == theirs, "without P/D parameters, which vLLM ignores"


@pytest.mark.parametrize("case", ACCEPTED, ids=lambda case: str(case["name"]))
def test_tokens_in_entrance_reads_the_header_only(case: dict[str, Any]) -> None:
    theirs = GenerateBaseServing._get_session_id_from_headers(http_of(case))
    try:
        assert resolve_session_id(headers=case.get("headers")) == theirs
    except SessionIdError:
        assert theirs is not None


def vllm_request(case: dict[str, Any]) -> VllmRequest:
    """A case as vLLM's own object."""
    fields = {**dict.fromkeys(FIRST_FIELDS), **case["request"]}
    if fields.get("kv_hints") is not None:
        fields["kv_hints"] = msgspec.convert(fields["kv_hints"], VllmHints)
    return VllmRequest(**{**fields, "sampling_params": VllmSampling(**case["sampling_params"])})


FIRST_FIELDS = REQUESTS["fields"][:9]  # those without a default
SAMPLING = protocol.SamplingParams.__struct_fields__
PLAIN = [f for f in REQUESTS["fields"] if f not in ("sampling_params", "kv_hints")]


@pytest.mark.parametrize("case", REQUESTS["cases"], ids=lambda case: str(case["name"]))
def test_golden_bytes_are_what_vllm_reads_and_writes(case: dict[str, Any]) -> None:
    found = MsgpackDecoder(VllmRequest).decode(bytes.fromhex(case["hex"]))
    (data, *more) = MsgpackEncoder().encode(found)
    assert not more and bytes(data).hex() == case["hex"]


@pytest.mark.parametrize("case", REQUESTS["cases"], ids=lambda case: str(case["name"]))
def test_ours_reads_vllms(case: dict[str, Any]) -> None:
    found = msgspec.msgpack.decode(bytes.fromhex(case["hex"]), type=protocol.EngineCoreRequest)
    same(found, vllm_request(case))


def same(ours: protocol.EngineCoreRequest, theirs: VllmRequest) -> None:
    """Every field that the shim uses has the same value on both sides."""
    for name in PLAIN:
        assert getattr(ours, name) == getattr(theirs, name), name
    assert msgspec.to_builtins(ours.kv_hints) == msgspec.to_builtins(theirs.kv_hints)
    assert ours.sampling_params is not None and theirs.sampling_params is not None
    for name in SAMPLING:
        mine, other = getattr(ours.sampling_params, name), getattr(theirs.sampling_params, name)
        assert (mine or None) == (other or None), name
