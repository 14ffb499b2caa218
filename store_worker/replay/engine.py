"""One run: every request looks up, loads, saves and ends its turn as an engine would.

What runs is the product's own: `MemoryIndex`, `search`, `placement`, a policy. A turn takes no
time, so a lease protects it for its own instant only, and an engine holds no blocks of its own:
all that hits comes from the store.
"""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from connector.clock import ManualClock, SystemClock
from connector.ids import NO_HASH, BlockHash, Generation, GrantId, Namespace, NodeId, SessionKey
from connector.indexmsg import (
    Boundary,
    CommitRequest,
    DeclineReason,
    Granted,
    PrepareRequest,
    TurnEnd,
    Victim,
)
from connector.lookup import LookupOutcome
from store_worker import placement
from store_worker.index import IndexOptions, MemoryIndex, search
from store_worker.index.limits import ROOM_TRIES
from store_worker.policy import FIT_INTERVAL_MS, make_policy
from store_worker.replay.nodes import Nodes, skew
from store_worker.replay.report import Lookups, Result, Setup, loss, spread
from store_worker.replay.trace import Request, last_turns

NAMESPACE = Namespace(b"replay".ljust(16, b"\0"))
LEASE_S = 0.001
SAVE_BLOCKS = 16
WALKS = 12
TURNS_PER_READ = 5_000


class Turn(NamedTuple):
    """A request that has been looked up. hit: blocks loaded. new_tokens: of the prompt, past what
    its session had before or, in a first turn, past what others have stored."""

    request: Request
    generation: Generation
    hit: int
    new_tokens: int


class CountedIndex(MemoryIndex):
    """Counts the hashes that lookups ask about."""

    probed = 0

    def probe(self, namespace: Namespace, hashes: Sequence[BlockHash]) -> tuple[bool, ...]:
        """See SessionIndex."""
        self.probed += len(hashes)
        return super().probe(namespace, hashes)


class Replay:
    """State of one run. `run` drives it; the parts are here to be called one by one in tests."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.clock = ManualClock()
        self.index = CountedIndex(self.clock, IndexOptions(high_water=1.0))
        self.policy = make_policy(setup.policy)
        names = [NodeId(f"node{i}") for i in range(setup.nodes)]
        self.nodes = Nodes(names)
        self._capacity = max(1, setup.capacity_blocks // setup.nodes)
        for name in names:
            self.index.register_node(name, b"first", self._capacity)
        self._seen_events = 0
        self._next_fit_ms = 0
        self.parents: dict[BlockHash, BlockHash] = {}
        self.asked = self.hit = self.written = self.declined = 0
        self.tips = self.comparisons = self.trips = 0
        self.touched: dict[int, int] = {}
        self.lost: dict[NodeId, int] = dict.fromkeys(names, 0)
        self.skews: list[float] = []
        self.holes = 0

    # -- time --------------------------------------------------------------------------------

    def advance(self, at_ms: int) -> None:
        """Move to a time, or 1 ms on, since order of use is by time: requests of one instant come
        one after another. The policy publishes when it is due, the janitor sweeps."""
        now_ms = round(self.clock.now() * 1000)
        at_ms = max(at_ms, now_ms + 1)
        self.clock.advance((at_ms - now_ms) / 1000)
        lose = self.setup.lose
        if lose is not None and now_ms < lose[1] * 1000 <= at_ms:
            self.lose(self.nodes.names[lose[0]])
        if at_ms >= self._next_fit_ms:
            self._next_fit_ms = at_ms + FIT_INTERVAL_MS
            self.fit()
            for name in self.nodes.names:
                self._delete(self.index.dying(name))

    def fit(self) -> None:
        """Read the index's log, publish a table."""
        while True:
            self._seen_events, events = self.index.turns(self._seen_events, TURNS_PER_READ)
            for event in events:
                self.policy.observe(event)
            if len(events) < TURNS_PER_READ:
                break
        self.index.set_scores(self.policy.fit(self.clock.wall_ms()))

    def lose(self, node: NodeId) -> None:
        """The node comes back empty."""
        self.nodes.wipe(node)
        self.index.register_node(node, b"again", self._capacity)

    def _delete(self, victims: Sequence[Victim]) -> None:
        if victims:
            self.nodes.delete(victims)
            self.index.freed(victims)

    # -- one turn ----------------------------------------------------------------------------

    def turn(self, request: Request, last: bool = False) -> None:
        """One request. last: it carries the hint that its session ends with it, so there is
        nothing to save and the session is closed, once the turn's lease is over."""
        self.asked += len(request.hashes)
        if not request.hashes:
            return
        self.parents.update(zip(request.hashes, (NO_HASH, *request.hashes), strict=False))
        turn = self._look_up(request)
        if last:
            self.clock.advance(2 * LEASE_S)
            self._close(request.session)
        else:
            self._save(turn)

    def _look_up(self, request: Request) -> Turn:
        hashes = request.hashes
        found = search.find(self.index, NAMESPACE, request.session, hashes, LEASE_S)
        boundaries = found.recalled.boundaries
        self.tips += found.outcome is LookupOutcome.HIT_TIP
        self.trips += found.round_trips
        self.comparisons += len(boundaries)
        depth = found.acquired.depth
        if self.setup.placement == "block" and depth:
            # One load of the product reads at most 64 slices; the control policy is not judged
            # by that.
            holders = self.nodes.holders(hashes)
            depth = len(holders)
            self._loaded([(node, len(list(same))) for node, same in groupby(holders)], hashes)
        else:
            self._loaded([(s.node, s.stop - s.start) for s in found.acquired.slices], hashes)
        best = search.best_boundary(boundaries, hashes)
        known = best.depth if best is not None else depth
        new_tokens = max(0, request.prompt_tokens - known * self.setup.tokens_per_block)
        return Turn(request, found.recalled.generation, depth, new_tokens)

    def _loaded(self, pieces: Sequence[tuple[NodeId, int]], chain: Sequence[BlockHash]) -> None:
        """Count a load of consecutive (node, blocks) from the root. The nodes must hold them."""
        depth = 0
        for node, blocks in pieces:
            assert self.nodes.held[node].issuperset(chain[depth : depth + blocks]), "not there"
            self.nodes.read[node] += blocks
            depth += blocks
        if not depth:
            return
        self.hit += depth
        touched = {node for node, _ in pieces}
        self.touched[len(touched)] = self.touched.get(len(touched), 0) + 1
        for node, end in self.nodes.prefixes(chain[:depth], touched).items():
            self.lost[node] += depth - end

    def _save(self, turn: Turn) -> None:
        """Save what is missing, piece by piece, until it is declined; then end the turn."""
        hashes, step = turn.request.hashes, SAVE_BLOCKS
        if self.setup.placement == "block":
            step = 1
        at, ended = turn.hit, False
        while at < len(hashes):
            stop = min(len(hashes), at + step)
            granted = self._room(turn, at, stop)
            if granted is None:
                self.declined += len(hashes) - at
                break
            new = hashes[at + granted.first_missing : stop]
            self.nodes.put(granted.node, new)
            self.written += len(new)
            ended = stop == len(hashes)
            self._commit(turn, at, granted, len(new), ended)
            at = stop
        if not ended:
            self._commit(turn, at, None, 0, True)

    def _room(self, turn: Turn, start: int, stop: int) -> Granted | None:
        hashes, session = turn.request.hashes, turn.request.session
        names, how = self.nodes.names, self.setup.placement
        request = PrepareRequest(
            namespace=NAMESPACE,
            session=session,
            generation=turn.generation,
            parent=hashes[start - 1] if start else NO_HASH,
            start=start,
            hashes=hashes[start:stop],
            nodes=placement.candidates(
                session, hashes[start], names, "block" if how == "block" else "session"
            ),
            object_bytes=1,
            new_tokens=turn.new_tokens,
        )
        for _ in range(ROOM_TRIES):
            answer = self.index.prepare(request)
            self._delete(answer.victims)
            if isinstance(answer, Granted):
                return answer
            if answer.reason is not DeclineReason.ROOM:
                break
        return None

    def _commit(self, turn: Turn, at: int, granted: Granted | None, saved: int, ends: bool) -> None:
        """Make a piece visible, or touch the chain up to `at`."""
        hashes = turn.request.hashes
        answer = self.index.commit(
            CommitRequest(
                namespace=NAMESPACE,
                session=turn.request.session,
                generation=turn.generation,
                grant=granted.grant if granted else GrantId(0),
                saved=saved,
                parent=hashes[at - 1] if at else NO_HASH,
                start=at,
                turn_end=_turn_end(turn) if ends else None,
                beyond=hashes[at] if at < len(hashes) else NO_HASH,
            )
        )
        self._delete(answer.losers)
        for step in answer.copy:
            self.nodes.put(step.node, [step.hash])
        if answer.copy:
            self._delete(self.index.copied(answer.copy))

    def _close(self, session: SessionKey) -> None:
        closed = self.index.close(session)
        self._delete(closed.victims)
        while closed.more:
            closed = self.index.close(session, resume=True)
            self._delete(closed.victims)

    # -- the whole run -----------------------------------------------------------------------

    def walk(self) -> None:
        """Look at what the nodes hold, not at the index."""
        self.holes = max(self.holes, self.nodes.behind_hole(self.parents))
        self.skews.append(skew(len(held) for held in self.nodes.held.values()))

    def result(self, requests: Sequence[Request], seconds: float) -> Result:
        """The run's numbers."""
        stats, nodes = self.index.stats(), self.nodes
        lookups = max(1, sum(1 for request in requests if request.hashes))
        compared = self.comparisons + self.index.probed
        return Result(
            setup=self.setup,
            requests=len(requests),
            sessions=len({request.session for request in requests}),
            blocks_asked=self.asked,
            blocks_hit_usable=self.hit,
            usable_hit_rate=self.hit / self.asked if self.asked else 0.0,
            reusable_share=1 - len(self.parents) / self.asked if self.asked else 0.0,
            blocks_behind_hole=self.holes,
            blocks_written=self.written,
            blocks_declined=self.declined,
            evicted=stats.get("evicted", 0) + stats.get("evicted_unwanted", 0),
            closed_blocks=stats.get("closed_blocks", 0),
            copies_made=stats.get("copies_made", 0),
            nodes_per_load=spread(self.touched),
            stored_skew=sum(self.skews) / len(self.skews) if self.skews else 1.0,
            read_skew=skew(nodes.read.values()),
            hit_share_lost_on_node_loss=loss(list(self.lost.values()), self.hit),
            lookups=Lookups(self.tips, compared / lookups, self.trips / lookups),
            stored_per_node=tuple(len(nodes.held[name]) for name in nodes.names),
            read_per_node=tuple(nodes.read[name] for name in nodes.names),
            seconds=seconds,
        )


def _turn_end(turn: Turn) -> TurnEnd:
    hashes = turn.request.hashes
    marks = [d for d in (len(hashes), len(hashes) - 1) if d > 0]
    return TurnEnd(tuple(Boundary(d, hashes[d - 1]) for d in marks), turn.new_tokens)


def run(
    requests: Sequence[Request], setup: Setup, progress: Callable[[int], None] | None = None
) -> Result:
    """Replay a trace. progress: told how many requests are done, a hundred times or so."""
    clock = SystemClock()
    started_s = clock.now()
    replay = Replay(setup)
    flagged = ending(requests, setup)
    every, walk_every = max(1, len(requests) // 100), max(1, len(requests) // WALKS)
    with _no_garbage():
        for i, request in enumerate(requests):
            replay.advance(request.at_ms)
            replay.turn(request, i in flagged)
            if progress is not None and (i + 1) % every == 0:
                progress(i + 1)
            if (i + 1) % walk_every == 0:
                replay.walk()
        replay.walk()
    return replay.result(requests, clock.now() - started_s)


@contextlib.contextmanager
def _no_garbage() -> Iterator[None]:
    """No look for cycles, of which a replay makes none: among its records it takes a tenth of the
    time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def ending(requests: Sequence[Request], setup: Setup) -> frozenset[int]:
    """Positions of the turns that carry an end hint: the last ones of a share of the sessions."""
    if setup.end_hints <= 0:
        return frozenset()
    chance = random.Random(setup.seed)
    return frozenset(i for i in sorted(last_turns(requests)) if chance.random() < setup.end_hints)
