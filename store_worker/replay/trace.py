"""Request traces: one JSON object per line, in the Mooncake format.

Fields of a line: `timestamp` (milliseconds), `input_length` and `output_length` (tokens),
`hash_ids` (one number per block of the prompt; equal numbers, equal prefixes), and, if the trace
has them, `session_id`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec

from connector.errors import SessionKVError
from connector.ids import BlockHash, SessionKey

FANOUT_SHARED = 8
"""A block that so many different blocks follow ends a shared part: it is nobody's conversation."""


class TraceError(SessionKVError):
    """A trace that can't be replayed; says which line and why."""


class Line(msgspec.Struct):
    """A line as it is in the file."""

    timestamp: float
    input_length: int
    hash_ids: list[int]
    output_length: int = 0
    session_id: str | None = None


class Request(NamedTuple):
    """One turn. hashes: the chain of the prompt's whole blocks; session: of 16 bytes."""

    at_ms: int
    prompt_tokens: int
    hashes: tuple[BlockHash, ...]
    session: SessionKey


def read(path: Path, tokens_per_block: int) -> list[Request]:
    """The trace's requests in order of time. Raises TraceError."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise TraceError(f"can't read the trace {path}: {error.strerror}") from error
    decoder = msgspec.json.Decoder(Line)
    lines: list[Line] = []
    for number, row in enumerate(text.splitlines(), 1):
        if not row.strip():
            continue
        try:
            lines.append(decoder.decode(row))
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            raise TraceError(
                f"{path}, line {number}: {error}; expected a JSON object with timestamp,"
                " input_length and hash_ids"
            ) from error
    if not lines:
        raise TraceError(f"{path} has no requests")
    lines.sort(key=lambda line: line.timestamp)
    return build(lines, tokens_per_block)


def build(lines: Iterable[Line], tokens_per_block: int) -> list[Request]:
    """Chains and sessions of lines that are in order of time."""
    lines = list(lines)
    chained: dict[tuple[BlockHash, int], BlockHash] = {}
    chains = [
        _chain(chained, line.hash_ids[: max(0, line.input_length) // tokens_per_block])
        for line in lines
    ]
    inferred = infer_sessions(chains)
    start = lines[0].timestamp if lines else 0.0
    return [
        Request(
            at_ms=round(line.timestamp - start),
            prompt_tokens=line.input_length,
            hashes=chain,
            session=_key(f"field {line.session_id}" if line.session_id else f"inferred {number}"),
        )
        for line, chain, number in zip(lines, chains, inferred, strict=True)
    ]


def _key(text: str) -> SessionKey:
    return SessionKey(hashlib.sha256(text.encode()).digest()[:16])


def _chain(
    chained: dict[tuple[BlockHash, int], BlockHash], ids: Iterable[int]
) -> tuple[BlockHash, ...]:
    """Hashes that stand for (hash of the block before, id): chained whatever the trace's ids are,
    and the same blocks as the ids if those are."""
    at = BlockHash(b"")
    out: list[BlockHash] = []
    for number in ids:
        at = chained.setdefault((at, number), BlockHash(len(chained).to_bytes(8, "big")))
        out.append(at)
    return tuple(out)


def infer_sessions(chains: list[tuple[BlockHash, ...]]) -> list[int]:
    """A session number per request: a request continues the conversation that last used the
    deepest block of its chain that was used before, unless that block is shared by many."""
    following: dict[BlockHash, set[BlockHash]] = {}
    for chain in chains:
        for block, child in pairwise(chain):
            children = following.setdefault(block, set())
            if len(children) < FANOUT_SHARED:
                children.add(child)
    shared = {block for block, kids in following.items() if len(kids) >= FANOUT_SHARED}
    owner: dict[BlockHash, int] = {}
    sessions: list[int] = []
    for number, chain in enumerate(chains):
        own_from = max((d for d, block in enumerate(chain, 1) if block in shared), default=0)
        known = next((b for b in reversed(chain[own_from:]) if b in owner), None)
        session = number if known is None else owner[known]
        owner.update(dict.fromkeys(chain[own_from:], session))
        sessions.append(session)
    return sessions


def last_turns(requests: Sequence[Request]) -> set[int]:
    """The positions of each session's last turn."""
    return set({request.session: i for i, request in enumerate(requests)}.values())
