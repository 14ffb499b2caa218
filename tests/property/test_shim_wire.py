"""Version skew on the engine link: a message is read as it was meant, or the peers refuse."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.errors import WireError
from engine_shim.handshake import Hello, check_hello, schema_of
from engine_shim.protocol import PROTOCOL_VERSION, EngineCoreRequest

NAMES = list(EngineCoreRequest.__struct_fields__)
REQUIRED = 9
TEXT = st.text(max_size=12)
# MessagePack has no wider integers; the entrances refuse them.
ON_THE_WIRE = st.integers(-(1 << 63), (1 << 64) - 1)

VALUES: dict[str, st.SearchStrategy[Any]] = {
    "request_id": TEXT,
    "prompt_token_ids": st.none() | st.lists(st.integers(0, 1 << 20), max_size=5),
    "mm_features": st.none(),
    "sampling_params": st.none()
    | st.fixed_dictionaries({}, optional={"seed": st.integers(0, 99), "n": st.integers(2, 9)}),
    "pooling_params": st.none(),
    "arrival_time": st.floats(0, 1e10),
    "lora_request": st.none(),
    "cache_salt": st.none() | TEXT,
    "data_parallel_rank": st.none() | st.integers(0, 8),
    "prompt_embeds": st.none(),
    "prompt_is_token_ids": st.none() | st.lists(st.booleans(), max_size=3),
    "client_index": st.integers(0, 9),
    "current_wave": st.integers(0, 9),
    "priority": st.integers(-9, 9),
    "trace_headers": st.none() | st.dictionaries(TEXT, TEXT, max_size=2),
    "resumable": st.booleans(),
    "external_req_id": st.none() | TEXT,
    "reasoning_ended": st.none() | st.booleans(),
    "reasoning_parser_kwargs": st.none() | st.dictionaries(TEXT, ON_THE_WIRE, max_size=2),
    "abort_immediately": st.booleans(),
    "session_id": st.none() | TEXT,
    "kv_hints": st.none(),
}
DEFAULTS = {
    field.name: field.default
    for field in msgspec.structs.fields(EngineCoreRequest)
    if not field.required
}


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """Any subset of the optional fields."""
    chosen = draw(st.sets(st.sampled_from(NAMES[REQUIRED:])))
    return {n: draw(VALUES[n]) for n in NAMES if n in NAMES[:REQUIRED] or n in chosen}


@st.composite
def peers(draw: st.DrawFn) -> list[str]:
    """The field list of a peer that is up to two changes away: fields appended, left out at the
    end, inserted, removed or exchanged anywhere."""
    fields = list(NAMES)
    for number in range(draw(st.integers(0, 2))):
        kind = draw(st.sampled_from(("append", "shorten", "insert", "remove", "exchange")))
        at = draw(st.integers(0, len(fields) - 2))
        if kind == "append":
            fields.append(f"new_{number}")
        elif kind == "shorten":
            fields.pop()
        elif kind == "insert":
            fields.insert(at, f"new_{number}")
        elif kind == "remove":
            del fields[at]
        else:
            fields[at], fields[at + 1] = fields[at + 1], fields[at]
    return fields


def struct_of(fields: list[str]) -> type[msgspec.Struct]:
    """The peer's class: array-like, every field optional."""
    return msgspec.defstruct(
        "EngineCoreRequest", [(name, Any, None) for name in fields], array_like=True
    )


def hello_of(struct: type[msgspec.Struct]) -> Hello:
    return Hello(PROTOCOL_VERSION, "x", {"EngineCoreRequest": schema_of(struct)})


def accepted(peer: type[msgspec.Struct]) -> bool:
    try:
        check_hello(hello_of(EngineCoreRequest), hello_of(peer))
    except WireError:
        return False
    return True


@settings(max_examples=400, deadline=None, derandomize=True)
@given(request=requests(), fields=peers())
def test_skewed_peers_understand_or_refuse(request: dict[str, Any], fields: list[str]) -> None:
    peer = struct_of(fields)
    common = min(len(fields), len(NAMES))
    if not accepted(peer):
        assert fields[:common] != NAMES[:common]
        return
    assert fields[:common] == NAMES[:common]
    _theirs_is_read_by_us(peer, fields, request)
    _ours_is_read_by_them(peer, fields, request)


def _theirs_is_read_by_us(
    peer: type[msgspec.Struct], fields: list[str], request: dict[str, Any]
) -> None:
    values = {name: request.get(name, DEFAULTS.get(name)) for name in fields}
    for name in fields:
        if name not in NAMES:
            values[name] = "of a newer version"
    raw = msgspec.msgpack.encode(peer(**values))
    found = msgspec.to_builtins(msgspec.msgpack.decode(raw, type=EngineCoreRequest))
    for name, value in zip(NAMES, found, strict=True):
        expected = request.get(name, DEFAULTS.get(name)) if name in fields else DEFAULTS[name]
        assert value == expected, name


def _ours_is_read_by_them(
    peer: type[msgspec.Struct], fields: list[str], request: dict[str, Any]
) -> None:
    own = msgspec.convert([request.get(n, DEFAULTS.get(n)) for n in NAMES], EngineCoreRequest)
    found = msgspec.msgpack.decode(msgspec.msgpack.encode(own), type=peer)
    for name in fields:
        expected = request.get(name, DEFAULTS.get(name)) if name in NAMES else None
        assert getattr(found, name) == expected, name


def test_both_answers_occur() -> None:
    """The strategy reaches both sides of the decision."""
    assert accepted(struct_of([*NAMES, "new"])) and accepted(struct_of(NAMES[:-2]))
    assert not accepted(struct_of([*NAMES[:5], "new", *NAMES[5:]]))
    assert not accepted(struct_of([*NAMES[:20], *NAMES[21:]]))
