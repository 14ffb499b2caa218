"""kv_hints: what is accepted, what is ignored, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from connector.errors import HintError
from connector.hints import parse_hints
from connector.lookup import HintKind, HintOp


def envelope(*actions: dict[str, Any]) -> dict[str, Any]:
    return {"protocol_version": "1", "message_id": "m", "actions": list(actions)}


def action(kind: str, payload: Any = None, version: Any = "1") -> dict[str, Any]:
    return {
        "action_id": "a",
        "action_type": kind,
        "action_version": version,
        "payload": {} if payload is None else payload,
    }


def test_no_hints_are_no_actions() -> None:
    assert parse_hints(None, None, None).ops == ()


@pytest.mark.parametrize(
    ("kind", "payload", "expected"),
    [
        ("pin", {"ttl_s": 5}, HintOp("s", "x", HintKind.PIN, 5.0)),
        ("retain", {"priority": -2, "ttl_s": 1.5}, HintOp("s", "x", HintKind.RETAIN, 1.5, -2)),
        ("release", {}, HintOp("s", "x", HintKind.RELEASE)),
        ("demote", {}, HintOp("s", "x", HintKind.DEMOTE)),
    ],
)
def test_known_actions_become_operations_on_the_session(
    kind: str, payload: dict[str, Any], expected: HintOp
) -> None:
    assert parse_hints(envelope(action(kind, payload)), "s", "x").ops == (expected,)


@pytest.mark.parametrize("unknown", [action("prefetch"), action("pin", {"ttl_s": 1}, "2")])
def test_unknown_types_and_versions_are_ignored_and_counted(unknown: dict[str, Any]) -> None:
    parsed = parse_hints(envelope(unknown, action("demote")), "s", None)
    assert parsed.ignored == 1
    assert [op.kind for op in parsed.ops] == [HintKind.DEMOTE]


@pytest.mark.parametrize(
    "bad",
    [
        "text",
        7,
        {"actions": None},
        {"actions": "pin"},
        {"actions": ["pin"]},
        envelope({"action_type": 3}),
        envelope(action("pin")),
        envelope(action("pin", {"ttl_s": "5"})),
        envelope(action("pin", {"ttl_s": True})),
        envelope(action("pin", {"ttl_s": 0})),
        envelope(action("pin", {"ttl_s": float("nan")})),
        envelope(action("pin", [1])),
        envelope(action("retain", {"ttl_s": 1, "priority": 0.5})),
        envelope(action("retain", {"ttl_s": 1, "priority": 99})),
        envelope(*[action("demote")] * 33),
    ],
)
def test_malformed_envelopes_are_refused_with_their_place(bad: object) -> None:
    with pytest.raises(HintError, match="kv_hints"):
        parse_hints(bad, "s", None)


def test_a_hint_needs_a_session() -> None:
    with pytest.raises(HintError, match="session_id"):
        parse_hints(envelope(action("demote")), None, None)
