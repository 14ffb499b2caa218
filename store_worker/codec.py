"""The header of a stored object, and its checksum. The byte table is in docs/WIRE.md.

Pure functions; any thread.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

import xxhash

from connector.ids import BlockHash, Namespace
from store_worker.keys import HASH_BYTES_MAX, NAMESPACE_BYTES, RANK_MAX

MAGIC = b"SKVO"
VERSION = 1
FLAG_CHECKSUM = 1
_KNOWN_FLAGS = FLAG_CHECKSUM

# magic, version, flags, rank, payload bytes, namespace, checksum, hash bytes, (7 zero), hash
_HEADER = struct.Struct("<4sBBHQ16sQB7x64s")
HEADER_BYTES = _HEADER.size
_CHECKSUM_AT = 32
_CHECKSUM = struct.Struct("<Q")
_FLAGS_AT = 5


def checksum(regions: Iterable[memoryview]) -> int:
    """xxh3_64 over the regions in order, as one run of bytes."""
    state = xxhash.xxh3_64()
    for region in regions:
        state.update(region)
    return state.intdigest()


class Codec:
    """Writes and checks the headers of one namespace, rank and payload size.

    payload_bytes: the same for every block. An instance belongs to one thread or is only read.
    """

    def __init__(self, namespace: Namespace, rank: int, payload_bytes: int) -> None:
        assert len(namespace) == NAMESPACE_BYTES, namespace
        assert 0 <= rank <= RANK_MAX, rank
        self.namespace, self.rank, self.payload_bytes = namespace, rank, payload_bytes

    @property
    def object_bytes(self) -> int:
        """Bytes of a stored object: header and payload."""
        return HEADER_BYTES + self.payload_bytes

    def header(self, hash: BlockHash, digest: int | None) -> bytes:
        """The header of a block; `digest`: `checksum` of its payload, or None to store none."""
        assert 0 < len(hash) <= HASH_BYTES_MAX, hash
        return _HEADER.pack(
            MAGIC,
            VERSION,
            0 if digest is None else FLAG_CHECKSUM,
            self.rank,
            self.payload_bytes,
            self.namespace,
            digest or 0,
            len(hash),
            hash,
        )

    def pack(self, hash: BlockHash, regions: Sequence[memoryview], checksums: bool) -> bytes:
        """The header of a block whose payload is the regions in order."""
        return self.header(hash, checksum(regions) if checksums else None)

    def verify(
        self,
        header: bytes | bytearray | memoryview,
        hash: BlockHash,
        regions: Sequence[memoryview],
        checksums: bool,
    ) -> bool:
        """Is this the object of that block, whole and unchanged?

        Every field but the checksum is compared with what it must be. The checksum is compared
        with the payload if `checksums` and the writer stored one.
        """
        if len(header) != HEADER_BYTES:
            return False
        flags = header[_FLAGS_AT]
        if flags & ~_KNOWN_FLAGS:
            return False
        (digest,) = _CHECKSUM.unpack_from(header, _CHECKSUM_AT)
        if bytes(header) != self.header(hash, digest if flags & FLAG_CHECKSUM else None):
            return False
        return not (checksums and flags & FLAG_CHECKSUM) or checksum(regions) == digest
