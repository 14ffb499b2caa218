"""The scripts' flat replies as messages. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from connector.ids import BlockHash, Generation, GrantId, Namespace, NodeId, SessionKey
from connector.indexmsg import (
    Acquired,
    Boundary,
    CommitOutcome,
    Committed,
    CopyStep,
    Declined,
    DeclineReason,
    Granted,
    NodeState,
    RunSlice,
    SessionState,
    Victim,
)
from store_worker.policy import Ended, Turn

Reply = Sequence[bytes]
_BOUNDARY = re.compile(rb"(\d+) (\d+):")


def victims(got: Reply) -> tuple[Victim, ...]:
    """Four values each."""
    return tuple(
        Victim(Namespace(got[i]), BlockHash(got[i + 1]), _node(got[i + 2]), int(got[i + 3]))
        for i in range(0, len(got), 4)
    )


def _node(name: bytes) -> NodeId:
    return NodeId(name.decode())


def node_or_none(name: bytes) -> NodeId | None:
    """An empty name is none."""
    return _node(name) if name else None


def stored_boundaries(packed: bytes) -> list[tuple[int, bytes]]:
    """As the server keeps them, newest first: "seq|", then "depth size:" and the hash each."""
    found: list[tuple[int, bytes]] = []
    at = packed.find(b"|") + 1
    while at < len(packed):
        match = _BOUNDARY.match(packed, at)
        assert match is not None, "boundaries that were not written by us"
        at = match.end() + int(match[2])
        found.append((int(match[1]), packed[match.end() : at]))
    return found


def boundaries(packed: bytes) -> tuple[Boundary, ...]:
    """Deepest first."""
    found = sorted(stored_boundaries(packed), reverse=True)
    return tuple(Boundary(depth, BlockHash(block)) for depth, block in found)


def acquired(got: Reply) -> Acquired:
    """depth, lease end, whether more is being saved, then five values per slice."""
    slices = tuple(
        RunSlice(_node(got[i]), bytes(got[i + 1]), *map(int, got[i + 2 : i + 5]))
        for i in range(3, len(got), 5)
    )
    return Acquired(int(got[0]), slices, int(got[1]), bool(int(got[2])))


def prepared(got: Reply) -> Granted | Declined:
    """Either kind."""
    if got[0] == b"D":
        return Declined(DeclineReason(got[1].decode()), victims(got[2:]))
    return Granted(
        GrantId(int(got[1])), _node(got[2]), bytes(got[3]), int(got[4]), int(got[5]),
        victims(got[6:]),
    )  # fmt: skip


def _steps(got: Reply) -> tuple[CopyStep, ...]:
    """Five values each."""
    return tuple(
        CopyStep(Namespace(got[i]), BlockHash(got[i + 1]), _node(got[i + 2]), _node(got[i + 3]),
                 int(got[i + 4]))
        for i in range(0, len(got), 5)
    )  # fmt: skip


def committed(got: Reply) -> Committed:
    """outcome, how many were there, which; how many copies, five values each; victims."""
    already = tuple(int(i) for i in got[2 : 2 + int(got[1])])
    at = 3 + len(already)
    end = at + 5 * int(got[at - 1])
    outcome = CommitOutcome(got[0].decode())
    return Committed(outcome, already, victims(got[end:]), _steps(got[at:end]))


def moves(got: Reply) -> tuple[tuple[CopyStep, ...], tuple[Victim, ...]]:
    """how many steps, five values each; victims."""
    end = 1 + 5 * int(got[0])
    return _steps(got[1:end]), victims(got[end:])


def nodes(got: Sequence[Reply]) -> tuple[NodeState, ...]:
    """Ten values each."""
    return tuple(
        NodeState(_node(n[0]), bytes(n[1]), n[2] == b"1", n[3] == b"1", *map(int, n[4:]))
        for n in got
    )


def page(got: Reply) -> tuple[int, tuple[SessionState, ...]]:
    """clock, next cursor, then eleven values per session."""
    clock = int(got[0])
    return int(got[1]), tuple(
        _session(got[i : i + 11], clock) for i in range(2, len(got), 11)
    )


def _session(v: Reply, clock: int) -> SessionState:
    pinned, priority, until = int(v[7]), int(v[8]) - 8, int(v[9])
    return SessionState(
        SessionKey(v[0]), Generation(int(v[1])), node_or_none(v[2]), int(v[3]), int(v[4]),
        int(v[5]), int(v[6]), pinned if pinned > clock else 0, priority if until > clock else 0,
        tuple(v[10].decode().split("\n")) if v[10] else (),
    )  # fmt: skip


def namespaces(got: Reply) -> dict[Namespace, tuple[str, int, int]]:
    """namespace, "tokens text", blocks."""
    found: dict[Namespace, tuple[str, int, int]] = {}
    for i in sorted(range(0, len(got), 3), key=lambda i: got[i]):
        tokens, _, text = got[i + 1].decode().partition(" ")
        if text or int(got[i + 2]):
            found[Namespace(got[i])] = text, int(tokens), int(got[i + 2])
    return found


def event(text: bytes) -> Turn | Ended:
    """One line of the turn log."""
    kind, *numbers = text.split()
    values = [int(n) for n in numbers]
    if kind == b"E":
        return Ended(*values)
    at_ms, cls, previous, gap_ms, thousandths = values
    return Turn(at_ms, cls, previous, gap_ms, thousandths / 1000)
