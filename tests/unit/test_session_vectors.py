"""The golden cases of session resolution: what any front end, in any language, must agree on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from connector.errors import SessionIdError
from connector.session import DEFAULT_HEADERS, SESSION_ID_BYTES_MAX, resolve_session_id
from engine_shim.errors import InvalidRequest
from engine_shim.frontend.identity import header_text, reply_header
from engine_shim.identity import identify

GOLDEN = Path(__file__).parent.parent / "wire" / "golden" / "session_resolution.json"
CASES: list[dict[str, Any]] = json.loads(GOLDEN.read_text(encoding="utf-8"))["cases"]
CHANNELS = ("body", "headers", "xargs", "kv_transfer_params")


def channels(case: dict[str, Any]) -> dict[str, Any]:
    given = {name: case.get(name) for name in CHANNELS}
    return {**given, "header_names": case.get("header_names", DEFAULT_HEADERS)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["name"]))
def test_resolution(case: dict[str, Any]) -> None:
    if case.get("error"):
        with pytest.raises(SessionIdError):
            resolve_session_id(**channels(case))
    else:
        assert resolve_session_id(**channels(case)) == case["expect"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["name"]))
def test_identity_agrees_and_leaves_no_copy(case: dict[str, Any]) -> None:
    if case.get("error"):
        with pytest.raises(InvalidRequest) as caught:
            identify(**channels(case))
        assert (caught.value.status, caught.value.param) == (400, "session_id")
        return
    found = identify(**channels(case))
    assert found.session_id == case["expect"]
    assert "session_id" not in (found.xargs or {})
    assert "session_id" not in (found.kv_transfer_params or {})


def test_cases_are_complete_and_named_once() -> None:
    names = [case["name"] for case in CASES]
    assert len(set(names)) == len(names)
    assert all(("expect" in case) != ("error" in case) for case in CASES)
    for channel in CHANNELS:
        assert any(case.get(channel) for case in CASES)
    longest = [c["body"] for c in CASES if isinstance(c.get("body"), str) and "expect" in c]
    assert max(len(value.encode()) for value in longest) == SESSION_ID_BYTES_MAX


def test_other_keys_of_xargs_and_params_stay() -> None:
    found = identify(None, None, {"session_id": "x", "a": 1}, {"session_id": 5, "b": 2})
    assert (found.session_id, found.xargs, found.kv_transfer_params) == ("x", {"a": 1}, {"b": 2})
    assert identify(xargs={"session_id": "x"}).xargs is None


@pytest.mark.parametrize("text", ["plain", "é", "会话", "a b", "🧵"])
def test_id_of_a_reply_header_is_read_back_as_the_same_id(text: str) -> None:
    raw = reply_header(text)
    assert header_text(raw)["x-session-id"] == text


@pytest.mark.parametrize(("text", "value"), [(" a", b"%20a"), ("a  ", b"a%20%20"), (" ", b"%20")])
def test_spaces_at_the_ends_are_encoded(text: str, value: bytes) -> None:
    assert reply_header(text) == [(b"x-session-id", value)]


def test_header_that_is_not_utf8_is_latin1_and_the_first_of_two_counts() -> None:
    found = header_text([(b"X-A", b"\xe9"), (b"x-a", b"second"), (b"x-b", "é".encode())])
    assert found == {"x-a": "é", "x-b": "é"}


def test_no_id_no_reply_header() -> None:
    assert reply_header(None) == []
