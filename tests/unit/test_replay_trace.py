"""Traces: what is read, what is refused, whose turn a request is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from connector.ids import BlockHash
from store_worker.replay.trace import (
    FANOUT_SHARED,
    Line,
    Request,
    TraceError,
    build,
    infer_sessions,
    last_turns,
    read,
)

TOKENS = 512


def line(ids: list[int], tokens: int | None = None, session: str | None = None) -> Line:
    length = len(ids) * TOKENS if tokens is None else tokens
    return Line(timestamp=0, input_length=length, hash_ids=ids, session_id=session)


def sessions(chains: list[list[int]]) -> list[int]:
    requests = build([line(ids) for ids in chains], TOKENS)
    numbers: dict[bytes, int] = {}
    return [numbers.setdefault(request.session, len(numbers)) for request in requests]


def test_a_file_is_read_in_order_of_time(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 3000, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]},
        {"timestamp": 1000, "input_length": 511, "hash_ids": [7], "other": "ignored"},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n\n".join(json.dumps(row) for row in rows) + "\n")
    first, second = read(path, TOKENS)
    assert (first.at_ms, first.prompt_tokens, len(first.hashes)) == (0, 511, 0)
    assert (second.at_ms, second.prompt_tokens) == (2000, 1100)
    assert len(second.hashes) == 2, "the third block is not whole"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no requests"),
        ("\n\n", "has no requests"),
        ('{"timestamp": 1, "input_length": 5, "hash_ids": []}\nnot json', "line 2"),
        ('{"timestamp": 1, "input_length": 5}', "line 1.*hash_ids"),
        ('{"timestamp": "x", "input_length": 5, "hash_ids": []}', "line 1"),
        ('{"timestamp": 1, "input_length": 5, "hash_ids": ["a"]}', "line 1"),
    ],
)
def test_a_bad_trace_says_where_and_why(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=message):
        read(path, TOKENS)


def test_a_trace_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="can't read the trace"):
        read(tmp_path / "none.jsonl", TOKENS)


def test_equal_prefixes_are_equal_blocks_and_an_id_elsewhere_is_another_block() -> None:
    a, b, c = (r.hashes for r in build([line([1, 2, 3]), line([1, 2, 4]), line([5, 2, 3])], TOKENS))
    assert a[:2] == b[:2]
    assert len({*a, *b, *c}) == 7, "2 and 3 after 5 are not 2 and 3 after 1"


def test_blocks_of_another_size_can_be_asked_for() -> None:
    (request,) = build([line([1, 2, 3], tokens=100)], 30)
    assert len(request.hashes) == 3


def test_a_request_continues_the_conversation_whose_chain_it_extends() -> None:
    assert sessions([[1, 2], [3], [1, 2, 4], [3, 5], [1, 2, 4, 6]]) == [0, 1, 0, 1, 0]


def test_an_edited_turn_stays_in_its_conversation() -> None:
    assert sessions([[1, 2, 3], [1, 2, 4], [1, 2, 4, 5], [1, 2, 3, 6]]) == [0, 0, 0, 0]


def test_a_shared_beginning_makes_no_conversation() -> None:
    many = [[1, 2, 10 + i] for i in range(FANOUT_SHARED)]
    assert sessions(many) == list(range(FANOUT_SHARED)), "known from the whole trace, not online"
    assert sessions([*many, [1, 2], [1, 2, 12, 30]])[-1] == 2
    assert sessions(many[:-1]) == [0] * (FANOUT_SHARED - 1), "so few may be branches of one"


def test_a_field_says_more_than_the_chain() -> None:
    lines = [line([1, 2], session="x"), line([1, 2, 3], session="y"), line([9], session="x")]
    a, b, c = build(lines, TOKENS)
    assert a.session == c.session != b.session
    assert len(a.session) == 16


def test_empty_chains_are_conversations_of_their_own() -> None:
    assert infer_sessions([(), (BlockHash(b"a"),), ()]) == [0, 1, 2]


def test_last_turns() -> None:
    lines = [line([1], session=s) for s in "abacb"]
    requests: list[Request] = build(lines, TOKENS)
    assert last_turns(requests) == {2, 3, 4}
