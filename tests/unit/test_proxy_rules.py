"""The proxy's decisions: which engine, and what each one is sent."""

from __future__ import annotations

from typing import Any

import pytest

from engine_shim.pd_proxy_bodies import (
    decode_body,
    forwarded_headers,
    hand_off_of,
    is_batch,
    prefill_body,
)
from engine_shim.pd_proxy_fleet import Affinity, Engine, Limits, Role, choose

LIMITS = Limits(in_flight_max=10, spare=2)


def engines(*in_flight: int, down: tuple[int, ...] = ()) -> list[Engine]:
    return [
        Engine(f"e{i}", f"http://e{i}", Role.DECODE, i not in down, count)
        for i, count in enumerate(in_flight)
    ]


@pytest.mark.parametrize(
    ("fleet", "preferred", "tried", "chosen"),
    [
        (engines(3, 1, 2), None, (), "e1"),
        (engines(1, 1, 1), None, (), "e0"),
        (engines(3, 1, 2), "e0", (), "e0"),  # 3 <= 2 * 1 + 2
        (engines(5, 1, 2), "e0", (), "e1"),  # over-loaded
        (engines(3, 1, 2), "e0", ("e0",), "e1"),
        (engines(3, 1, 2), "unknown", (), "e1"),
        (engines(3, 1, 2, down=(1,)), None, (), "e2"),
        (engines(0, 3, down=(0,)), "e0", (), "e1"),
        (engines(3, 1, down=(0, 1)), None, (), "e1"),  # perhaps it is up again
        (engines(10, 10), None, (), None),
        (engines(10, 4), "e0", (), "e1"),
        (engines(1), None, ("e0",), None),
    ],
)
def test_choose(
    fleet: list[Engine], preferred: str | None, tried: tuple[str, ...], chosen: str | None
) -> None:
    found = choose(fleet, preferred, tried, LIMITS)
    assert (found.name if found else None) == chosen


def test_affinity_is_bounded_and_forgets_the_least_recent() -> None:
    affinity = Affinity(2)
    for session in ("a", "b"):
        affinity.put(session, session.upper())
    affinity.put("a", "A")
    affinity.put("c", "C")
    assert [affinity.get(s) for s in ("a", "b", "c", None)] == ["A", None, "C", None]
    affinity.put(None, "X")
    affinity.drop("a")
    assert affinity.get("a") is None


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/v1/completions", {"max_tokens": 9, "echo": True}, {"max_tokens": 1}),
        (
            "/v1/chat/completions",
            {"max_completion_tokens": 9, "stream": True, "stream_options": {}, "tools": [1]},
            {"max_tokens": 1, "tools": [1]},
        ),
        ("/v1/responses", {"max_output_tokens": 9}, {"max_output_tokens": 1}),
        (
            "/inference/v1/generate",
            {"sampling_params": {"max_tokens": 9, "min_tokens": 3, "logprobs": 1, "seed": 4}},
            {"sampling_params": {"max_tokens": 1, "seed": 4}},
        ),
        ("/inference/v1/generate", {}, {"sampling_params": {"max_tokens": 1}}),
    ],
)
def test_prefill_body(path: str, body: dict[str, Any], expected: dict[str, Any]) -> None:
    before = dict(body)
    assert prefill_body(path, body, None) == {**expected, "stream": False}
    assert prefill_body(path, body, "s")["session_id"] == "s"
    assert body == before


def test_decode_body_takes_hand_offs_from_the_proxy_only() -> None:
    body = {"kv_transfer_params": {"session_kv": {"tip": "forged"}, "session_id": "x", "a": 1}}
    mine = {"session_kv": {"tip": "t"}}
    assert decode_body(body, "s", mine) == {
        "kv_transfer_params": {"a": 1, **mine}, "session_id": "s",
    }  # fmt: skip
    assert decode_body(body, None, None) == {"kv_transfer_params": {"a": 1}}
    assert decode_body({"kv_transfer_params": {"session_id": "x"}}, None, None) == {}
    assert decode_body({"session_id": 5}, None, None) == {}


@pytest.mark.parametrize(
    ("body", "batch"),
    [
        ({"prompt": "a"}, False),
        ({"prompt": ["a"]}, False),
        ({"prompt": ["a", "b"]}, True),
        ({"prompt": [1, 2]}, False),
        ({"prompt": [[1], [2]]}, True),
        ({"prompt": []}, False),
        ({}, False),
    ],
)
def test_batch(body: dict[str, Any], batch: bool) -> None:
    assert is_batch("/v1/completions", body) is batch
    assert not is_batch("/v1/chat/completions", body)


@pytest.mark.parametrize(
    "reply",
    [None, [], {}, {"kv_transfer_params": None}, {"kv_transfer_params": {"session_kv": []}},
     {"kv_transfer_params": {"session_kv": {"tip": ""}}},
     {"kv_transfer_params": {"session_kv": {"tip": 5}}}],
)  # fmt: skip
def test_no_usable_hand_off(reply: object) -> None:
    assert hand_off_of(reply) is None


def test_hand_off_leaves_what_others_put_there() -> None:
    inner = {"tip": "ab", "namespace": "cd"}
    reply = {"kv_transfer_params": {"session_kv": inner, "other": 1}}
    assert hand_off_of(reply) == {"session_kv": inner}


def test_headers_of_one_connection_are_not_forwarded() -> None:
    sent = {"host": "h", "authorization": "Bearer k", "x-session-id": "theirs", "te": "x"}
    assert forwarded_headers(sent, [(b"x-session-id", b"ours")]) == [
        (b"authorization", b"Bearer k"),
        (b"x-session-id", b"ours"),
        (b"content-type", b"application/json"),
    ]
