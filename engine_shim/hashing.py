"""Chained block hashes.

    h[-1] = sha256("engine-shim block chain 1")
    h[i]  = sha256(h[i-1] || extra || token ids of block i as little-endian uint32)

`extra` is the cache salt (UTF-8, preceded by its length as uint32) in the first block, and absent
in all others: so equal hashes at depth d mean equal salt and equal first d blocks. 32 bytes, equal
in every process. Pure functions.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import numpy as np

HASH_BYTES = 32
ROOT = hashlib.sha256(b"engine-shim block chain 1").digest()
"""Parent of every chain's first block; never the hash of a block."""


def extend_chain(
    chain: list[bytes], token_ids: Sequence[int], block_size: int, cache_salt: str | None = None
) -> None:
    """Append the hashes of all full blocks of `token_ids` that `chain` does not have yet.

    chain: hashes of the first len(chain) blocks of these tokens.
    """
    first, last = len(chain), len(token_ids) // block_size
    if first >= last:
        return
    raw = np.asarray(token_ids[first * block_size : last * block_size], dtype="<u4").tobytes()
    parent = chain[-1] if chain else ROOT
    for index in range(last - first):
        salt = _salt_bytes(cache_salt) if first + index == 0 else b""
        block = raw[index * block_size * 4 : (index + 1) * block_size * 4]
        parent = hashlib.sha256(parent + salt + block).digest()
        chain.append(parent)


def _salt_bytes(cache_salt: str | None) -> bytes:
    if not cache_salt:
        return b""
    salt = cache_salt.encode("utf-8")
    return struct.pack("<I", len(salt)) + salt
