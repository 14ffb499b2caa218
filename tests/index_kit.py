"""Driving a session index by hand: chains of hashes, saves in one call."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from connector.ids import NO_HASH, NO_SESSION, BlockHash, Generation, Namespace, NodeId, SessionKey
from connector.indexmsg import (
    Boundary,
    CommitRequest,
    Committed,
    Declined,
    Granted,
    PrepareRequest,
    TurnEnd,
)
from store_worker.index.base import SessionIndex

NS = Namespace(b"n" * 16)
OTHER_NS = Namespace(b"o" * 16)
A, B = NodeId("a:1"), NodeId("b:2")
BLOCK = 1000
INC = b"inc-1   "


def chain(name: str, blocks: int, after: tuple[BlockHash, ...] = ()) -> tuple[BlockHash, ...]:
    """`after`, and `blocks` more hashes, each of all before it and the name."""
    hashes = list(after)
    last = after[-1] if after else b""
    for i in range(blocks):
        last = BlockHash(hashlib.sha256(last + name.encode() + str(i).encode()).digest())
        hashes.append(last)
    return tuple(hashes)


def key(name: str) -> SessionKey:
    """A session key of that name."""
    return SessionKey(hashlib.sha256(name.encode()).digest()[:16])


@dataclass
class Driver:
    """An index and virtual time."""

    index: SessionIndex
    now: int = 1_000_000
    nodes: tuple[NodeId, ...] = (A,)
    namespace: Namespace = NS

    def at(self, seconds: float) -> Driver:
        """Move time forward."""
        self.now += round(seconds * 1000)
        return self

    def generation(self, session: SessionKey) -> Generation:
        return self.index.recall(self.namespace, session, self.now).generation

    def ask(
        self,
        hashes: tuple[BlockHash, ...],
        start: int = 0,
        session: SessionKey = NO_SESSION,
        **more: object,
    ) -> Granted | Declined:
        """`prepare` of the blocks of a chain after depth `start`."""
        request = PrepareRequest(
            namespace=self.namespace,
            session=session,
            generation=self.generation(session) if session else Generation(0),
            parent=hashes[start - 1] if start else NO_HASH,
            start=start,
            hashes=hashes[start:],
            nodes=self.nodes,
            object_bytes=BLOCK,
        )
        return self.index.prepare(replace_fields(request, more), self.now)

    def settle(
        self,
        granted: Granted,
        saved: int,
        session: SessionKey = NO_SESSION,
        turn: TurnEnd | None = None,
        generation: Generation | None = None,
    ) -> Committed:
        """`commit` of a grant."""
        if generation is None:
            generation = self.generation(session) if session else Generation(0)
        request = CommitRequest(
            namespace=self.namespace, session=session, generation=generation, grant=granted.grant,
            saved=saved, turn_end=turn,
        )  # fmt: skip
        return self.index.commit(request, self.now)

    def save(
        self,
        hashes: tuple[BlockHash, ...],
        start: int = 0,
        session: SessionKey = NO_SESSION,
        turn_end: bool = True,
        **more: object,
    ) -> Granted:
        """Store a chain: ask (deleting victims at once, as often as needed), then commit."""
        for _ in range(64):
            answer = self.ask(hashes, start, session, **more)
            if answer.victims:
                self.index.freed(answer.victims, self.now)
            if isinstance(answer, Granted):
                break
            assert answer.victims, answer
        assert isinstance(answer, Granted)
        tokens = int(more.get("new_tokens", 0))  # type: ignore[call-overload]
        turn = TurnEnd((Boundary(len(hashes), hashes[-1]),), tokens) if turn_end else None
        done = self.settle(answer, len(hashes) - start - answer.first_missing, session, turn)
        assert done.outcome == "ok", done
        if done.losers:
            self.index.freed(done.losers, self.now)
        return answer

    def touch(self, hashes: tuple[BlockHash, ...], session: SessionKey = NO_SESSION) -> Committed:
        """A turn that stores nothing new."""
        request = CommitRequest(
            namespace=self.namespace, session=session,
            generation=self.generation(session) if session else Generation(0),
            parent=hashes[-1], start=len(hashes),
            turn_end=TurnEnd((Boundary(len(hashes), hashes[-1]),)),
        )  # fmt: skip
        return self.index.commit(request, self.now)

    def depth(self, hashes: tuple[BlockHash, ...], lease_s: float = 0.0) -> int:
        """How much of a chain can be loaded (a use of it)."""
        found = self.index.acquire(
            self.namespace, [(hashes[-1], len(hashes))], lease_s, NO_SESSION, self.now
        )
        return found.depth

    def listed(self, hashes: tuple[BlockHash, ...]) -> int:
        """How many blocks of a chain are listed; all deeper ones are not."""
        flags = [f for i in range(0, len(hashes), 128)
                 for f in self.index.probe(self.namespace, hashes[i : i + 128])]  # fmt: skip
        count = sum(flags)
        assert flags == [True] * count + [False] * (len(flags) - count), "a hole"
        return count

    def sound(self) -> None:
        assert self.index.check_integrity() == []


def replace_fields(request: PrepareRequest, more: dict[str, object]) -> PrepareRequest:
    """A copy with other values."""
    import msgspec

    return msgspec.structs.replace(request, **more) if more else request


__all__ = ["A", "B", "BLOCK", "INC", "NS", "OTHER_NS", "Driver", "chain", "key", "replace"]
