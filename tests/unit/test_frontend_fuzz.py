"""Whatever comes in: an answer or a shaped 4xx, never a 500, and the next request is served."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_shim.frontend.app import build_app
from engine_shim.frontend.entrances import HTTP_ENTRANCES
from engine_shim.frontend.state import Frontend
from tests.frontend_fakes import FakeEngine, asgi_client

GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
    "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2}},
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 2}},
}
# Every field that any body has, so that a wrong type meets the code behind it.
FIELDS = sorted({f for row in HTTP_ENTRANCES for f in row.body.__struct_fields__})
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 5), st.integers(), st.floats(allow_nan=False),
    st.text(max_size=8), st.sampled_from(["text", "user", "tokens", "x" * 300, "\u0000"]),
)  # fmt: skip
NAMES = st.sampled_from(
    [*FIELDS, "role", "content", "type", "text", "id", "rid", "max_tokens", "session_kv", "offset"]
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)
FUZZ = settings(
    max_examples=120, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip


def post(path: str, content: bytes) -> list[httpx.Response]:
    """The replies to this body and to a good one after it."""

    async def run() -> list[httpx.Response]:
        async with asgi_client(build_app(Frontend(FakeEngine()))) as client:
            good = json.dumps(GOOD[path]).encode()
            return [await client.post(path, content=raw) for raw in (content, good)]

    return asyncio.run(run())


def check(path: str, content: bytes) -> None:
    reply, after = post(path, content)
    assert reply.status_code < 500, (content, reply.text)
    if reply.status_code >= 400:
        error = reply.json()["error"]
        assert error["message"] and error["type"] == "invalid_request_error"
    elif reply.headers["content-type"].startswith("text/event-stream"):
        assert b"internal_error" not in reply.content
    assert after.status_code == 200


@pytest.mark.parametrize("path", sorted(GOOD))
def test_any_field_may_hold_anything(path: str) -> None:
    @FUZZ
    @given(st.dictionaries(st.sampled_from(FIELDS), VALUES, min_size=1, max_size=3))
    def run(change: dict[str, Any]) -> None:
        check(path, json.dumps({**GOOD[path], **change}).encode("utf-8", "surrogatepass"))

    run()


@pytest.mark.parametrize("path", sorted(GOOD))
def test_any_json_and_any_bytes(path: str) -> None:
    @settings(FUZZ, max_examples=40)
    @given(VALUES.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=40))
    def run(content: bytes) -> None:
        check(path, content)

    run()


def test_paths_are_those_of_the_entrances() -> None:
    assert set(GOOD) == {row.path for row in HTTP_ENTRANCES}
