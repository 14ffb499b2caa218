"""Random histories on the reference and on the server's scripts: every reply and all records equal.

After each step both indexes are sound (`check_integrity`), and at the end the server's keys, read
into records, are the reference's records.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import fakeredis
import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from connector.clock import ManualClock
from connector.ids import NO_HASH, NO_SESSION, BlockHash, Namespace, NodeId, SessionKey
from connector.indexmsg import (
    Boundary,
    CommitRequest,
    CopyStep,
    Granted,
    PrepareRequest,
    TurnEnd,
    Victim,
)
from store_worker.index import MemoryIndex
from store_worker.index.options import IndexOptions
from store_worker.index.records import State, Zset
from store_worker.index.redis import RedisIndex
from store_worker.index.snapshot import read_state
from store_worker.policy import TIMES_MIN, TOKENS_MIN, ScoreTable
from tests.index_kit import NS, OTHER_NS, chain, key
from tests.servers import Server

NODES = (NodeId("a:1"), NodeId("b:2"), NodeId("c:3"))
SESSIONS = (NO_SESSION, key("one"), key("two"), key("three"))
BLOCK = 100
OPTIONS = IndexOptions(sessions_max=3, pinned_bytes_max=40 * BLOCK, high_water=0.9, engine="e")


class Named(tuple[BlockHash, ...]):
    """A chain that a failing history prints by name."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"CHAINS[{CHAINS.index(self)}]"


# A small forest: one root whose third block ends a shared part once enough branches are stored.
ROOT = chain("root", 6)
BRANCHES = [
    chain(f"{j}", 5, ROOT[:cut]) for j, cut in enumerate((0, 1, 2, *[3] * 12, 4, 6, 6))
]
CHAINS = [Named(c) for c in (*BRANCHES, ROOT)]
EDGES = (0, 5_000, 60_000)



class How(NamedTuple):
    """How a save is asked for."""

    stale: int = 0
    size: int = 1
    new_tokens: int = 0
    must: bool = False


HOWS = (How(), How(), How(new_tokens=3000), How(new_tokens=40_000), How(must=True), How(size=2),
        How(stale=1))  # fmt: skip
hows = st.sampled_from(HOWS)
chains = st.sampled_from(CHAINS)
depths = st.integers(0, 13)
sessions = st.sampled_from(SESSIONS)
namespaces = st.sampled_from((NS, NS, NS, OTHER_NS))



class Save(NamedTuple):
    """A save to try. back: how many blocks before the first that is not listed it begins.
    saved: -1 leaves the commit for later."""

    c: tuple[BlockHash, ...]
    back: int
    blocks: int
    session: SessionKey
    ns: Namespace
    nodes: list[NodeId]
    how: How
    saved: int
    turn: bool


saves = st.builds(
    Save,
    c=chains,
    back=st.sampled_from((0, 0, 0, 0, 1, 2, 5, 99, -1)),
    blocks=st.integers(1, 13),
    session=sessions,
    ns=namespaces,
    nodes=st.lists(st.sampled_from(NODES), min_size=1, max_size=2, unique=True),
    how=hows,
    saved=st.sampled_from((13, 13, 13, 13, 3, 0, -1, -1)),
    turn=st.booleans(),
)


def records(s: State) -> dict[str, Any]:
    """Plain values of everything but what the two keep differently on purpose."""
    left_out = {"clock_ms", "grants", "places", "log", "secret"}
    found = {
        f.name: plain(getattr(s, f.name)) for f in dataclasses.fields(s) if f.name not in left_out
    }
    found["log"] = list(s.log)
    found["grants"] = {
        g.id: plain(dataclasses.replace(g, reply=g.reply is not None and None)) for g in
        s.grants.values() if g.reply is None
    }  # fmt: skip
    found["places"] = {
        where: plain(place) for where, place in s.places.items()
        if place.lists or place.timers or place.runs or place.copied
    }  # fmt: skip
    return found


def plain(value: Any) -> Any:
    if isinstance(value, Zset):
        return [(m, float(score)) for m, score in sorted(value.items(), key=repr)]
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items() if k != "pending"}
    if isinstance(value, list):
        return [plain(v) for v in value]
    return value


class Twins(RuleBasedStateMachine):
    """Each rule does one thing on both."""

    client: redis.Redis

    def __init__(self) -> None:
        super().__init__()
        self.client.flushall()
        self.server = RedisIndex("", OPTIONS, self.client)
        identity = self.server.identity()
        generation = self.server.recall(NS, key("nobody")).generation
        state = State(identity.incarnation, identity.secret, generation=generation)
        self.twin = MemoryIndex(ManualClock(), OPTIONS, state)
        self.now = 1_000_000
        self.grants: list[tuple[Granted, PrepareRequest]] = []
        self.victims: list[Victim] = []
        self.copies: list[CopyStep] = []
        self.steps = 0

    def both(self, name: str, *args: Any, **more: Any) -> Any:
        self.steps += 1
        ours = getattr(self.twin, name)(*args, **more)
        theirs = getattr(self.server, name)(*args, **more)
        assert theirs == ours, f"{name}{args}: the server says {theirs}, the reference {ours}"
        return ours

    @initialize(capacities=st.lists(st.sampled_from((0, 15, 40, 90, 400)), min_size=3, max_size=3))
    def start(self, capacities: list[int]) -> None:
        for node, blocks in zip(NODES, capacities, strict=True):
            self.both("register_node", node, b"inc0", blocks * BLOCK, self.now)

    @rule(ms=st.sampled_from((0, 1, 1, 700, 700, 4_000, 6_000, 61_000, 700_000)))
    def wait(self, ms: int) -> None:
        self.now += ms

    def save(self, save: Save) -> None:
        """Ask for room for what is not listed yet (or a little more or less), and commit at once,
        unless it is left for later."""
        c, ns, how = save.c, save.ns, save.how
        start = max(0, min(sum(self.both("probe", ns, c)) - save.back, len(c) - 1))
        recalled = self.both("recall", ns, save.session, self.now)
        request = PrepareRequest(
            namespace=ns, session=save.session, generation=recalled.generation - how.stale,
            parent=c[start - 1] if start else NO_HASH, start=start,
            hashes=c[start : start + save.blocks], nodes=tuple(save.nodes),
            object_bytes=BLOCK * how.size, new_tokens=how.new_tokens, must=how.must, grant_s=30.0,
        )  # fmt: skip
        for _ in range(3):
            answer = self.both("prepare", request, self.now)
            if isinstance(answer, Granted) or answer.reason != "room":
                break
            self.both("freed", answer.victims, self.now)
        self.victims += answer.victims
        if isinstance(answer, Granted):
            self.grants.append((answer, request))
            if save.saved >= 0:
                self._commit(*self.grants[-1], saved=save.saved, turn=save.turn)

    @rule(save=saves, low=depths, count=st.integers(1, 9), saved=st.integers(1, 9))
    def lose_and_save(self, save: Save, low: int, count: int, saved: int) -> None:
        """Part of a chain is lost and saved again, not always the whole part."""
        self.save(save._replace(back=0, blocks=13, saved=13))
        gone = self.both("forget", save.ns, save.c[low : low + count], NodeId(""), self.now)
        self.both("freed", gone, self.now)
        back = sum(self.both("probe", save.ns, save.c)) - low
        self.save(save._replace(back=back, blocks=saved, saved=13))

    @rule(session=st.sampled_from(SESSIONS[1:]), node=st.sampled_from(NODES), ns=namespaces)
    def push_out(self, session: Any, node: NodeId, ns: Any) -> None:
        """A chain in several runs (sizes differ), then pressure on its node."""
        c = CHAINS[0]
        for blocks, how in ((2, HOWS[0]), (2, How(size=2)), (1, HOWS[0])):
            self.save(Save(c, 0, blocks, session, ns, [node], how, 13, True))
        for other in CHAINS[-3:]:
            self.now += 1
            self.save(Save(other, 0, 13, NO_SESSION, ns, [node], How(must=True), 13, True))

    # Rules are drawn alike: these make saves as frequent as everything that undoes them.
    save_1 = rule(save=saves)(save)
    save_2 = rule(save=saves)(save)
    save_3 = rule(save=saves)(save)
    save_4 = rule(save=saves)(save)

    @rule(session=sessions, node=st.sampled_from(NODES), count=st.integers(7, 12))
    def branch_out(self, session: Any, node: NodeId, count: int) -> None:
        """Many conversations on one prompt."""
        for c in CHAINS[3 : 3 + count]:
            self.save(Save(c, 0, 13, session, NS, [node], HOWS[0], 13, True))

    def _commit(self, granted: Granted, asked: PrepareRequest, saved: int, turn: bool) -> None:
        tip = asked.start + len(asked.hashes)
        end = TurnEnd((Boundary(tip, asked.hashes[-1]),), asked.new_tokens) if turn else None
        request = CommitRequest(
            namespace=asked.namespace, session=asked.session, generation=asked.generation,
            grant=granted.grant, saved=saved, turn_end=end,
        )  # fmt: skip
        answer = self.both("commit", request, self.now)
        self.victims += answer.losers
        self.copies += answer.copy

    @rule(data=st.data(), saved=st.sampled_from((13, 13, 2, 0)), turn=st.booleans())
    def commit(self, data: Any, saved: int, turn: bool) -> None:
        """One that waits, or one that was committed before."""
        if self.grants:
            i = data.draw(st.integers(0, len(self.grants) - 1))
            self._commit(*self.grants[i], saved=saved, turn=turn)
            del self.grants[:-8]

    @rule(c=chains, depth=depths, session=sessions, ns=namespaces, turn=st.booleans())
    def touch(self, c: Any, depth: int, session: Any, ns: Any, turn: bool) -> None:
        depth = min(depth, len(c))
        generation = self.both("recall", ns, session, self.now).generation
        end = TurnEnd((Boundary(len(c), c[-1]), Boundary(3, c[2])), 5000) if turn else None
        request = CommitRequest(
            namespace=ns, session=session, generation=generation,
            parent=c[depth - 1] if depth else NO_HASH, start=depth, turn_end=end,
            beyond=c[depth] if depth < len(c) else NO_HASH,
        )  # fmt: skip
        self.copies += self.both("commit", request, self.now).copy

    @rule(c=chains, session=sessions, ns=namespaces, lease_s=st.sampled_from((0.0, 5.0, 100.0)))
    def acquire(self, c: Any, session: Any, ns: Any, lease_s: float) -> None:
        flags = self.both("probe", ns, c)
        assert flags == tuple(sorted(flags, reverse=True)), "a hole"
        candidates = [(c[d], d + 1) for d in range(len(c) - 1, -1, -1)]
        self.both("acquire", ns, candidates, lease_s, session, self.now)
        self.both("awaited", ns, c[-1], self.now)

    @rule(data=st.data())
    def freed(self, data: Any) -> None:
        count = data.draw(st.integers(0, len(self.victims)))
        self.both("freed", self.victims[:count], self.now)
        del self.victims[:count]

    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        if self.grants:
            granted, _ = self.grants.pop(data.draw(st.integers(0, len(self.grants) - 1)))
            self.victims += self.both("abort", granted.grant, self.now)

    @rule()
    def copied(self) -> None:
        self.victims += self.both("copied", tuple(self.copies), self.now)
        self.copies = []

    @rule(node=st.sampled_from(NODES), then=st.booleans())
    def move_away(self, node: NodeId, then: bool) -> None:
        """Copy a few blocks of a draining node, and report it at once or later."""
        steps, victims = self.both("moves", node, self.now)
        self.victims += victims
        self.copies += steps
        if then:
            self.copied()

    @rule(node=st.sampled_from(NODES))
    def dying(self, node: NodeId) -> None:
        self.victims += self.both("dying", node, self.now)

    @rule(session=sessions, resume=st.booleans())
    def close(self, session: Any, resume: bool) -> None:
        self.victims += self.both("close", session, self.now, resume).victims

    @rule(c=chains, ns=namespaces, low=depths, count=st.integers(1, 4),
          node=st.sampled_from((*NODES, NodeId(""))))  # fmt: skip
    def forget(self, c: Any, ns: Any, low: int, count: int, node: NodeId) -> None:
        self.victims += self.both("forget", ns, c[low : low + count], node, self.now)

    @rule(session=sessions, priority=st.integers(-2, 4), ttl_s=st.sampled_from((0.0, 3.0, 90.0)))
    def retain(self, session: Any, priority: int, ttl_s: float) -> None:
        self.both("retain", session, priority, ttl_s, self.now)

    @rule(session=sessions, ttl_s=st.sampled_from((3.0, 90.0)))
    def pin(self, session: Any, ttl_s: float) -> None:
        self.both("pin", session, ttl_s, self.now)

    @rule(
        node=st.sampled_from(NODES),
        what=st.sampled_from(("down", "up", "up", "up", "new", "drain", "stay", "stay", "stay")),
    )
    def node(self, node: NodeId, what: str) -> None:
        state = next(n for n in self.twin.nodes() if n.node == node)
        if what == "down":
            self.both("node_down", node, self.now)
        elif what in ("up", "new"):
            incarnation = state.incarnation + b"+" if what == "new" else state.incarnation
            self.both("register_node", node, incarnation, state.capacity, self.now)
        else:
            self.both("drain", node, what == "drain")

    @rule(values=st.lists(st.sampled_from((0.5, 1.0, 2.0)), min_size=48, max_size=48))
    def scores(self, values: list[float]) -> None:
        rows = tuple(tuple(values[i : i + 3]) for i in range(0, 48, 3))
        self.both("set_scores", ScoreTable(TIMES_MIN, TOKENS_MIN, EDGES, rows))

    @rule(c=chains)
    def abandon(self, c: Any) -> None:
        self.both("abandon", NS, c[-1], self.now)

    @invariant()
    def sound(self) -> None:
        """Every violation, on both sides."""
        if self.steps:
            assert self.twin.check_integrity() == []

    def teardown(self) -> None:
        """All records are equal, and so is what people see."""
        self.both("nodes")
        self.both("sessions")
        self.both("stats")
        self.both("turns", 0, 500)
        self.both("namespaces")
        assert self.server.check_integrity() == []
        theirs, ours = records(read_state(self.client)), records(self.twin.state)
        for name in ours:
            assert theirs[name] == ours[name], difference(name, theirs[name], ours[name])


def difference(name: str, theirs: Any, ours: Any) -> str:
    """Where two records differ, not all of both."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        parts = [
            difference(f"{name}[{k!r}]", theirs.get(k), ours.get(k))
            for k in {**theirs, **ours}
            if theirs.get(k) != ours.get(k)
        ]
        return "; ".join(parts)
    return f"{name}: the server has {theirs!r}, the reference {ours!r}"


def run_twins(client: redis.Redis, examples: int, steps: int) -> None:
    machine = type("TwinsOnServer", (Twins,), {"client": client})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as running:
        yield running


@pytest.mark.timeout(300)
def test_twins_on_a_real_server(server: Server) -> None:
    with server.client() as client:
        run_twins(client, examples=100, steps=40)


@pytest.mark.timeout(300)
def test_twins_on_the_fake_server() -> None:
    run_twins(fakeredis.FakeRedis(), examples=4, steps=20)
