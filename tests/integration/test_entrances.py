"""Every entrance x channel x value: the session that the *store thread* saw.

The real connector runs in the engine with a store in memory; its store threads name the session of
each job in their debug log, as the first digits of the keyed hash, and that is what is asserted.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from starlette.routing import Route

from engine_shim.client import AsyncClient
from engine_shim.frontend.app import build_app
from engine_shim.frontend.entrances import ENTRANCES, HTTP_ENTRANCES, Kind
from engine_shim.frontend.state import Frontend
from engine_shim.llm import LLM
from engine_shim.proto import shim_pb2, shim_pb2_grpc
from tests.frontend_fakes import FakeEngine
from tests.integration.entrance_senders import (
    FIELDS,
    SENDERS,
    Ask,
    Python,
    digest,
    flag,
    python_apis,
    seen,
)
from tests.shim_server import ShimServer
from tests.waiting import eventually

HEADER = "X-Session-ID"
LONG, TOO_LONG = "l" * 256, "t" * 257
# name: (channels, expected id, or 400). The header's value is sent as UTF-8.
CASES: dict[str, tuple[dict[str, Any], str | int | None]] = {
    "nothing": ({}, None),
    "body": ({"body": "b"}, "b"),
    "header": ({"headers": {HEADER: "h"}}, "h"),
    "xargs": ({"xargs": {"session_id": "x"}}, "x"),
    "params": ({"params": {"session_id": "p"}}, "p"),
    "body-header": ({"body": "b", "headers": {HEADER: "h"}}, "b"),
    "header-xargs": ({"headers": {HEADER: "h"}, "xargs": {"session_id": "x"}}, "h"),
    "body-xargs": ({"body": "b", "xargs": {"session_id": "x"}}, "b"),
    "xargs-params": ({"xargs": {"session_id": "x"}, "params": {"session_id": "p"}}, "x"),
    "all": (
        {
            "body": "b", "headers": {HEADER: "h"}, "xargs": {"session_id": "x"},
            "params": {"session_id": "p"},
        },
        "b",
    ),
    "empty-body-header": ({"body": "", "headers": {HEADER: "h"}}, "h"),
    "empty-body-xargs": ({"body": "", "xargs": {"session_id": "x"}}, "x"),
    "empty-header-xargs": ({"headers": {HEADER: ""}, "xargs": {"session_id": "x"}}, "x"),
    "all-empty": ({"body": "", "xargs": {"session_id": ""}, "params": {"session_id": ""}}, None),
    "number-body-header": ({"body": 7, "headers": {HEADER: "h"}}, "h"),
    "number-body": ({"body": 7}, None),
    "bool-body-xargs": ({"body": True, "xargs": {"session_id": "x"}}, "x"),
    "list-body": ({"body": ["s"]}, None),
    "object-body": ({"body": {"id": "s"}}, None),
    "number-xargs-params": ({"xargs": {"session_id": 7}, "params": {"session_id": "p"}}, "p"),
    "list-params": ({"params": {"session_id": ["p"]}}, None),
    "unicode-body": ({"body": "会话-é-🧵"}, "会话-é-🧵"),
    "unicode-header": ({"headers": {HEADER: "会话-é"}}, "会话-é"),
    "unicode-xargs": ({"xargs": {"session_id": "会话"}}, "会话"),
    "longest": ({"body": LONG}, LONG),
    "long-body": ({"body": TOO_LONG}, 400),
    "long-header": ({"headers": {HEADER: TOO_LONG}}, 400),
    "long-xargs": ({"xargs": {"session_id": TOO_LONG}}, 400),
    "long-params": ({"params": {"session_id": TOO_LONG}}, 400),
    "control-body": ({"body": "a\nb"}, 400),
    "control-xargs": ({"xargs": {"session_id": "a\x00b"}}, 400),
    "long-body-good-header": ({"body": TOO_LONG, "headers": {HEADER: "h"}}, 400),
    "correlation": ({"headers": {"X-Correlation-ID": "c"}}, None),
}  # fmt: skip
KINDS = {row.name: row.kind for row in ENTRANCES}


def sendable(entrance: str, channels: dict[str, Any]) -> bool:
    """Can the entrance express this at all? Only JSON has untyped fields, and only HTTP's headers
    hold bytes beyond ASCII."""
    has = SENDERS[entrance][1]
    typed = KINDS[entrance] is not Kind.HTTP
    if any(name not in has for name in channels):
        return False
    if typed and "body" in channels and not isinstance(channels["body"], str):
        return False
    return not typed or all(value.isascii() for value in channels.get("headers", {}).values())


TABLE = [
    (entrance, case)
    for entrance in SENDERS
    for case, (channels, _) in CASES.items()
    if sendable(entrance, channels)
]


@pytest.fixture(scope="module")
def shim() -> Iterator[ShimServer]:
    flags = ["--kv-transfer-config", json.dumps(flag()), "--grpc-port", "0"]
    with ShimServer(*flags, "--log-level", "debug", "--max-model-len", "2048") as server:
        yield server


@pytest.fixture(scope="module")
def python() -> Iterator[Python]:
    with python_apis() as apis:
        yield apis


@pytest.fixture
def there(request: pytest.FixtureRequest) -> Any:
    """The engine behind the entrance of this test."""
    kind = KINDS[request.node.callspec.params["entrance"]]
    return request.getfixturevalue("python" if kind is Kind.PYTHON else "shim")


@pytest.mark.parametrize(("entrance", "case"), TABLE)
def test_id_seen_by_the_store_thread(there: Any, entrance: str, case: str) -> None:
    channels, expected = CASES[case]
    send, _ = SENDERS[entrance]
    ask = Ask(f"{entrance}.{case}", **channels)
    sent = send(there, ask)
    if isinstance(expected, int):
        assert sent.status == expected
        return
    assert sent.status == 200
    if KINDS[entrance] is not Kind.PYTHON:
        assert sent.session == expected
    found = eventually(lambda: seen(there.log()).get(ask.stem), what=f"a save of {ask.stem}")
    assert found == {digest(expected)}


def test_every_entrance_has_a_row() -> None:
    assert set(SENDERS) == {row.name for row in ENTRANCES}
    for entrance in SENDERS:
        rows = {case for name, case in TABLE if name == entrance}
        assert {"nothing", "body", "xargs", "params", "long-body"} <= rows
        assert "header" in rows or KINDS[entrance] is Kind.PYTHON
    assert {channel for channels, _ in CASES.values() for channel in channels} == set(FIELDS)


def test_every_way_in_is_an_entrance() -> None:
    """The table of entrances against what can really be called."""
    no_prompt = {"/open_session", "/close_session", "/reset_prefix_cache"}
    app = build_app(Frontend(FakeEngine()))
    posts = {r.path for r in app.routes if isinstance(r, Route) and "POST" in (r.methods or ())}
    assert posts - no_prompt == {row.path for row in HTTP_ENTRANCES}
    methods = {
        f"{kind.__module__}:{kind.__name__}.{name}"
        for kind in (LLM, AsyncClient)
        for name, method in inspect.getmembers(kind, inspect.isfunction)
        if "options" in inspect.signature(method).parameters and not name.startswith("_")
    }
    assert methods == {row.path for row in ENTRANCES if row.kind is Kind.PYTHON}


# ---- what may happen to a request on its way -----------------------------------------------------


def test_batch_and_n_inherit(shim: ShimServer) -> None:
    prompts = [f"batch {index} " * 8 for index in range(2)]
    body = {
        "prompt": prompts, "n": 2, "max_tokens": 40, "seed": 5, "session_id": "batch",
        "request_id": "inherits", "ignore_eos": True,
    }  # fmt: skip
    shim.post("/v1/completions", body)

    def saved() -> bool:
        lines = [line for line in shim.log().splitlines() if "request=inherits-" in line]
        return len({line.split("request=")[1].split()[0] for line in lines}) == 4

    eventually(saved, what="saves of all four sequences")
    assert seen(shim.log())["inherits"] == {digest("batch")}


def test_load_carries_the_session(shim: ShimServer) -> None:
    body = {"prompt": "to be loaded " * 8, "max_tokens": 1, "session_id": "loads"}
    shim.post("/v1/completions", {**body, "request_id": "first"})
    eventually(lambda: "first" in seen(shim.log()))
    quiet(shim)
    shim.post("/reset_prefix_cache", {})
    usage = shim.post("/v1/completions", {**body, "request_id": "again"})["usage"]
    assert usage["prompt_tokens_details"]["external_cached_tokens"] > 0
    line = next(line for line in shim.log().splitlines() if "load job" in line and "again-" in line)
    assert f"session={digest('loads')}" in line


def test_salt_is_part_of_the_session(shim: ShimServer) -> None:
    body = {"prompt": "salted " * 8, "max_tokens": 1, "session_id": "s", "cache_salt": "pepper"}
    shim.post("/v1/completions", {**body, "request_id": "salted"})
    found = eventually(lambda: seen(shim.log()).get("salted"))
    assert found == {digest("s", "pepper")} != {digest("s")}


def test_session_changed_between_turns_moves_nothing(shim: ShimServer) -> None:
    first = {"prompt": "changing " * 8, "max_tokens": 20, "session_id": "one", "temperature": 0}
    text = shim.post("/v1/completions", {**first, "request_id": "turn1"})["choices"][0]["text"]
    quiet(shim)
    second = {**first, "prompt": first["prompt"] + text + " more of it " * 4, "session_id": "two"}
    usage = shim.post("/v1/completions", {**second, "request_id": "turn2"})["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 64
    quiet(shim)
    assert seen(shim.log())["turn1"] == {digest("one")}
    assert seen(shim.log())["turn2"] == {digest("two")}


def test_legacy_session_params_carry_their_id(shim: ShimServer) -> None:
    sid = shim.post("/open_session", {"session_id": "legacy"})
    body = {
        "text": "legacy " * 8, "sampling_params": {"max_new_tokens": 1},
        "session_params": {"id": sid}, "request_id": "legacy",
    }  # fmt: skip
    shim.post("/generate", body)
    assert eventually(lambda: seen(shim.log()).get("legacy")) == {digest("legacy")}
    reply = shim.http.post(shim.url + "/generate", json={**body, "session_id": "other"})
    assert reply.status_code == 400


def test_close_reaches_the_store(shim: ShimServer) -> None:
    def closed() -> float:
        found = re.search(r"^session_kv_sessions_closed_total (\S+)$", shim.metrics(), re.MULTILINE)
        return float(found[1]) if found else 0.0

    shim.post("/v1/completions", {"prompt": "x" * 40, "max_tokens": 1, "session_id": "over"})
    quiet(shim)
    before = closed()
    shim.post("/close_session", {"session_id": "over"})
    with grpc.insecure_channel(shim.grpc) as channel:
        request = shim_pb2.CloseSessionRequest(session_id="over")
        shim_pb2_grpc.ShimEngineStub(channel).CloseSession(request, timeout=30)
    eventually(lambda: closed() == before + 2, what="both closes at the index")


def test_request_replayed_after_preemption_keeps_its_session() -> None:
    flags = ["--kv-transfer-config", json.dumps(flag()), "--num-blocks", "24"]
    flags += ["--max-model-len", "256", "--no-enable-prefix-caching", "--log-level", "debug"]
    with ShimServer(*flags) as server:
        prompts = [f"{index} preempted " * 6 for index in range(4)]
        body = {
            "prompt": prompts, "max_tokens": 100, "session_id": "pre", "request_id": "pre",
            "ignore_eos": True,
        }  # fmt: skip
        server.post("/v1/completions", body)
        counts = server.metrics()
        assert "shim_preemptions_total 0.0" not in counts and "shim_preemptions_total" in counts
        quiet(server)
        assert seen(server.log())["pre"] == {digest("pre")}


def quiet(server: ShimServer) -> None:
    """All transfers have ended."""
    text = "session_kv_open_jobs 0.0"
    eventually(lambda: text in server.metrics(), what=text)


# ---- configured headers ------------------------------------------------------------------------


def test_correlation_id_counts_where_configured_and_comes_last() -> None:
    config = flag(session_headers=["X-Session-ID", "X-Correlation-ID"])
    flags = ["--kv-transfer-config", json.dumps(config), "--grpc-port", "0"]
    send_http, send_grpc = SENDERS["completions"][0], SENDERS["grpc"][0]
    both = {"X-Correlation-ID": "c", HEADER: "h"}
    with ShimServer(*flags, "--log-level", "debug") as server:
        for name, send in (("http", send_http), ("grpc", send_grpc)):
            alone = send(server, Ask(f"{name}.alone", headers={"X-Correlation-ID": "c"}))
            first = send(server, Ask(f"{name}.both", headers=both))
            before = Ask(f"{name}.xargs", headers={"X-Correlation-ID": "c"})
            before.xargs = {"session_id": "x"}
            assert (alone.session, first.session) == ("c", "h")
            assert send(server, before).session == "c"
        for name in ("http", "grpc"):
            stem = f"{name}.alone"
            found = eventually(lambda stem=stem: seen(server.log()).get(stem))
            assert found == {digest("c")}


# ---- what must not be told ---------------------------------------------------------------------


def test_no_id_above_debug_and_none_in_metrics() -> None:
    flags = ["--kv-transfer-config", json.dumps(flag()), "--log-level", "info"]
    with ShimServer(*flags) as server:
        body = {"prompt": "x" * 64, "max_tokens": 1, "session_id": "unspeakable-id"}
        server.post("/v1/completions", body)
        server.http.post(server.url + "/v1/completions", json={**body, "max_tokens": -1})
        server.post("/close_session", {"session_id": "unspeakable-id"})
        metrics = server.metrics()
        for text in (metrics, server.log()):
            assert "unspeakable" not in text and digest("unspeakable-id") not in text
