"""The start of a link: do both peers lay out their messages alike?

Each peer sends, for every message struct, its field list and a chain of digests, one per field:

    digest[i] = first 8 bytes of sha256(digest[i-1] || name of field i in UTF-8 || 0x00), hex

Equal digests at n mean equal first n fields. Fields are only appended, so two lists must agree up
to the end of the shorter one; if they do not, array decoding would put values into the wrong
fields without any error, and the peers refuse each other. Pure functions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from connector.errors import WireError
from engine_shim import __version__
from engine_shim.protocol import (
    PROTOCOL_VERSION,
    AbortMessage,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineInfo,
    Refusal,
    TokenLogprobs,
    Usage,
    UtilityCall,
    UtilityReply,
)

DIGEST_BYTES = 8
STRUCTS: tuple[type[msgspec.Struct], ...] = (
    EngineCoreRequest,
    AbortMessage,
    UtilityCall,
    UtilityReply,
    EngineCoreOutput,
    EngineCoreOutputs,
    TokenLogprobs,
    Usage,
    EngineInfo,
    Refusal,
)


class Schema(msgspec.Struct, frozen=True):
    """Layout of one message: field names in order, and the chain of their digests in hex."""

    fields: list[str]
    digests: list[str]


class Hello(msgspec.Struct, frozen=True):
    """First message on a link. A map: it must be readable whatever the peer's version is."""

    protocol: str
    product: str
    schemas: dict[str, Schema]


def field_digests(names: Sequence[str]) -> list[str]:
    """The chain of digests of a field list."""
    digests, previous = [], b""
    for name in names:
        previous = hashlib.sha256(previous + name.encode("utf-8") + b"\0").digest()[:DIGEST_BYTES]
        digests.append(previous.hex())
    return digests


def schema_of(struct: type[msgspec.Struct]) -> Schema:
    """Layout of an array-like struct."""
    names = list(struct.__struct_fields__)
    return Schema(names, field_digests(names))


def make_hello(structs: Sequence[type[msgspec.Struct]] = STRUCTS) -> Hello:
    """What this side says."""
    return Hello(PROTOCOL_VERSION, __version__, {s.__name__: schema_of(s) for s in structs})


def check_hello(own: Hello, peer: Hello) -> None:
    """Raises WireError unless every message that both know has a common prefix of fields.

    A message that only one side knows is never sent to the other before it is known there too, so
    it does not matter.
    """
    for name, schema in own.schemas.items():
        other = peer.schemas.get(name)
        if other is None:
            continue
        fault = _first_difference(schema, other)
        if fault is not None:
            raise WireError(
                f"message {name}: field {fault} differs: {_name(schema, fault)} here"
                f" (protocol {own.protocol}, engine_shim {own.product}),"
                f" {_name(other, fault)} at the peer"
                f" (protocol {peer.protocol}, engine_shim {peer.product});"
                " run the same version on both sides"
            )


def _first_difference(own: Schema, peer: Schema) -> int | None:
    """Index of the first field of the common prefix that differs, by the digests."""
    common = min(len(own.digests), len(peer.digests))
    if own.digests[:common] == peer.digests[:common]:
        return None
    pairs = zip(own.digests, peer.digests, strict=False)
    return next(index for index, (mine, theirs) in enumerate(pairs) if mine != theirs)


def _name(schema: Schema, index: int) -> str:
    return repr(schema.fields[index]) if index < len(schema.fields) else "unnamed"


def decode_hello(raw: bytes) -> Hello:
    """Raises WireError if it is none."""
    try:
        return msgspec.msgpack.decode(raw, type=Hello)
    except msgspec.MsgspecError as error:
        raise WireError(
            f"the peer's first message is no Hello of protocol {PROTOCOL_VERSION}: {error}"
        ) from error
