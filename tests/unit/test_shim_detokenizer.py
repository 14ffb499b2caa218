"""Text of streamed tokens: characters, stop strings, counts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_shim.api import join
from engine_shim.detokenizer import Sequence, TextStream, merge
from engine_shim.errors import RequestFailed
from engine_shim.protocol import EngineCoreOutput, FinishReason, SamplingParams, Usage
from engine_shim.tokenizer import encode


def pushed(stream: TextStream, text: str) -> list[str]:
    return [stream.push(token) for token in encode(text)]


def test_characters_come_whole() -> None:
    stream = TextStream([])
    assert pushed(stream, "a🙂b") == ["a", "", "", "", "🙂", "b"]
    assert stream.push(0xF0) == "" and stream.finish() == "\ufffd"


def test_stop_string_is_cut_off() -> None:
    stream = TextStream(["END"])
    assert "".join(pushed(stream, "xENyEND")) == "xENy"
    assert stream.stopped == "END"


def test_stop_string_can_be_kept() -> None:
    stream = TextStream(["END"], include_stop=True)
    assert "".join(pushed(stream, "xEND")) == "xEND"


def test_what_only_began_a_stop_string_comes_at_the_end() -> None:
    stream = TextStream(["END"])
    assert "".join(pushed(stream, "xEN")) == "x"
    assert stream.finish() == "EN"


def test_stop_strings_wait_for_min_tokens() -> None:
    stream = TextStream(["a"], min_tokens=3)
    pushed(stream, "xa")
    assert stream.stopped is None
    pushed(stream, "ya")
    assert stream.stopped == "a"


@settings(deadline=None, derandomize=True, max_examples=300)
@given(text=st.text("abAB🙂", max_size=20), stops=st.lists(st.text("abAB", min_size=1, max_size=4)))
def test_stream_is_the_text_up_to_the_first_stop(text: str, stops: list[str]) -> None:
    stream = TextStream(stops)
    found = ""
    for token in encode(text):
        found += stream.push(token)
        if stream.stopped is not None:
            break
    if stream.stopped is None:
        assert found + stream.finish() == text
        assert not any(stop in text for stop in stops)
        return
    # The end of the earliest stop string to be complete.
    end = min(text.index(stop) + len(stop) for stop in stops if stop in text)
    assert found == text[: end - len(stream.stopped)]
    assert text[:end].endswith(stream.stopped)


def test_sequence_with_a_stop_string() -> None:
    sequence = Sequence("mine", SamplingParams(stop="lo", max_tokens=9))
    deltas = [sequence.take(EngineCoreOutput("i", [token])) for token in encode("hello")]
    assert sequence.wants_stop and not sequence.ended
    # The engine ran on before it heard of the stop.
    assert sequence.take(EngineCoreOutput("i", encode(" wor"))) is None
    last = EngineCoreOutput("i", [], finish_reason=FinishReason.STOP, usage=Usage(3, 0, 0, 9))
    deltas.append(sequence.take(last))
    whole = join([delta for delta in deltas if delta is not None])
    assert whole.text == "hel" and whole.request_id == "mine"
    assert (whole.finish_reason, whole.stop_reason) == (FinishReason.STOP, "lo")
    assert whole.usage.output_tokens == 5 == len(whole.token_ids)
    assert sequence.ended and not sequence.wants_stop


def test_stop_string_wins_over_length() -> None:
    sequence = Sequence("mine", SamplingParams(stop="lo"))
    last = EngineCoreOutput(
        "i", encode("hello"), finish_reason=FinishReason.LENGTH, usage=Usage(3, 0, 0, 5)
    )
    delta = sequence.take(last)
    assert delta is not None and delta.finish_reason is FinishReason.STOP
    assert delta.stop_reason == "lo" and delta.text == "hel"


def test_error_output() -> None:
    sequence = Sequence("mine", SamplingParams())
    with pytest.raises(RequestFailed, match="too much"):
        sequence.take(EngineCoreOutput("i", [], finish_reason=FinishReason.ERROR, error="too much"))
    assert sequence.ended


def test_merged_deltas_lose_nothing() -> None:
    sequence = Sequence("mine", SamplingParams(max_tokens=4))
    first = EngineCoreOutput("i", encode("ab"), usage=Usage(3))
    second = EngineCoreOutput("i", encode("cd"), finish_reason=FinishReason.LENGTH)
    deltas = [sequence.take(first), sequence.take(second)]
    assert deltas[0] is not None and deltas[1] is not None
    both = merge(deltas[0], deltas[1])
    assert (both.text, both.token_ids) == ("abcd", tuple(encode("abcd")))
    assert both.usage == Usage(3) and both.finish_reason is FinishReason.LENGTH
