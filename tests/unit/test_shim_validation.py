"""What is refused at the client's edge, and how it is said."""

from __future__ import annotations

import math

import pytest

from connector.errors import ConfigError
from engine_shim.api import RequestOptions
from engine_shim.config import EngineConfig, ModelConfig, load_config
from engine_shim.errors import InvalidRequest
from engine_shim.hashing import ROOT, extend_chain
from engine_shim.protocol import EngineCoreRequest, SamplingParams
from engine_shim.tokenizer import EOS, decode, encode
from engine_shim.validation import (
    build_message,
    check_message,
    check_options,
    check_params,
    check_tokens,
    fan_out,
    tokenize,
)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", True),
        ("max_tokens", 1.5),
        ("n", 0),
        ("n", 1000),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("seed", 1 << 70),
        ("logprobs", 50),
        ("logprobs", -1),
        ("min_tokens", 17),
        ("stop", ""),
        ("stop", ["x"] * 17),
        ("stop", ["x" * 300]),
    ],
)
def test_bad_params(field: str, value: object) -> None:
    params = SamplingParams()
    setattr(params, field, value)
    with pytest.raises(InvalidRequest) as caught:
        check_params(params)
    assert caught.value.param == field and field.replace("_", "") in str(caught.value).replace(
        "_", ""
    ).replace(" string", "")
    body = caught.value.as_openai()["error"]
    assert body["type"] == "invalid_request_error" and body["param"] == field


def test_good_params() -> None:
    for params in (
        SamplingParams(),
        SamplingParams(max_tokens=None, temperature=0.0, logprobs=0, top_k=-1, seed=-5),
        SamplingParams(stop=["a", "b"], min_tokens=16),
    ):
        assert check_params(params) is params


def test_prompts() -> None:
    assert tokenize("hé") == [104, 195, 169]
    for bad in ("", [], "\ud800"):
        with pytest.raises(InvalidRequest):
            tokenize(bad)
    check_tokens([1] * 99, 100, 260)
    with pytest.raises(InvalidRequest, match="100 tokens") as caught:
        check_tokens([1] * 100, 100, 260)
    assert caught.value.code == "context_length_exceeded"
    for bad_token in (-1, 260, True, "x"):
        with pytest.raises(InvalidRequest, match="vocabulary"):
            check_tokens([bad_token], 100, 260)  # type: ignore[list-item]


def test_options() -> None:
    for options in (
        RequestOptions(session_id="x" * 257),
        RequestOptions(session_id="a\nb"),
        RequestOptions(cache_salt=""),
        RequestOptions(request_id="r" * 300),
    ):
        with pytest.raises(InvalidRequest):
            check_options(options)
    assert check_options(RequestOptions(session_id="Gespräch 🙂"))
    # Empty never counts.
    empty = check_options(RequestOptions(session_id=""))
    assert build_message([1], SamplingParams(), empty, "id", 0.0).session_id is None


def message(**changes: object) -> EngineCoreRequest:
    made = build_message([1, 2], SamplingParams(), RequestOptions(), "id", 0.0)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling_params": None},
        {"prompt_token_ids": None},
        {"prompt_token_ids": []},
        {"prompt_token_ids": [5000]},
        {"mm_features": [1]},
        {"lora_request": {"x": 1}},
        {"request_id": ""},
        {"session_id": "x" * 300},
    ],
    ids=str,
)
def test_engine_checks_messages_of_any_peer(changes: dict[str, object]) -> None:
    check_message(message(), 100, 260)
    with pytest.raises(InvalidRequest):
        check_message(message(**changes), 100, 260)


def test_kv_transfer_params_travel_in_extra_args() -> None:
    options = RequestOptions(kv_transfer_params={"tip": "ab"})
    params = SamplingParams(extra_args={"x": 1})
    made = build_message([1], params, options, "id", 0.0)
    assert made.sampling_params is not None
    assert made.sampling_params.extra_args == {"x": 1, "kv_transfer_params": {"tip": "ab"}}
    assert params.extra_args == {"x": 1}


def test_fan_out() -> None:
    options = RequestOptions(session_id="s", request_id="r")
    children = fan_out(SamplingParams(n=3, seed=7), options)
    assert [child.seed for child, _ in children] == [7, 8, 9]
    assert all(child.n == 1 and own is options for child, own in children)
    assert [child.seed for child, _ in fan_out(SamplingParams(n=2), options)] == [None, None]


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (EngineConfig(num_blocks=10), "max_model_len"),
        (EngineConfig(block_size=0), "block_size"),
        (EngineConfig(tp_size=3), "tp_size"),
        (EngineConfig(device="tpu"), "device"),
        (EngineConfig(cpu_threads=-1), "cpu_threads"),
        (EngineConfig(model=ModelConfig(head_dim=63)), "model.head_dim"),
        (EngineConfig(model=ModelConfig(num_heads=6)), "model.num_heads"),
        (EngineConfig(model=ModelConfig(vocab_size=100)), "model.vocab_size"),
        (EngineConfig(model=ModelConfig(num_layers=0)), "model.num_layers"),
    ],
)
def test_config_that_can_not_work(config: EngineConfig, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.check()
    assert caught.value.key == key and repr(key) in str(caught.value)


def test_config_from_json() -> None:
    assert load_config(b'{"tp_size": 2}') == EngineConfig(tp_size=2)
    for raw in (b"{", b'{"tp_sizes": 2}', b'{"tp_size": "2"}'):
        with pytest.raises(ConfigError):
            load_config(raw)


def test_tokens_and_text() -> None:
    assert decode(encode("Grüße 🙂")) == "Grüße 🙂"
    assert decode([72, EOS, 105, 255]) == "Hi\ufffd"


def test_hash_chain() -> None:
    whole: list[bytes] = []
    extend_chain(whole, list(range(20)), 4)
    assert len(whole) == 5 and len(set(whole)) == 5 and ROOT not in whole
    pieces: list[bytes] = []
    for end in (3, 4, 9, 10, 20):
        extend_chain(pieces, list(range(end)), 4)
    assert pieces == whole
    salted: list[bytes] = []
    extend_chain(salted, list(range(20)), 4, "salt")
    assert not set(salted) & set(whole)
    # Equal in every process and version: stores are keyed by it.
    assert whole[1].hex() == "f672d3df14a5a87d895bc7e0f5e6c515fa8182cdb753b3aa7fcb757b7b40c135"
    assert salted[0].hex() == "c32705ffb72e14f88aa14cbcdb51963c6ecc2102b2d2faf212a4a91669ef14ac"
