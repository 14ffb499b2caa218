"""The link's formats against golden bytes, vLLM's own among them. Nothing here writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from connector.errors import WireError
from engine_shim import handshake, protocol
from engine_shim.handshake import STRUCTS, Hello, check_hello, decode_hello, make_hello, schema_of
from engine_shim.protocol import EngineCoreRequest, SamplingParams

GOLDEN = Path(__file__).parent / "golden"
VLLM = json.loads((GOLDEN / "engine_core_request_vllm.json").read_text())
LINK = json.loads((GOLDEN / "engine_link.json").read_text())
HANDSHAKE = json.loads((GOLDEN / "handshake.json").read_text())


def by_name(case: dict[str, Any]) -> str:
    return case.get("name") or f"{case['message']}-{case['hex'][:12]}"


def test_request_has_vllms_fields_in_vllms_order() -> None:
    assert list(EngineCoreRequest.__struct_fields__[:22]) == VLLM["fields"]
    assert len(VLLM["fields"]) == 22
    assert VLLM["fields"].index("session_id") == 20 and VLLM["fields"].index("kv_hints") == 21


@pytest.mark.parametrize("case", VLLM["cases"], ids=by_name)
def test_requests_of_vllm_are_read(case: dict[str, Any]) -> None:
    found = msgspec.msgpack.decode(bytes.fromhex(case["hex"]), type=EngineCoreRequest)
    plain = msgspec.to_builtins(found)
    shown = dict(zip(EngineCoreRequest.__struct_fields__, plain, strict=True))
    for name, value in case["request"].items():
        assert shown.pop(name) == value, name
    params = shown.pop("sampling_params")
    for name, value in case["sampling_params"].items():
        assert params.get(name, getattr(SamplingParams(), name)) == value, name
    # What the case does not set has no value; nothing slipped into a neighbour.
    assert not any(shown.values()), shown


@pytest.mark.parametrize("case", LINK["cases"], ids=by_name)
def test_messages_have_their_golden_bytes(case: dict[str, Any]) -> None:
    struct = getattr(protocol, case["message"])
    message = msgspec.convert(case["value"], struct)
    raw = bytes.fromhex(case["hex"])
    assert msgspec.msgpack.encode(message) == raw
    assert msgspec.msgpack.decode(raw, type=struct) == message


def test_every_message_has_a_golden_case() -> None:
    nested = {"TokenLogprobs", "Usage"}
    named = {case["message"] for case in LINK["cases"]}
    assert named | nested == {struct.__name__ for struct in STRUCTS}


def test_handshake_has_its_golden_digests() -> None:
    assert {struct.__name__ for struct in STRUCTS} >= set(HANDSHAKE["schemas"])
    for struct in STRUCTS:
        golden = HANDSHAKE["schemas"].get(struct.__name__)
        if golden is None:
            continue
        schema = schema_of(struct)
        length = len(golden["fields"])
        assert schema.fields[:length] == golden["fields"], "fields are only appended"
        assert schema.digests[:length] == golden["digests"]
        # An older peer does not send what came later.
        later = msgspec.structs.fields(struct)[length:]
        assert not any(field.required for field in later)


def test_same_version_is_accepted() -> None:
    raw = msgspec.msgpack.encode(make_hello())
    check_hello(make_hello(), decode_hello(raw))


def _peer_with(fields: list[str]) -> Hello:
    schema = handshake.Schema(fields, handshake.field_digests(fields))
    return Hello("1.7", "9.9.9", {"EngineCoreRequest": schema})


def test_shorter_and_longer_peers_are_accepted() -> None:
    names = list(EngineCoreRequest.__struct_fields__)
    for fields in (names[:-1], names[:-2], [*names, "new"], [*names, "new", "newer"]):
        check_hello(make_hello(), _peer_with(fields))


def test_a_field_in_the_middle_is_refused_by_name() -> None:
    names = list(EngineCoreRequest.__struct_fields__)
    peer = _peer_with([*names[:20], "tenant_id", *names[20:]])
    with pytest.raises(WireError) as caught:
        check_hello(make_hello(), peer)
    text = str(caught.value)
    assert "EngineCoreRequest" in text and "'session_id'" in text and "'tenant_id'" in text
    assert "protocol 1.7" in text and "9.9.9" in text
    assert f"protocol {protocol.PROTOCOL_VERSION}" in text


def test_why_the_handshake_is_needed() -> None:
    """Without it, the middle field's value is taken for the session id, with no error."""

    names = list(EngineCoreRequest.__struct_fields__)
    message = msgspec.to_builtins(
        msgspec.msgpack.decode(
            bytes.fromhex(VLLM["cases"][0]["hex"]), type=EngineCoreRequest
        )
    )
    message.insert(names.index("session_id"), "tenant-a")
    found = msgspec.msgpack.decode(msgspec.msgpack.encode(message[:22]), type=EngineCoreRequest)
    assert found.session_id == "tenant-a"


@pytest.mark.parametrize("raw", [b"", b"\xc0", b"\x80", b"\x93\x01\x02\x03", b"hello"])
def test_what_is_no_hello_is_refused(raw: bytes) -> None:
    with pytest.raises(WireError, match="no Hello"):
        decode_hello(raw)


def test_hello_of_a_newer_peer_with_more_in_it_is_read() -> None:
    value = msgspec.to_builtins(make_hello())
    value["compression"] = ["zstd"]
    value["schemas"]["Unknown"] = {"fields": ["x"], "digests": ["00"]}
    check_hello(make_hello(), decode_hello(msgspec.msgpack.encode(value)))
