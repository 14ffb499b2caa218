"""Byte-level vocabulary: a token is a byte, plus a few specials. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable

NUM_BYTES = 256
BOS = 256
EOS = 257
TURN_START = 258
TURN_END = 259
NUM_TOKENS = 260

SPECIALS: dict[int, str] = {
    BOS: "<s>",
    EOS: "</s>",
    TURN_START: "<|im_start|>",
    TURN_END: "<|im_end|>",
}

PRINTABLE = range(0x20, 0x7F)
"""What the model can sample, beside EOS: so replies re-tokenize to themselves."""


def encode(text: str) -> list[int]:
    """UTF-8 bytes as token ids; no special token is added or recognised.

    Raises UnicodeEncodeError on lone surrogates.
    """
    return list(text.encode("utf-8"))


def token_bytes(token: int) -> bytes:
    """The bytes a token stands for; empty for specials and unused ids."""
    return bytes((token,)) if 0 <= token < NUM_BYTES else b""


def decode(tokens: Iterable[int]) -> str:
    """Text of the tokens: specials are left out, bad UTF-8 becomes U+FFFD."""
    return bytes(token for token in tokens if 0 <= token < NUM_BYTES).decode("utf-8", "replace")
