"""kv_hints from the client to the index, through the shim's HTTP front end and its engine."""

from __future__ import annotations

from typing import Any

import pytest

from connector.ids import SessionKey
from engine_shim.api import RequestOptions
from engine_shim.errors import InvalidRequest
from engine_shim.protocol import KvHintAction, KvHintsEnvelope, SamplingParams
from engine_shim.validation import build_message
from tests.integration.conversation_kit import Fleet, Talk


def envelope(kind: str, payload: dict[str, Any], version: str = "1") -> dict[str, Any]:
    action = {"action_id": "a", "action_type": kind, "action_version": version, "payload": payload}
    return {"protocol_version": "1", "message_id": "m", "actions": [action]}


def say(fleet: Fleet, talk: Talk, hints: dict[str, Any], typed: bool = False) -> None:
    """One more turn of the conversation, with hints."""
    shim = fleet.engines[0]
    struct = KvHintsEnvelope("1", "m", [KvHintAction(**a) for a in hints["actions"]])
    options = RequestOptions(
        session_id=talk.session,
        kv_hints=struct if typed else None,
        kv_transfer_params=None if typed else {"kv_hints": hints},
    )
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    shim.add(build_message(talk.history, params, options, f"hint-{typed}", 0.0))
    shim.run_all()


def the_session(fleet: Fleet) -> Any:
    _, (state,) = fleet.index().sessions()
    return state


@pytest.mark.parametrize("typed", [False, True])
def test_hints_reach_the_index_and_their_outcome_the_metrics(typed: bool) -> None:
    with Fleet(pattern=True) as fleet:
        shim = fleet.engine()
        talk = Talk(fleet, "s", 40)
        talk.turn(shim)
        say(fleet, talk, envelope("pin", {"ttl_s": 60}), typed)
        assert the_session(fleet).pinned_until_ms > 0
        assert shim.counters()["hints_pin{outcome=accepted}"] == 1


def test_release_ends_the_conversation_with_its_last_turn() -> None:
    with Fleet(pattern=True) as fleet:
        shim = fleet.engine()
        talk = Talk(fleet, "s", 40)
        talk.turn(shim)
        depth = fleet.listed(talk.history)
        assert depth > 0
        say(fleet, talk, envelope("release", {}))
        assert the_session(fleet).blocks == 0
        assert fleet.listed(talk.history) <= depth, "the last turn was not saved any more"


def test_demote_and_retain_bias_the_session() -> None:
    with Fleet(pattern=True) as fleet:
        shim = fleet.engine()
        talk = Talk(fleet, "s", 40)
        talk.turn(shim)
        say(fleet, talk, envelope("demote", {}))
        assert the_session(fleet).priority < 0
        say(fleet, talk, envelope("retain", {"priority": 2, "ttl_s": 5}), typed=True)
        assert the_session(fleet).priority == 2


def test_unknown_actions_are_ignored_and_counted() -> None:
    with Fleet(pattern=True) as fleet:
        shim = fleet.engine()
        talk = Talk(fleet, "s", 40)
        say(fleet, talk, envelope("teleport", {}))
        assert shim.counters()["hints{outcome=unknown}"] == 1


@pytest.mark.parametrize(
    ("hints", "session", "names"),
    [
        (envelope("pin", {}), "s", "ttl_s"),
        (envelope("retain", {"priority": "high", "ttl_s": 1}), "s", "priority"),
        (envelope("pin", {"ttl_s": 5}), None, "session_id"),
        ({"actions": "all"}, "s", "actions"),
    ],
)
def test_malformed_hints_are_the_clients_error(
    hints: dict[str, Any], session: str | None, names: str
) -> None:
    options = RequestOptions(session_id=session, kv_transfer_params={"kv_hints": hints})
    with pytest.raises(InvalidRequest, match=names):
        build_message([1, 2, 3], SamplingParams(), options, "r", 0.0)


def test_another_sessions_hints_reach_nobody_else() -> None:
    with Fleet(pattern=True) as fleet:
        shim = fleet.engine()
        mine, other = Talk(fleet, "mine", 40), Talk(fleet, "other", 40)
        mine.turn(shim)
        other.turn(shim)
        say(fleet, other, envelope("release", {}))
        assert fleet.listed(mine.history) > 0
        assert isinstance(the_key(fleet), bytes)


def the_key(fleet: Fleet) -> SessionKey:
    """Ids are only ever in the store as keys of 16 bytes."""
    _, states = fleet.index().sessions()
    assert all(len(state.session) == 16 for state in states)
    return states[0].session
