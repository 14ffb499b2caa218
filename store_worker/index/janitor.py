"""Housekeeping between the index and the data nodes, off the way of lookups.

Deletes victims and reports them freed, takes the expiry off committed objects, copies the shared
part, watches the nodes' incarnations. All of it is repeatable and may be lost at any point: objects
expire by themselves, dying victims are named again by the index.

Thread: one `store-janitor` thread of the executor, with its own connections.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from connector.clock import Clock
from connector.config import Config
from connector.errors import StoreError
from connector.ids import NO_SESSION, BlockHash, Namespace, NodeId, SessionKey
from connector.indexmsg import CopyStep, IndexIdentity, RunSlice, Victim
from connector.lookup import HintOp
from connector.meta import BlockOutcome
from store_worker.backends.base import DataNode, GetItem, PinningNode, PutItem
from store_worker.index import search
from store_worker.index.base import SessionIndex
from store_worker.keys import object_key
from store_worker.nodes import NodeDirectory

logger = logging.getLogger(__name__)

KEYS_PER_CALL = 512
NODE_DEADLINE_S = 2.0
PINS_PER_CALL = 64
PINS_MAX = 4096
PIN_LEASE_S = 5.0


class Description(NamedTuple):
    """What people should see for a namespace."""

    namespace: Namespace
    text: str
    tokens_per_block: int


def _nothing() -> Description | None:
    return None


@dataclass
class Desk:
    """What the janitor's thread keeps: its own index connection and one per node.

    identity is shared with the index client: the last one seen, None before the first contact.
    pins: clock seconds until which sessions are pinned on nodes that evict by themselves.
    """

    index: SessionIndex
    directory: NodeDirectory
    config: Config
    clock: Clock
    object_bytes: int
    tell_identity: Callable[[IndexIdentity], None]
    tell_nodes: Callable[[Sequence[NodeId]], None] = lambda nodes: None
    tell_gauges: Callable[[Mapping[str, float]], None] = lambda gauges: None
    describe: Callable[[], Description | None] = _nothing
    pins: dict[SessionKey, float] = field(default_factory=dict)

    def interrupt(self) -> None:
        """Break whatever call is stuck."""
        self.directory.close()

    def close(self) -> None:
        """Drop the connections."""
        self.interrupt()

    @property
    def nodes(self) -> Mapping[NodeId, DataNode]:
        """The data nodes known so far."""
        return self.directory.nodes

    def deadline(self) -> float:
        """For one call to a data node."""
        return self.clock.now() + NODE_DEADLINE_S

    def remember_pin(self, session: SessionKey, seconds: float) -> None:
        """At most PINS_MAX: where there are more, their later blocks are not pinned."""
        now = self.clock.now()
        self.pins = {key: until for key, until in self.pins.items() if until > now}
        if len(self.pins) < PINS_MAX or session in self.pins:
            self.pins[session] = now + seconds


class Job:
    """A task of the janitor: a failure is logged, never raised further, never repeated here."""

    def run(self, desk: Desk) -> None:
        """Do it; that the store can't be reached is no news here."""
        try:
            self.work(desk)
        except StoreError as error:
            self.failed(error)

    def work(self, desk: Desk) -> None:
        """What there is to do."""
        raise NotImplementedError

    def failed(self, error: BaseException) -> None:
        """The store can't be reached: the index or the expiry will see to it."""
        logger.debug("%s left undone: %s", type(self).__name__, error)

    def dropped(self) -> None:
        """The process ends."""


@dataclass
class Delete(Job):
    """Delete victims' objects, report them freed, then call `then`."""

    store: bytes
    victims: Sequence[Victim]
    then: Callable[[], None] | None = None

    def work(self, desk: Desk) -> None:
        try:
            gone = delete_victims(desk, self.store, self.victims)
            if gone:
                desk.index.freed(gone)
        finally:
            self._continue()

    def dropped(self) -> None:
        self._continue()

    def failed(self, error: BaseException) -> None:
        super().failed(error)
        self._continue()

    def _continue(self) -> None:
        then, self.then = self.then, None
        if then is not None:
            then()


@dataclass
class Persist(Job):
    """Take the expiry off committed objects; forget blocks whose object is gone already. Those of
    a pinned session are pinned as well."""

    store: bytes
    namespace: Namespace
    node: NodeId
    hashes: Sequence[BlockHash]
    ranks: int
    session: SessionKey = NO_SESSION

    def work(self, desk: Desk) -> None:
        node = desk.nodes.get(self.node)
        if node is None:
            return
        lost = []
        for part in batches(self.hashes, max(1, KEYS_PER_CALL // self.ranks)):
            keys = [
                object_key(self.store, self.namespace, h, rank)
                for h in part
                for rank in range(self.ranks)
            ]
            there = node.persist(keys, desk.deadline())
            lost += [
                h
                for i, h in enumerate(part)
                if not all(there[i * self.ranks : (i + 1) * self.ranks])
            ]
        if lost:
            victims = desk.index.forget(self.namespace, lost, self.node)
            Delete(self.store, victims).work(desk)
        left_s = desk.pins.get(self.session, 0.0) - desk.clock.now()
        if left_s > 0:
            where = RunSlice(node=self.node, incarnation=b"", start=0, stop=len(self.hashes),
                             ranks=self.ranks)
            pin_slice(desk, self.store, self.namespace, self.hashes, where, left_s)


@dataclass
class Pin(Job):
    """A session was pinned in the index: tell it to nodes that evict by themselves, of what is
    stored of its chain now, and of what this engine commits until the pin ends.

    What other engines commit meanwhile is not pinned there; nor does the end of the session end it.
    """

    store: bytes
    session: SessionKey
    op: HintOp
    seconds: float

    def work(self, desk: Desk) -> None:
        if not self.op.hashes or not any(isinstance(n, PinningNode) for n in desk.nodes.values()):
            return
        desk.remember_pin(self.session, self.seconds)
        op = self.op
        found = search.find(desk.index, op.namespace, self.session, op.hashes, PIN_LEASE_S)
        for piece in found.acquired.slices:
            pin_slice(desk, self.store, op.namespace, op.hashes, piece, self.seconds)


def pin_slice(
    desk: Desk,
    store: bytes,
    namespace: Namespace,
    chain: Sequence[BlockHash],
    piece: RunSlice,
    seconds: float,
) -> None:
    """Pin a slice of a chain, where its node can do that. Raises StoreError."""
    node = desk.nodes.get(piece.node)
    if not isinstance(node, PinningNode):
        return
    for part in batches(chain[piece.start : piece.stop], max(1, PINS_PER_CALL // piece.ranks)):
        keys = [object_key(store, namespace, h, rank) for h in part for rank in range(piece.ranks)]
        node.pin(keys, round(seconds * 1000), desk.deadline())


@dataclass
class CheckNodes(Job):
    """Learn the index's identity and the nodes' incarnations, and tell the index of them."""

    done: Callable[[], None] | None = None

    def work(self, desk: Desk) -> None:
        try:
            identity = desk.index.identity()
            nodes = desk.directory.refresh()
            desk.tell_nodes(tuple(nodes))
            for name, node in nodes.items():
                self._check(desk, name, node)
                victims = desk.index.dying(name)
                if victims:
                    Delete(identity.incarnation, victims).work(desk)
            desk.tell_identity(identity)
        finally:
            if self.done is not None:
                self.done()

    def failed(self, error: BaseException) -> None:
        super().failed(error)
        if self.done is not None:
            self.done()

    @staticmethod
    def _check(desk: Desk, name: NodeId, node: DataNode) -> None:
        try:
            incarnation = node.incarnation(desk.deadline())
            capacity = node.capacity(desk.deadline())
            charge = node.charge(desk.object_bytes, desk.deadline()) if capacity else 0
        except StoreError as error:
            logger.debug("node %s is down: %s", name, error)
            desk.index.node_down(name)
            return
        desk.index.register_node(name, incarnation, capacity)
        if charge:
            desk.index.set_charge(name, desk.object_bytes, charge)


@dataclass
class CopyShared(Job):
    """Copy blocks of the shared part to nodes that lack them; a bounded step after a commit.

    The objects pass through this process: they are few (0.1 to 0.3 % of what is stored).
    """

    store: bytes
    steps: Sequence[CopyStep]

    def work(self, desk: Desk) -> None:
        made = [step for step in self.steps if self._copy(desk, step)]
        if made:
            Delete(self.store, desk.index.copied(made)).work(desk)

    def _copy(self, desk: Desk, step: CopyStep) -> bool:
        source, target = desk.nodes.get(step.source), desk.nodes.get(step.node)
        if source is None or target is None:
            return False
        keys = [object_key(self.store, step.namespace, step.hash, r) for r in range(step.ranks)]
        objects = [memoryview(bytearray(desk.object_bytes)) for _ in keys]
        try:
            found = source.get(
                [GetItem(k, [o]) for k, o in zip(keys, objects, strict=True)], desk.deadline()
            )
            if any(outcome is not BlockOutcome.OK for outcome in found):
                return False
            put = target.put(
                [PutItem(k, [o]) for k, o in zip(keys, objects, strict=True)],
                round(desk.config.object_ttl_s * 1000),
                desk.deadline(),
            )
            if any(outcome is not BlockOutcome.OK for outcome in put):
                return False
            return all(target.persist(keys, desk.deadline()))
        except StoreError as error:
            logger.debug("a shared block was not copied to %s: %s", step.node, error)
            return False


def batches(items: Sequence[BlockHash], size: int) -> Iterable[Sequence[BlockHash]]:
    """Pieces of at most `size`."""
    return (items[i : i + size] for i in range(0, len(items), size))


def delete_victims(desk: Desk, store: bytes, victims: Sequence[Victim]) -> list[Victim]:
    """Delete their objects; the victims of a node that does not answer are left out."""
    by_node: dict[NodeId, list[Victim]] = defaultdict(list)
    for victim in victims:
        by_node[victim.node].append(victim)
    gone: list[Victim] = []
    for name, theirs in by_node.items():
        node = desk.nodes.get(name)
        if node is None:
            continue
        keys = [
            object_key(store, v.namespace, v.hash, rank) for v in theirs for rank in range(v.ranks)
        ]
        try:
            for i in range(0, len(keys), KEYS_PER_CALL):
                node.delete(keys[i : i + KEYS_PER_CALL], desk.deadline())
        except StoreError as error:
            logger.debug("victims on %s not deleted: %s", name, error)
            continue
        gone += theirs
    return gone
