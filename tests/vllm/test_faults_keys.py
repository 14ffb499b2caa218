"""Faults of identity: blocks that look alike and are not, or are alike and look different.

The numbers are those of tests/faults.py.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from connector import vllm_adapter
from connector.config import parse_config
from connector.errors import UnsupportedError
from connector.vllm_adapter import hash_seed
from connector.vllm_facts import namespace_spec
from store_worker.keys import namespace_of
from tests.vllm.conftest import Engines, Solo, Store
from tests.vllm.scheduler_kit import B, Engine, cache_config, engine_config, prompt
from tests.vllm.servers import ROOT, transfer_config

TOKENS = prompt(1700, 4 * B + 2)


def stored(engines: Engines, **more: Any) -> None:
    """Put the prompt into the store, by an engine that is not used again."""
    writer = engines()
    writer.answer("w", TOKENS, 2, session_id="s", **more)
    writer.run_all()
    writer.assert_empty()


def promised(engine: Engine, request: Any) -> int:
    """What the connector promises for a request that is never scheduled."""
    engine.connector.on_new_request(request)
    found: list[int] = []

    def answered() -> bool:
        tokens, _ = engine.connector.get_num_new_matched_tokens(request, 0)
        found[:] = [] if tokens is None else [tokens]
        return bool(found)

    engine.run_until(answered, "the lookup")
    engine.connector.request_finished(request, [])
    return found[0]


def image(identifier: str) -> dict[str, Any]:
    """Arguments of a request with an image over its first tokens."""
    where = PlaceholderRange(offset=0, length=8)
    return {"mm_features": [MultiModalFeatureSpec(None, "image", identifier, where)]}


def embeds(value: float) -> dict[str, Any]:
    """Arguments of a request whose first tokens are embeddings."""
    mask = [False] * 8 + [True] * (len(TOKENS) - 8)
    return {"prompt_embeds": torch.full((len(TOKENS), 4), value), "prompt_is_token_ids": mask}


def adapter(name: str, path: str) -> dict[str, Any]:
    return {"lora_request": LoRARequest(name, 1, path)}


# Each pair differs in one thing; the first of it can be stored where it says so.
DIMENSIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "salt": ({"cache_salt": "a"}, {"cache_salt": "b"}),
    "no salt": ({}, {"cache_salt": "b"}),
    "adapter": (adapter("one", "/a"), adapter("two", "/b")),
    "adapter's path": (adapter("one", "/a"), adapter("one", "/b")),
    "no adapter": ({}, adapter("one", "/a")),
    "image": ({}, image("f" * 63 + "0")),
    "embeddings": ({}, embeds(0.5)),
}


@pytest.mark.parametrize("fresh", [True, False], ids=["other engine", "same engine"])
@pytest.mark.parametrize("name", DIMENSIONS)
def test_fault_23_every_dimension_reaches_the_store(
    engines: Engines, name: str, fresh: bool
) -> None:
    mine, other = DIMENSIONS[name]
    stored(engines, **mine)
    engine = engines() if fresh else engines.made[0]
    same = engine.make("same", TOKENS, 2, session_id="s", **mine)
    unlike = engine.make("unlike", TOKENS, 2, session_id="s", **other)
    assert promised(engine, same) == 4 * B
    assert promised(engine, unlike) == 0


def test_fault_21_two_images_share_no_block(engines: Engines) -> None:
    engine = engines()
    pairs = [(image("f" * 63 + "0"), image("f" * 63 + "1")), (embeds(0.5), embeds(0.25))]
    for one, two in pairs:
        first, second = (engine.make("r", TOKENS, 2, **more).block_hashes for more in (one, two))
        assert len(first) == len(second) == 4 and not set(first) & set(second)


def test_fault_22_a_salt_separates_sessions_too(engines: Engines, solo: Solo) -> None:
    stored(engines, cache_salt="a")
    reader = engines()
    assert reader.answer("b", TOKENS, 2, session_id="s", cache_salt="b").cached == 0
    same = reader.answer("a", TOKENS, 2, session_id="s", cache_salt="a")
    assert (same.cached, same.tokens) == (4 * B, solo(TOKENS, 2))
    assert len({job.session for job in reader.loads() + reader.saves()}) == 2


def changed(path: str, value: object) -> Callable[[Any, Any], None]:
    """Set one attribute of the VllmConfig or of the cache's spec."""

    def change(config: Any, caches: Any) -> None:
        first, *rest = path.split(".")
        target = caches.kv_cache_groups[0].kv_cache_spec if first == "spec" else config
        for name in [first, *rest][:-1]:
            target = target if name == "spec" else getattr(target, name)
        object.__setattr__(target, rest[-1], value)

    return change


CONFIG_CHANGES: dict[str, Callable[[Any, Any], None]] = {
    "model": changed("model_config.model", "/another"),
    "revision": changed("model_config.revision", "v2"),
    "quantization": changed("model_config.quantization", "fp8"),
    "cache dtype": changed("cache_config.cache_dtype", "fp8_e5m2"),
    "spec dtype": changed("spec.dtype", torch.bfloat16),
    "block size": changed("spec.block_size", 64),
    "hash algorithm": changed("cache_config.prefix_caching_hash_algo", "sha256_cbor"),
    "tensor parallel": changed("parallel_config.tensor_parallel_size", 2),
}


@pytest.mark.parametrize("name", [*CONFIG_CHANGES, "seed", "tenant", "model_revision", "device"])
def test_fault_17_whatever_changes_the_bytes_changes_the_namespace(name: str) -> None:
    raw: dict[str, object] = {"store": "memory://x"}
    base, caches = engine_config(None), cache_config(16)
    mine = namespace_of(namespace_spec(parse_config(raw), base, caches, "cpu", "0"))
    assert mine == namespace_of(namespace_spec(parse_config(raw), base, caches, "cpu", "0"))
    other, other_caches = copy.deepcopy((base, caches))
    if name in CONFIG_CHANGES:
        CONFIG_CHANGES[name](other, other_caches)
    elif name in ("tenant", "model_revision"):
        raw[name] = "other"
    device = "cuda" if name == "device" else "cpu"
    seed = "1" if name == "seed" else "0"
    theirs = namespace_of(namespace_spec(parse_config(raw), other, other_caches, device, seed))
    assert mine != theirs


@pytest.mark.parametrize("key", ["tenant", "model_revision", "weights_version"])
def test_fault_19_new_weights_under_an_old_name_have_a_config_key(
    engines: Engines, solo: Solo, key: str
) -> None:
    stored(engines)
    other = engines(**{key: "v2"})
    text = other.answer("a", TOKENS, 2, session_id="s")
    assert (text.cached, text.tokens) == (0, solo(TOKENS, 2))
    assert engines().answer("b", TOKENS, 2, session_id="s").cached == 4 * B


ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
IN_ANOTHER_PROCESS = f"""
from connector.vllm_adapter import hash_seed
for algorithm in {ALGORITHMS}:
    print("SEED", algorithm, hash_seed(algorithm))
"""


def test_fault_24_hashes_that_no_other_process_has_are_told_apart_and_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    run = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_PROCESS],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    lines = [x.split()[1:] for x in run.stdout.splitlines() if x.startswith("SEED")]
    theirs = dict(lines)
    assert tuple(theirs) == ALGORITHMS, run.stdout
    warned: list[str] = []
    monkeypatch.setattr(vllm_adapter.logger, "warning", lambda text, *a: warned.append(text % a))
    mine = {name: hash_seed(name) for name in ALGORITHMS}
    assert {name for name in ALGORITHMS if mine[name] == theirs[name]} == set(ALGORITHMS[:2])
    assert len(warned) == 2 and all("PYTHONHASHSEED" in text for text in warned)
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    fixed = {name: hash_seed(name) for name in ALGORITHMS}
    assert fixed == {name: hash_seed(name) for name in ALGORITHMS} and len(warned) == 2


def test_fault_27_reset_cache_moves_one_engine_and_nobody_else(
    engines: Engines, solo: Solo
) -> None:
    mine, theirs = engines(), engines()
    mine.answer("w", TOKENS, 2, session_id="s")
    mine.run_all()
    assert mine.scheduler.reset_prefix_cache(reset_connector=True)
    text = mine.answer("a", TOKENS, 2, session_id="s")
    assert (text.cached, text.tokens) == (0, solo(TOKENS, 2))
    assert theirs.answer("b", TOKENS, 2, session_id="s").cached == 4 * B
    mine.run_all()
    assert mine.scheduler.reset_prefix_cache()
    assert mine.answer("c", TOKENS, 2, session_id="s").cached == 4 * B, "its own new epoch"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (changed("parallel_config.decode_context_parallel_size", 2), "decode_context_parallel"),
        (changed("parallel_config.pipeline_parallel_size", 2), "pipeline_parallel_size"),
        (changed("kv_transfer_config.kv_role", "kv_producer"), "pd_role"),
    ],
    ids=["context parallel", "pipeline parallel", "producer role"],
)
def test_fault_26_what_cannot_be_served_is_refused_at_start(
    store: Store, change: Callable[[Any, Any], None], words: str
) -> None:
    config, caches = engine_config(transfer_config(store.urls)), cache_config(16)
    change(config, caches)
    with pytest.raises(UnsupportedError, match=words):
        KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, caches)


def test_fault_57_several_cache_groups_are_refused_with_the_flag_that_helps(store: Store) -> None:
    config, caches = engine_config(transfer_config(store.urls)), cache_config(16)
    caches.kv_cache_groups *= 2
    with pytest.raises(UnsupportedError, match="--disable-hybrid-kv-cache-manager"):
        KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, caches)
