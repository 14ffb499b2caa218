"""Names of what is stored: the namespace, the key of an object, the keys that are reserved.

Pure functions; any thread.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import msgspec

from connector.ids import BlockHash, Namespace

FORMAT_VERSION = 1
"""Of keys, headers and payloads together. A new one is a new namespace: nothing is converted."""

NAMESPACE_BYTES = 16
STORE_BYTES = 8
RANK_MAX = 0xFFFF
HASH_BYTES_MAX = 64

OBJECT_PREFIX = b"skvo:"
INCARNATION_KEY = b"{skv-node}:incarnation"
PROBE_KEY = b"{skv-node}:probe:"

_DOMAIN = b"session-kv namespace\0"
_RANK_AT = len(OBJECT_PREFIX) + STORE_BYTES + NAMESPACE_BYTES
_HASH_AT = _RANK_AT + 2


class NamespaceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that changes the bytes or the meaning of a block (DESIGN section 7).

    Two engines share blocks if and only if all of these are equal. LoRA adapters, salts and
    multimodal inputs are not here: the engine's own block hashes hold them.

    model, revision: which weights. kv_dtype: of the cache, as the engine names it.
    quantization: of the weights; it changes the values that are cached.
    layers, kv_heads, head_size: of the whole model, not of one rank.
    layout: `PagedCache.layout`, the order of the bytes within a block.
    hash_algorithm, hash_seed: of the engine's block hashes; the seed as a fingerprint.
    payload_bytes: of one block on one rank. epoch: moved by `reset_cache`.
    """

    model: str
    kv_dtype: str
    tokens_per_block: int
    layers: int
    kv_heads: int
    head_size: int
    layout: str
    payload_bytes: int
    hash_algorithm: str
    hash_seed: str
    tenant: str
    revision: str = ""
    quantization: str = ""
    epoch: str = ""
    tp_size: int = 1
    pp_size: int = 1
    dcp_size: int = 1
    format_version: int = FORMAT_VERSION


def namespace_text(spec: NamespaceSpec) -> bytes:
    """The canonical JSON of a spec: what is digested, and the readable copy that is stored."""
    return msgspec.json.encode(spec, order="deterministic")


def namespace_of(spec: NamespaceSpec) -> Namespace:
    """16 bytes that stand for the spec; equal specs give equal bytes in every process."""
    return Namespace(hashlib.sha256(_DOMAIN + namespace_text(spec)).digest()[:NAMESPACE_BYTES])


def namespace_key(namespace: Namespace) -> bytes:
    """Where the readable copy of a namespace is kept (in the index: same tag as its keys)."""
    return b"{skv}:namespace:" + namespace.hex().encode()


class ObjectName(NamedTuple):
    """The parts of an object's key."""

    store: bytes
    namespace: Namespace
    hash: BlockHash
    rank: int


def object_key(store: bytes, namespace: Namespace, hash: BlockHash, rank: int) -> bytes:
    """Key of one block on one rank: prefix, store incarnation, namespace, rank, hash.

    store: 8 bytes. namespace: 16 bytes. hash: 1 to 64 bytes. rank: 0 to 65535.
    """
    assert len(store) == STORE_BYTES, store
    assert len(namespace) == NAMESPACE_BYTES, namespace
    assert 0 < len(hash) <= HASH_BYTES_MAX, hash
    assert 0 <= rank <= RANK_MAX, rank
    return OBJECT_PREFIX + store + namespace + rank.to_bytes(2, "big") + hash


def parse_object_key(key: bytes) -> ObjectName | None:
    """The reverse of `object_key`; None if the key is not an object's."""
    if not key.startswith(OBJECT_PREFIX) or not 0 < len(key) - _HASH_AT <= HASH_BYTES_MAX:
        return None
    at = len(OBJECT_PREFIX)
    return ObjectName(
        store=key[at : at + STORE_BYTES],
        namespace=Namespace(key[at + STORE_BYTES : _RANK_AT]),
        hash=BlockHash(key[_HASH_AT:]),
        rank=int.from_bytes(key[_RANK_AT:_HASH_AT], "big"),
    )
