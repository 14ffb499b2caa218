"""The namespace separates everything that changes bytes; keys can be told apart and taken apart."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.ids import BlockHash, Namespace
from store_worker.keys import (
    INCARNATION_KEY,
    PROBE_KEY,
    NamespaceSpec,
    ObjectName,
    namespace_key,
    namespace_of,
    namespace_text,
    object_key,
    parse_object_key,
)

BASE = NamespaceSpec(
    model="m/one",
    revision="r1",
    kv_dtype="bfloat16",
    quantization="",
    tokens_per_block=16,
    layers=32,
    kv_heads=8,
    head_size=128,
    layout="32x bfloat16[1;0:8,1:16,2:256]",
    payload_bytes=2 << 20,
    tp_size=2,
    pp_size=1,
    dcp_size=1,
    hash_algorithm="sha256",
    hash_seed="0",
    tenant="t",
    epoch="",
)

# One other value per field: each must lead to a disjoint key space (fault 17).
OTHERS = {
    "model": "m/two",
    "revision": "r2",
    "kv_dtype": "fp8_e4m3",
    "quantization": "awq",
    "tokens_per_block": 32,
    "layers": 33,
    "kv_heads": 4,
    "head_size": 64,
    "layout": "64x bfloat16[1;0:8,1:16,2:128]",
    "payload_bytes": 1 << 20,
    "tp_size": 4,
    "pp_size": 2,
    "dcp_size": 2,
    "hash_algorithm": "sha256_cbor",
    "hash_seed": "1",
    "tenant": "u",
    "epoch": "e",
    "format_version": 2,
}


def test_every_dimension_has_a_row() -> None:
    assert set(OTHERS) == {field.name for field in msgspec.structs.fields(NamespaceSpec)}


@pytest.mark.parametrize("name", OTHERS)
def test_fault_17_each_dimension_gives_disjoint_keys(name: str) -> None:
    other = msgspec.structs.replace(BASE, **{name: OTHERS[name]})
    assert namespace_of(other) != namespace_of(BASE)
    store, hash = bytes(8), BlockHash(bytes(32))
    assert object_key(store, namespace_of(other), hash, 0) != object_key(
        store, namespace_of(BASE), hash, 0
    )


def test_all_pairs_of_dimensions_differ() -> None:
    specs = [BASE]
    for some in itertools.combinations(OTHERS, 2):
        specs.append(msgspec.structs.replace(BASE, **{name: OTHERS[name] for name in some}))
    assert len({namespace_of(spec) for spec in specs}) == len(specs)


def test_a_value_can_not_slip_into_the_next_field() -> None:
    one = msgspec.structs.replace(BASE, model='a","revision":"b', revision="c")
    two = msgspec.structs.replace(BASE, model="a", revision='b","revision":"c')
    assert namespace_of(one) != namespace_of(two)


def test_the_digest_is_the_same_in_every_process() -> None:
    code = (
        "import sys, msgspec; from store_worker.keys import *;"
        "print(namespace_of(msgspec.json.decode(sys.argv[1], type=NamespaceSpec)).hex())"
    )
    for seed in ("0", "1"):
        found = subprocess.run(
            [sys.executable, "-c", code, namespace_text(BASE).decode()],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        )
        assert found.stdout.strip() == namespace_of(BASE).hex()


def test_golden_namespace() -> None:
    """A change of this digest makes every stored block unreachable: raise FORMAT_VERSION too."""
    assert namespace_of(BASE).hex() == "16ae2252c2d411ee92382a3b216b0f30"


def test_readable_copy() -> None:
    text = namespace_text(BASE)
    assert msgspec.json.decode(text, type=NamespaceSpec) == BASE
    assert namespace_key(namespace_of(BASE)) == b"{skv}:namespace:" + namespace_of(
        BASE
    ).hex().encode()


names = st.builds(
    ObjectName,
    st.binary(min_size=8, max_size=8),
    st.binary(min_size=16, max_size=16).map(Namespace),
    st.binary(min_size=1, max_size=64).map(BlockHash),
    st.integers(0, 0xFFFF),
)


@given(names, names)
def test_keys_are_reversible_and_unique(one: ObjectName, two: ObjectName) -> None:
    key = object_key(*one)
    assert parse_object_key(key) == one
    assert (object_key(*two) == key) == (one == two)


@given(st.binary(max_size=120))
def test_foreign_keys_are_not_taken_for_objects(key: bytes) -> None:
    found = parse_object_key(key)
    assert found is None or object_key(*found) == key


@pytest.mark.parametrize("key", [INCARNATION_KEY, PROBE_KEY, b"", b"skvo:", b"skvo:" + bytes(26)])
def test_reserved_and_short_keys(key: bytes) -> None:
    assert parse_object_key(key) is None


@pytest.mark.parametrize(
    "bad",
    [
        (bytes(7), bytes(16), bytes(32), 0),
        (bytes(8), bytes(15), bytes(32), 0),
        (bytes(8), bytes(16), b"", 0),
        (bytes(8), bytes(16), bytes(65), 0),
        (bytes(8), bytes(16), bytes(32), -1),
        (bytes(8), bytes(16), bytes(32), 65536),
    ],
)
def test_parts_of_a_wrong_size_are_a_bug(bad: tuple[bytes, Namespace, BlockHash, int]) -> None:
    with pytest.raises(AssertionError):
        object_key(*bad)
