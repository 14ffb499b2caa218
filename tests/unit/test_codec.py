"""The object header: what it catches, and its exact bytes."""

from __future__ import annotations

import itertools

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from connector.ids import BlockHash, Namespace
from store_worker.codec import HEADER_BYTES, Codec, checksum

NAMESPACE = Namespace(bytes(range(16)))
HASH = BlockHash(bytes(range(100, 132)))
PAYLOAD = bytes(range(200)) * 5


def regions(*sizes: int) -> list[memoryview]:
    found, at = [], 0
    for size in sizes:
        found.append(memoryview(PAYLOAD)[at : at + size])
        at += size
    assert at == len(PAYLOAD)
    return found


CODEC = Codec(NAMESPACE, 3, len(PAYLOAD))
PARTS = regions(450, 0, 550)


def test_golden_header() -> None:
    """docs/WIRE.md has the table. Other bytes mean another version."""
    digest = xxhash.xxh3_64_intdigest(PAYLOAD)
    assert CODEC.pack(HASH, PARTS, True) == (
        b"SKVO"
        + b"\x01\x01"
        + (3).to_bytes(2, "little")
        + (1000).to_bytes(8, "little")
        + NAMESPACE
        + digest.to_bytes(8, "little")
        + b"\x20"
        + bytes(7)
        + HASH
        + bytes(32)
    )
    assert digest == 0xF7BDD0D72ABF7C9D
    assert HEADER_BYTES == 112
    assert CODEC.object_bytes == 1112


def test_golden_header_without_checksum() -> None:
    header = CODEC.pack(HASH, PARTS, False)
    assert header[5] == 0 and header[32:40] == bytes(8)
    assert CODEC.verify(header, HASH, PARTS, True)


@given(st.lists(st.integers(0, 1000), max_size=6))
def test_the_checksum_does_not_know_the_regions(cuts: list[int]) -> None:
    ends = [0, *sorted(cuts), 1000]
    parts = [memoryview(PAYLOAD)[a:b] for a, b in itertools.pairwise(ends)]
    assert checksum(parts) == xxhash.xxh3_64_intdigest(PAYLOAD)


def test_every_bit_of_the_header_counts() -> None:
    header = CODEC.pack(HASH, PARTS, True)
    assert CODEC.verify(header, HASH, PARTS, True)
    missed = []
    for bit in range(8 * HEADER_BYTES):
        changed = bytearray(header)
        changed[bit // 8] ^= 1 << bit % 8
        if CODEC.verify(changed, HASH, PARTS, True):
            missed.append(bit)
    assert missed == []


@given(st.integers(0, 999), st.integers(0, 7))
def test_every_bit_of_the_payload_counts(at: int, bit: int) -> None:
    header = CODEC.pack(HASH, PARTS, True)
    changed = bytearray(PAYLOAD)
    changed[at] ^= 1 << bit
    assert not CODEC.verify(header, HASH, [memoryview(changed)], True)
    assert CODEC.verify(header, HASH, [memoryview(changed)], False)


def test_swapped_regions_are_found() -> None:
    header = CODEC.pack(HASH, PARTS, True)
    assert not CODEC.verify(header, HASH, list(reversed(PARTS)), True)


@pytest.mark.parametrize(
    "other",
    [
        Codec(Namespace(bytes(16)), 3, 1000),
        Codec(NAMESPACE, 4, 1000),
        Codec(NAMESPACE, 3, 999),
    ],
)
@pytest.mark.parametrize("checksums", [True, False])
def test_another_owner_is_found(other: Codec, checksums: bool) -> None:
    assert not other.verify(CODEC.pack(HASH, PARTS, True), HASH, PARTS, checksums)


@pytest.mark.parametrize("other", [bytes(32), HASH[:31], HASH + b"\0", b"x"])
@pytest.mark.parametrize("checksums", [True, False])
def test_another_block_is_found(other: bytes, checksums: bool) -> None:
    header = CODEC.pack(HASH, PARTS, True)
    assert not CODEC.verify(header, BlockHash(other), PARTS, checksums)


@given(st.binary(max_size=200))
def test_noise_is_no_header(noise: bytes) -> None:
    assert not CODEC.verify(noise, HASH, PARTS, True)
