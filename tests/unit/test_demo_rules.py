"""What the demos call right and wrong."""

from __future__ import annotations

import msgspec
import pytest

from engine_shim import demo, demo_pd
from engine_shim.demo import Answer, HandedTurn, Turn, conversation, needed
from engine_shim.demo_processes import SAMPLE


def answer(prompt: int, reply: int) -> Answer:
    return Answer("x", prompt, reply, 0.1, {})


@pytest.mark.parametrize(
    ("before", "prompt", "need"),
    [
        (None, 100, 0),
        (answer(100, 28), 200, 112),  # (100 + 28 - 1) // 16 = 7: the last token has no KV
        (answer(100, 29), 200, 128),
        (answer(100, 29), 128, 112),  # one token of the prompt is always computed
        (answer(100, 29), 129, 128),
        (answer(3, 2), 50, 0),
    ],
)
def test_needed(before: Answer | None, prompt: int, need: int) -> None:
    assert needed(16, before, prompt) == need


GOOD = Turn(
    turn=2, engine="B", prompt_tokens=200, reply_tokens=16, own_tokens=0, loaded_tokens=112,
    need_tokens=112, ttft_s=0.1, equal=True,
)  # fmt: skip


def test_fields_of_a_turn_are_the_promised_ones() -> None:
    assert list(msgspec.to_builtins(GOOD)) == [
        "turn", "engine", "prompt_tokens", "reply_tokens", "own_tokens", "loaded_tokens",
        "need_tokens", "ttft_s", "equal",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, []),
        ({"equal": False}, ["differs"]),
        ({"loaded_tokens": 96}, ["96 tokens were not computed, 112 needed"]),
        ({"own_tokens": 112, "loaded_tokens": 0}, ["nothing was loaded"]),
        ({"turn": 3, "own_tokens": 112, "loaded_tokens": 0}, []),
    ],
)
def test_faults_of_a_turn(change: dict[str, object], words: list[str]) -> None:
    found = demo.faults(msgspec.structs.replace(GOOD, **change))
    assert len(found) == len(words)
    assert all(word in fault for word, fault in zip(words, found, strict=True))


HANDED = HandedTurn(
    turn=2, prefilled_by="prefill-0", decoded_by="decode-0", prompt_tokens=200, reply_tokens=16,
    prefill_own_tokens=96, prefill_loaded_tokens=16, prefill_need_tokens=112,
    decode_own_tokens=112, decode_loaded_tokens=80, decode_need_tokens=192, ttft_s=0.1, equal=True,
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, []),
        ({"equal": False}, ["differs"]),
        ({"prefill_loaded_tokens": 0}, ["prefill did not", "loaded nothing"]),
        ({"decode_loaded_tokens": 64}, ["decode did not"]),
        ({"decoded_by": "-"}, ["both engines"]),
    ],
)
def test_faults_of_a_handed_turn(change: dict[str, object], words: list[str]) -> None:
    found = demo_pd.faults(msgspec.structs.replace(HANDED, **change))
    assert len(found) == len(words)
    assert all(word in fault for word, fault in zip(words, found, strict=True))


def test_conversation_has_as_many_turns_as_asked_for() -> None:
    assert len(conversation(9)) == 9 and conversation(9)[0] == conversation(9)[6]


@pytest.mark.parametrize(
    ("line", "value"),
    [("a_total 3.0", "3.0"), ('a_total{by="x"} 1e+06', "1e+06"), ("# HELP a b", None)],
)
def test_metric_lines(line: str, value: str | None) -> None:
    match = SAMPLE.match(line)
    assert (match["value"] if match else None) == value
