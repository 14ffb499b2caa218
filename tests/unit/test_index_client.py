"""The index client thread and its janitor, over the reference index and in-process nodes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from connector.clock import SystemClock
from connector.config import parse_config
from connector.errors import ConfigError, StoreUnavailable
from connector.ids import (
    NO_HASH,
    BlockHash,
    Generation,
    GrantId,
    JobId,
    Namespace,
    NodeId,
    RequestId,
    SessionKey,
)
from connector.indexmsg import CommitOutcome, DeclineReason
from connector.lookup import (
    AbandonOp,
    CloseOp,
    CommitOp,
    ForgetOp,
    HintKind,
    HintOp,
    IndexOp,
    LookupOp,
    LookupOutcome,
    PrepareOp,
)
from store_worker.backends.base import PutItem
from store_worker.backends.factory import node_id, open_node
from store_worker.executor import ThreadPool
from store_worker.index import open_index
from store_worker.index.client import IndexClient
from store_worker.index.janitor import Desk
from store_worker.index.locked import locked
from store_worker.keys import object_key
from store_worker.nodes import NodeDirectory
from store_worker.policy import NUM_CLASSES, TIMES_MIN, TOKENS_MIN, ScoreTable
from tests.waiting import eventually

NS = Namespace(b"n" * 16)
OBJECT_BYTES = 128
CHARGED = 256
"""At least what an in-process node charges for such an object."""
_names = itertools.count()


def chain(length: int) -> tuple[BlockHash, ...]:
    return tuple(BlockHash(f"block {i}".encode().ljust(32, b".")) for i in range(length))


class Client:
    """An index client with its store, and the replies it has given."""

    def __init__(self, wrap: Callable[[Any], Any] = lambda index: index, **config: Any) -> None:
        name = f"memory://client-{next(_names)}"
        self.clock = SystemClock()
        self.config = parse_config({"store": name, **config})
        self.index: Any = wrap(locked(open_index(name, self.config)))
        self.node_id = node_id(name)
        self.node = open_node(name, self.config, self.clock)

        def pool(client: IndexClient) -> ThreadPool[Desk]:
            return ThreadPool("test-janitor", 1, lambda: self.desk(client), 64, 1 << 40)

        def nodes() -> tuple[NodeId, ...]:
            return (self.node_id,)

        self.client = IndexClient(self.index, self.config, nodes(), self.clock, pool)
        self.replies: list[Any] = []

    def desk(self, client: IndexClient) -> Desk:
        return Desk(
            index=self.index,
            directory=NodeDirectory(self.config.resolved_store().data, self.config, self.clock),
            config=self.config,
            clock=self.clock,
            object_bytes=OBJECT_BYTES,
            tell_identity=client.tell_identity,
            tell_gauges=client.tell_gauges,
        )

    def ask(self, op: IndexOp) -> Any:
        """Post and wait for the one reply."""
        assert self.client.post(op)
        eventually(lambda: self.client.pending() == 0 or self._take())
        return self.replies.pop()

    def _take(self) -> bool:
        self.replies += self.client.poll()
        return self.client.pending() == 0

    def prepare(self, hashes: tuple[BlockHash, ...], **change: Any) -> Any:
        return self.ask(
            PrepareOp(
                **{
                    "job": JobId(1),
                    "namespace": NS,
                    "session": SessionKey(b"k" * 16),
                    "generation": Generation(0),
                    "parent": NO_HASH,
                    "start": 0,
                    "hashes": hashes,
                    "object_bytes": OBJECT_BYTES,
                    "ranks": 1,
                    "grant_s": 30.0,
                    **change,
                }
            )
        )

    def commit(self, hashes: tuple[BlockHash, ...], grant: GrantId, **change: Any) -> Any:
        return self.ask(
            CommitOp(
                **{
                    "job": JobId(1),
                    "namespace": NS,
                    "session": SessionKey(b"k" * 16),
                    "generation": Generation(0),
                    "grant": grant,
                    "node": self.node_id,
                    "saved": len(hashes),
                    "hashes": hashes,
                    **change,
                }
            )
        )

    def key(self, hash_: BlockHash) -> bytes:
        return object_key(self.index.identity().incarnation, NS, hash_, 0)

    def put(self, hashes: tuple[BlockHash, ...]) -> None:
        items = [PutItem(self.key(h), [memoryview(bytes(OBJECT_BYTES))]) for h in hashes]
        self.node.put(items, 60_000, self.clock.now() + 5)

    def there(self, hashes: tuple[BlockHash, ...]) -> list[bool]:
        return self.node.exists([self.key(h) for h in hashes], self.clock.now() + 5)

    def store(self, hashes: tuple[BlockHash, ...], **change: Any) -> None:
        granted = self.prepare(hashes, **change)
        assert granted.declined is None
        self.put(hashes)
        assert self.commit(hashes, granted.grant, **change).outcome is CommitOutcome.OK

    def lookup(self, hashes: tuple[BlockHash, ...], **change: Any) -> Any:
        return self.ask(
            LookupOp(
                **{
                    "ticket": 1,
                    "request": RequestId("r"),
                    "namespace": NS,
                    "session_id": "conversation",
                    "cache_salt": None,
                    "hashes": hashes,
                    "deadline_s": 5.0,
                    "lease_s": 10.0,
                    **change,
                }
            )
        )


@pytest.fixture
def make() -> Iterator[Callable[..., Client]]:
    made: list[Client] = []

    def build(*args: Any, **config: Any) -> Client:
        client = Client(*args, **config)
        made.append(client)
        assert client.client.wait_ready(5.0)
        return client

    yield build
    for client in made:
        client.client.close(2.0)


def test_a_lookup_of_nothing_is_a_miss_that_says_who_asked(make: Callable[..., Client]) -> None:
    reply = make().lookup(chain(3))
    assert reply.outcome is LookupOutcome.MISS
    assert len(reply.session) == 16
    assert len(reply.store) == 8


def test_the_same_id_under_another_salt_is_another_session(make: Callable[..., Client]) -> None:
    client = make()
    plain, salted = client.lookup(chain(1)), client.lookup(chain(1), cache_salt="x")
    assert plain.session != salted.session
    assert client.lookup(chain(1)).session == plain.session


def test_what_is_committed_is_found_and_loses_its_expiry(make: Callable[..., Client]) -> None:
    client, blocks = make(), chain(5)
    session = client.lookup(blocks).session
    client.store(blocks, session=session)
    reply = client.lookup((*blocks, BlockHash(b"new".ljust(32))))
    assert (reply.depth, reply.slices[0].node) == (5, client.node_id)
    deadline = client.clock.now
    keys = [client.key(b) for b in blocks]
    eventually(lambda: all(client.node.persist(keys, deadline() + 5)))


def test_an_object_that_is_gone_at_the_commit_is_forgotten(make: Callable[..., Client]) -> None:
    client, blocks = make(), chain(3)
    granted = client.prepare(blocks)
    client.put(blocks[:1])
    assert client.commit(blocks, granted.grant).outcome is CommitOutcome.OK
    eventually(lambda: client.lookup(blocks).depth == 1)
    assert client.index.check_integrity() == []


def test_an_aborted_grant_leaves_no_object(make: Callable[..., Client]) -> None:
    from connector.lookup import AbortOp

    client, blocks = make(), chain(3)
    granted = client.prepare(blocks)
    client.put(blocks)
    client.ask(AbortOp(JobId(1), NS, granted.grant, client.node_id, blocks, 1))
    eventually(lambda: not any(client.there(blocks)))
    assert client.index.check_integrity() == []


def test_closing_frees_the_bytes(make: Callable[..., Client]) -> None:
    client, blocks = make(), chain(4)
    session = client.lookup(blocks).session
    client.store(blocks, session=session)
    closed = client.ask(CloseOp(session_id="conversation"))
    assert (closed.ok, closed.blocks) == (True, 4)
    eventually(lambda: not any(client.there(blocks)))
    eventually(lambda: sum(n.stored + n.dying for n in client.index.nodes()) == 0)


def test_a_late_save_of_a_closed_session_never_becomes_visible(make: Callable[..., Client]) -> None:
    client, blocks = make(), chain(4)
    asked = client.lookup(blocks)
    who = {"session": asked.session, "generation": asked.generation}
    granted = client.prepare(blocks, **who)
    client.ask(CloseOp(session_id="conversation"))
    client.put(blocks)
    late = client.commit(blocks, granted.grant, **who)
    assert late.outcome is CommitOutcome.STALE_GENERATION
    assert client.lookup(blocks).depth == 0


def test_forgotten_blocks_are_not_found_again(make: Callable[..., Client]) -> None:
    client, blocks = make(), chain(4)
    client.store(blocks)
    client.ask(ForgetOp(NS, blocks[2:3], client.node_id))
    assert client.lookup(blocks).depth == 2


def test_room_is_made_by_deleting_before_a_save_is_granted(make: Callable[..., Client]) -> None:
    client = make(capacity_bytes=6 * CHARGED)
    old = chain(5)
    client.store(old, session=SessionKey(b"a" * 16))
    new = tuple(BlockHash(bytes([i]) * 32) for i in range(1, 5))
    granted = client.prepare(new, session=SessionKey(b"b" * 16))
    assert granted.declined is None
    assert sum(client.there(old)) <= 2
    assert client.index.check_integrity() == []


def test_a_save_larger_than_a_node_is_declined(make: Callable[..., Client]) -> None:
    client = make(capacity_bytes=3 * CHARGED)
    assert client.prepare(chain(8)).declined in (DeclineReason.FULL, DeclineReason.ROOM)


def test_a_hand_off_is_waited_for_until_it_is_committed(make: Callable[..., Client]) -> None:
    client, blocks = make(), chain(3)
    granted = client.prepare(blocks)
    client.put(blocks)
    op = LookupOp(
        ticket=7, request=RequestId("r"), namespace=NS, session_id="s", cache_salt=None,
        hashes=blocks, deadline_s=30.0, lease_s=5.0, wait_tip=blocks[-1],
    )  # fmt: skip
    assert client.client.post(op)
    commit = CommitOp(
        job=JobId(1), namespace=NS, session=SessionKey(b"k" * 16), generation=Generation(0),
        grant=granted.grant, node=client.node_id, saved=3, hashes=blocks,
    )  # fmt: skip
    assert client.client.post(commit)
    eventually(client._take)
    committed, found = client.replies
    assert committed.outcome is CommitOutcome.OK
    assert (found.ticket, found.depth) == (7, 3)


@pytest.mark.parametrize("abandon", [True, False])
def test_a_hand_off_that_never_comes_ends_at_once_or_at_the_deadline(
    make: Callable[..., Client], abandon: bool
) -> None:
    client, blocks = make(), chain(3)
    if abandon:
        client.ask(AbandonOp(NS, blocks[-1]))
    deadline_s = 30.0 if abandon else 0.05
    reply = client.lookup(blocks, wait_tip=blocks[-1], deadline_s=deadline_s)
    assert reply.outcome is LookupOutcome.MISS
    assert reply.seconds < 20


def test_a_lookup_waits_a_little_for_a_save_that_would_lengthen_its_hit(
    make: Callable[..., Client],
) -> None:
    client, blocks = make(save_wait_s=20.0), chain(6)
    client.store(blocks[:3])
    rest = {"parent": blocks[2], "start": 3}
    granted = client.prepare(blocks[3:], **rest)
    op = LookupOp(
        ticket=7, request=RequestId("r"), namespace=NS, session_id="s", cache_salt=None,
        hashes=blocks, deadline_s=30.0, lease_s=5.0,
    )  # fmt: skip
    assert client.client.post(op)
    client.put(blocks[3:])
    commit = CommitOp(
        job=JobId(1), namespace=NS, session=SessionKey(b"k" * 16), generation=Generation(0),
        grant=granted.grant, node=client.node_id, saved=3, hashes=blocks[3:],
    )  # fmt: skip
    assert client.client.post(commit)
    eventually(client._take)
    committed, found = client.replies
    assert (committed.outcome, found.depth) == (CommitOutcome.OK, 6)


def test_it_does_not_wait_for_ever(make: Callable[..., Client]) -> None:
    client, blocks = make(save_wait_s=0.02), chain(6)
    client.store(blocks[:3])
    client.prepare(blocks[3:], parent=blocks[2], start=3)
    assert client.lookup(blocks).depth == 3


def test_hints_are_answered_with_what_became_of_them(make: Callable[..., Client]) -> None:
    client = make(pinned_bytes_max=0)
    session = client.lookup(chain(3)).session
    client.store(chain(3), session=session)
    demote = client.ask(HintOp("conversation", None, HintKind.DEMOTE))
    assert demote.outcome == "accepted"
    pin = client.ask(HintOp("conversation", None, HintKind.PIN, ttl_s=60.0))
    assert (pin.outcome, bool(pin.why)) == ("rejected", True)
    client.ask(HintOp("conversation", None, HintKind.RELEASE))
    assert client.lookup(chain(3)).depth == 0


class Broken:
    """An index that fails until it is mended."""

    def __init__(self, index: Any) -> None:
        self.index, self.error = index, None

    def __getattr__(self, name: str) -> Any:
        if self.error is not None and name in ("recall", "probe", "prepare", "commit", "close"):
            raise self.error
        return getattr(self.index, name)


@pytest.mark.parametrize("error", [StoreUnavailable("gone"), RuntimeError("a bug")])
def test_every_operation_is_answered_by_a_failing_index_too(
    make: Callable[..., Client], error: Exception
) -> None:
    client = make(Broken)
    client.index.error = error
    assert client.lookup(chain(2)).outcome is LookupOutcome.UNAVAILABLE
    assert client.prepare(chain(2)).unavailable
    assert client.commit(chain(2), GrantId(1)).outcome is None
    assert not client.ask(CloseOp(session_id="x")).ok
    client.index.error = None
    eventually(lambda: client.lookup(chain(2)).outcome is LookupOutcome.MISS)


def test_a_full_queue_refuses(make: Callable[..., Client]) -> None:
    client = make(queue_ops_max=1)
    assert client.client.post(AbandonOp(NS, chain(1)[0]))
    assert not client.client.post(AbandonOp(NS, chain(1)[0]))


class MostTurnsFirst:
    """A policy of somebody's own, as in docs/POLICY.md."""

    SCORES = tuple((float(cls // len(TOKENS_MIN)),) for cls in range(NUM_CLASSES))

    def observe(self, event: object) -> None:
        """Nothing to learn."""

    def fit(self, now_ms: int) -> ScoreTable:
        return ScoreTable(TIMES_MIN, TOKENS_MIN, edges_ms=(0,), scores=self.SCORES)


class Watched:
    """An index that remembers the tables it got."""

    def __init__(self, index: Any) -> None:
        self.index, self.tables = index, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.index, name)

    def set_scores(self, table: ScoreTable) -> None:
        self.tables.append(table)
        self.index.set_scores(table)


def test_a_policy_of_ones_own_is_fitted_and_used(make: Callable[..., Client]) -> None:
    client = make(Watched, policy=f"{__name__}:MostTurnsFirst")
    table = eventually(lambda: client.index.tables and client.index.tables[0])
    assert table.scores == MostTurnsFirst.SCORES


def test_a_policy_that_is_not_there_stops_the_start() -> None:
    with pytest.raises(ConfigError, match="config key 'policy' = 'nowhere:Policy'"):
        Client(policy="nowhere:Policy")
    with pytest.raises(ConfigError, match="config key 'policy' = 'retrun'"):
        Client(policy="retrun")
