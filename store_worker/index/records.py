"""The index's records, as plain data, and a sorted set like the server's.

`State` is everything: the reference index works on it, and `snapshot` reads a server's keys into
one, so that a single `check` serves both. Owner: whoever owns the index that holds the state.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf, nextafter
from typing import Any, NamedTuple

from connector.indexmsg import Committed
from store_worker.index.limits import LEVEL_NORMAL, LOG_MAX, TIMES_SHARED
from store_worker.policy import LRU_TABLE, Ended, ScoreTable, Turn

BlockKey = tuple[bytes, bytes]
"""(namespace, block hash)."""
ListKey = tuple[int, int]
"""(level, class) of a list of leaves."""
BUSY: ListKey = (-1, 0)
"""Leaves under a lease, by its end."""


class Zset:
    """Members with scores, in order of (score, member); members of one set are comparable."""

    __slots__ = ("_order", "_scores")

    def __init__(self) -> None:
        self._scores: dict[Any, float] = {}
        self._order: list[tuple[float, Any]] = []

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, member: object) -> bool:
        return member in self._scores

    def __iter__(self) -> Iterator[Any]:
        return (member for _, member in self._order)

    def items(self) -> list[tuple[Any, float]]:
        """(member, score) in order."""
        return [(member, score) for score, member in self._order]

    def score(self, member: Any) -> float | None:
        """None if it is no member."""
        return self._scores.get(member)

    def add(self, member: Any, score: float) -> None:
        """Put it in, or move it."""
        old = self._scores.get(member)
        if old == score:
            return
        if old is not None:
            del self._order[bisect_left(self._order, (old, member))]
        self._scores[member] = score
        if not self._order or (score, member) > self._order[-1]:
            self._order.append((score, member))
        else:
            insort(self._order, (score, member))

    def discard(self, member: Any) -> bool:
        """Take it out; False if it was not in."""
        old = self._scores.pop(member, None)
        if old is None:
            return False
        del self._order[bisect_left(self._order, (old, member))]
        return True

    def first(self) -> tuple[float, Any] | None:
        """(score, member) at the low end."""
        return self._order[0] if self._order else None

    def last(self) -> tuple[float, Any] | None:
        """(score, member) at the high end."""
        return self._order[-1] if self._order else None

    def second(self, from_end: bool) -> tuple[float, Any] | None:
        """The neighbour of `first` or `last`."""
        if len(self._order) < 2:
            return None
        return self._order[-2] if from_end else self._order[1]

    def upto(self, score: float, limit: int) -> list[Any]:
        """At most `limit` members with scores up to `score`, from the low end."""
        found = []
        for their, member in self._order[:limit]:
            if their > score:
                break
            found.append(member)
        return found

    def between(self, low: float, high: float) -> list[Any]:
        """Members with low <= score <= high."""
        return [member for _, member in self._order[self._at(low) : self._at(nextafter(high, inf))]]

    def beyond(self, low: float) -> list[Any]:
        """Members with low <= score."""
        return [member for _, member in self._order[self._at(low) :]] if self._order else []

    def count(self, low: float, high: float) -> int:
        """How many have low <= score <= high."""
        return self._at(nextafter(high, inf)) - self._at(low)

    def _at(self, score: float) -> int:
        return bisect_left(self._order, (score,))


class Mark(NamedTuple):
    """A use: the block at `depth` (and so all above it) was used at `at_ms`."""

    depth: int
    at_ms: int
    cls: int


class Lease(NamedTuple):
    """The block at `depth` may not go before `until_ms`."""

    depth: int
    until_ms: int


class Copy(NamedTuple):
    """Blocks (start of the run, upto] also lie on `node`."""

    node: int
    epoch: int
    upto: int


@dataclass(slots=True)
class Run:
    """Consecutive blocks (start, stop] of one chain, on one node, saved together.

    parent: hash of the block at `start`; empty at the root. children: child runs and running
    grants (negative ids, half a depth deeper) by the depth that they hang from. marks ascend in
    depth and descend in time: what is evicted from the end has been used last at the time of the
    first mark at or below it. where: the list it is in, while its last block is a leaf.
    node 0: nowhere, its data is lost.
    """

    id: int
    ns: bytes
    parent: bytes
    start: int
    stop: int
    node: int
    epoch: int
    ranks: int
    block_bytes: int
    hashes: list[bytes]
    marks: list[Mark] = field(default_factory=list)
    leases: list[Lease] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    shared: list[int] = field(default_factory=list)
    free: bool = False
    where: ListKey | None = None
    children: Zset = field(default_factory=Zset)
    holders: Zset = field(default_factory=Zset)

    def hash_at(self, depth: int) -> bytes:
        """Of the block that ends at `depth`."""
        return self.hashes[depth - self.start - 1]

    def leaf_class(self, s: State) -> int:
        """Class of its last block. At the end of a shared part: the highest times used, whatever
        the last of the many that came this way was."""
        shared = max(self.shared, default=0)
        return self.marks[-1].cls if self.stop > shared else s.table.class_of(TIMES_SHARED, 0)

    def first_cut(self, s: State, stop: int) -> Mark | None:
        """The use that passes up if the blocks beyond `stop` go; inside a shared part, as one of
        its class."""
        cut = next((m for m in self.marks if m.depth > stop), None)
        inside = cut is not None and stop < max(self.shared, default=0)
        return cut._replace(cls=s.table.class_of(TIMES_SHARED, 0)) if cut and inside else cut

    def top_child(self) -> int:
        """The deepest depth that something hangs from; `start` if nothing does."""
        top = self.children.last()
        return self.start if top is None else int(top[0])

    def top_holder(self) -> int:
        """The deepest depth that a session holds; `start` if none does."""
        top = self.holders.last()
        return self.start if top is None else min(int(top[0]), self.stop)

    def unwanted(self, depth: int) -> bool:
        """Nobody wants the block at `depth`, where the run ends or will: no session and no block
        behind it. A save that is under way may still need it."""
        return (
            depth > self.start
            and self.top_holder() < depth
            and not self.children.count(depth, depth)
        )


@dataclass(slots=True)
class Dying:
    """A block out of the index whose objects are still on the node."""

    bytes: int
    ranks: int


@dataclass(slots=True)
class Node:
    """A data node. epoch: counts its incarnations; charges: object size to what it really takes;
    promised: blocks of running grants, and of how many."""

    idx: int
    name: str
    incarnation: bytes
    epoch: int = 1
    up: bool = True
    draining: bool = False
    capacity: int = 0
    stored: int = 0
    copies: int = 0
    granted: int = 0
    dying: int = 0
    blocks: int = 0
    recent: tuple[int, int, int] = (0, 0, 0)
    charges: dict[int, int] = field(default_factory=dict)
    dying_blocks: dict[BlockKey, Dying] = field(default_factory=dict)
    dying_order: Zset = field(default_factory=Zset)
    promised: dict[BlockKey, int] = field(default_factory=dict)

    @property
    def used(self) -> int:
        """Bytes that are taken or promised."""
        return self.stored + self.copies + self.granted + self.dying


@dataclass(slots=True)
class Place:
    """Runs of one node in one incarnation."""

    lists: dict[ListKey, Zset] = field(default_factory=dict)
    timers: Zset = field(default_factory=Zset)
    runs: Zset = field(default_factory=Zset)
    copied: Zset = field(default_factory=Zset)


@dataclass(slots=True)
class Grant:
    """Room for `hashes`, which follow `parent` (its depth is `start`). reply: once it has ended."""

    id: int
    ns: bytes
    session: bytes
    generation: int
    parent: bytes
    start: int
    hashes: tuple[bytes, ...]
    node: int
    epoch: int
    ranks: int
    block_bytes: int
    new_tokens: int
    reply: Committed | None = None


@dataclass(slots=True)
class Session:
    """One session id's record. holds: run ids by time. boundaries: per namespace, newest first."""

    generation: int
    seq: int
    home: int = 0
    turns: int = 0
    last_ms: int = 0
    priority: int = 0
    priority_until_ms: int = 0
    pin_until_ms: int = 0
    pin_bytes: int = 0
    tenant: str = ""
    counted: bool = False
    closed: bool = False
    engines: tuple[str, ...] = ()
    holds: Zset = field(default_factory=Zset)
    boundaries: dict[bytes, list[tuple[int, bytes]]] = field(default_factory=dict)

    def level(self, now_ms: int) -> int:
        """Without a pin."""
        active = self.priority and self.priority_until_ms > now_ms
        return LEVEL_NORMAL + (self.priority if active else 0)


@dataclass(slots=True)
class Conversation:
    """What is remembered of a chain by its first non-shared block: the last turn."""

    turns: int
    at_ms: int
    cls: int
    tip: bytes
    depth: int
    shared: int


@dataclass(slots=True)
class Tenant:
    """What counts against a tenant's limits."""

    sessions: int = 0
    pinned: int = 0


@dataclass(slots=True)
class State:
    """Everything."""

    incarnation: bytes
    secret: bytes
    clock_ms: int = 0
    generation: int = 0
    floor: int = 0
    seq: int = 0
    last_run: int = 0
    last_grant: int = 0
    nodes: dict[str, Node] = field(default_factory=dict)
    places: dict[tuple[int, int], Place] = field(default_factory=dict)
    dead: Zset = field(default_factory=Zset)
    entries: dict[bytes, dict[bytes, tuple[int, int]]] = field(default_factory=dict)
    runs: dict[int, Run] = field(default_factory=dict)
    grants: dict[int, Grant] = field(default_factory=dict)
    grant_ends: Zset = field(default_factory=Zset)
    copying: dict[tuple[int, bytes, bytes], tuple[int, int, int]] = field(default_factory=dict)
    copy_ends: Zset = field(default_factory=Zset)
    sessions: dict[bytes, Session] = field(default_factory=dict)
    by_seq: Zset = field(default_factory=Zset)
    idle: Zset = field(default_factory=Zset)
    pins: Zset = field(default_factory=Zset)
    tenants: dict[str, Tenant] = field(default_factory=dict)
    conversations: dict[BlockKey, Conversation] = field(default_factory=dict)
    by_use: Zset = field(default_factory=Zset)
    # bounded: by LOG_MAX
    log: deque[Turn | Ended] = field(default_factory=lambda: deque(maxlen=LOG_MAX))
    logged: int = 0
    abandoned: Zset = field(default_factory=Zset)
    described: dict[bytes, tuple[str, int]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    table: ScoreTable = LRU_TABLE
    leader: tuple[str, int] = ("", 0)
    by_idx: list[Node] = field(default_factory=list)

    def count(self, name: str, more: int = 1) -> None:
        """Add to a counter of `stats()`."""
        if more:
            self.counts[name] = self.counts.get(name, 0) + more

    def node_at(self, idx: int) -> Node:
        """By number, from 1."""
        return self.by_idx[idx - 1]

    def place(self, idx: int, epoch: int) -> Place:
        """Made when first asked for."""
        place = self.places.get((idx, epoch))
        if place is None:
            place = self.places[idx, epoch] = Place()
        return place
