"""vLLM's own request class and ours read each other, for the fields the shim uses."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from engine_shim import protocol

vllm_engine = pytest.importorskip("vllm.v1.engine", reason="needs vLLM (make test-vllm)")
vllm_serial = pytest.importorskip("vllm.v1.serial_utils", reason="needs vLLM (make test-vllm)")

GOLDEN = Path(__file__).parents[1] / "wire" / "golden"


def test_golden_fields_are_those_of_this_vllm() -> None:
    golden = json.loads((GOLDEN / "engine_core_request_vllm.json").read_text())["fields"]
    assert list(vllm_engine.EngineCoreRequest.__struct_fields__) == golden
    assert list(protocol.EngineCoreRequest.__struct_fields__) == golden


HINTS = protocol.KvHintsEnvelope(
    "1.0", "m-1", [protocol.KvHintAction("a-1", "retain", "1.0", {"priority": 1})]
)
PARAMS = protocol.SamplingParams(
    n=2, temperature=0.5, top_p=0.9, top_k=5, seed=3, stop=["END"], stop_token_ids=[7],
    max_tokens=9, min_tokens=1, logprobs=2, include_stop_str_in_output=True,
    extra_args={"kv_transfer_params": {"a": [1, None]}},
)  # fmt: skip
REQUESTS = {
    "plain": protocol.EngineCoreRequest(
        "r", [1, 2, 3], None, protocol.SamplingParams(), None, 1.5, None, None, None
    ),
    "full": protocol.EngineCoreRequest(
        "r", [1, 2, 300], None, PARAMS, None, 1.5, None, "salt", None, client_index=2,
        current_wave=1, priority=-3, trace_headers={"traceparent": "x"}, resumable=True,
        external_req_id="outer", abort_immediately=True, session_id="会話", kv_hints=HINTS,
    ),
}  # fmt: skip
USED = [
    "request_id", "prompt_token_ids", "arrival_time", "cache_salt", "client_index",
    "current_wave", "priority", "trace_headers", "resumable", "external_req_id",
    "abort_immediately", "session_id",
]  # fmt: skip
PARAMS_USED = [
    "n", "temperature", "top_p", "top_k", "seed", "ignore_eos", "max_tokens", "min_tokens",
    "logprobs", "include_stop_str_in_output", "extra_args",
]  # fmt: skip


def assert_same(ours: protocol.EngineCoreRequest, theirs: object) -> None:
    for name in USED:
        assert getattr(ours, name) == getattr(theirs, name), name
    own, other = ours.sampling_params, theirs.sampling_params  # type: ignore[attr-defined]
    for name in PARAMS_USED:
        assert getattr(own, name) == getattr(other, name), name
    # vLLM writes an empty list for what was not given.
    assert own is not None
    assert (own.stop or []) == other.stop and (own.stop_token_ids or []) == other.stop_token_ids
    hints = theirs.kv_hints  # type: ignore[attr-defined]
    assert msgspec.to_builtins(ours.kv_hints) == msgspec.to_builtins(hints)


@pytest.mark.parametrize("name", REQUESTS)
def test_vllm_reads_ours(name: str) -> None:
    ours = REQUESTS[name]
    decoder = vllm_serial.MsgpackDecoder(vllm_engine.EngineCoreRequest)
    assert_same(ours, decoder.decode(msgspec.msgpack.encode(ours)))


@pytest.mark.parametrize("name", REQUESTS)
def test_we_read_vllms(name: str) -> None:
    decoder = vllm_serial.MsgpackDecoder(vllm_engine.EngineCoreRequest)
    theirs = decoder.decode(msgspec.msgpack.encode(REQUESTS[name]))
    (raw,) = vllm_serial.MsgpackEncoder().encode(theirs)
    assert_same(msgspec.msgpack.decode(raw, type=protocol.EngineCoreRequest), theirs)
