"""Objects on their way between the caller's memory and Mooncake: batches, staging, what is late.

A put sends large parts from where they lie and copies the small ones together first, since every
slice of a transfer costs a message of its own. A get reads into staging memory and copies from
there: a call can't be cancelled, and nothing may be written into a page that has been reported.

Thread: the owner of the node.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from connector.clock import Clock
from connector.errors import StoreError, StoreTimeout
from connector.meta import BlockOutcome
from store_worker.backends import mooncake_ops as ops
from store_worker.backends.base import GetItem, Landed, PutHints, PutItem
from store_worker.backends.mooncake_arena import Extent
from store_worker.backends.mooncake_calls import Call, Life, Use
from store_worker.backends.mooncake_client import MASTER, MooncakeClient
from store_worker.backends.mooncake_codes import Meaning, meaning, outcome_of
from store_worker.backends.mooncake_library import address_of, replicate_config
from store_worker.backends.mooncake_ops import DIFFERENT, WRONG_SIZE, Shape

BATCH_BYTES = (8 << 20) + (64 << 10)
"""Of one call: 8 MiB of pages and their headers. Alone, larger calls are a little faster; beside a
busy engine the copies then overlap with less (docs/BENCHMARKS.md)."""

STAGING_SHARE = 8
"""A call takes at most this part of the staging memory, or has one object: several threads share
it, and whoever waits for a piece keeps another."""
SLICES_MAX = 256
"""Slices of one call. Each segment's connections queue 2,048 of all calls; the upper half of them
fails when it has waited for a second."""

WINDOW = 2
"""Calls of one node at a time: one is on the wire while the other's bytes are copied."""

IN_PLACE_BYTES = 256 << 10
"""Parts from this size on are sent from where they lie (docs/decisions/mooncake.md)."""

Item = TypeVar("Item", PutItem, GetItem)


def text_key(key: bytes, segment: str) -> str:
    """The name of a node's object in Mooncake, whose keys are text.

    It holds the node's name: the same block saved on two nodes is two objects, and deleting it on
    one leaves the other alone, as with any other kind of node.
    """
    return f"skv-{key.hex()}@{segment}" if segment else f"skv-{key.hex()}"


class Batch(NamedTuple):
    """Items start, start + 1, ... of a put or get."""

    start: int
    items: Sequence[Any]
    size: int


def batches(
    items: Sequence[Item], slices_per_item: Callable[[Item], int], most_bytes: int
) -> Iterator[Batch]:
    """Pieces that are at most most_bytes and SLICES_MAX, or one item."""
    start = size = slices = 0
    for index, item in enumerate(items):
        more, parts = sum(map(len, item.parts)), slices_per_item(item)
        full = size + more > most_bytes or slices + parts > SLICES_MAX
        if full and index > start:
            yield Batch(start, items[start:index], size)
            start, size, slices = index, 0, 0
        size += more
        slices += parts
    if start < len(items):
        yield Batch(start, items[start:], size)


class Plan(NamedTuple):
    """How one object is moved. staged: (offset in its staging memory, part). shape: addresses of
    staged slices count from the start of its staging memory, those of parts in place are real."""

    staged: list[tuple[int, memoryview]]
    staged_bytes: int
    slices: list[tuple[bool, int, int]]  # (staged, address or offset, size)
    total: int

    def shape(self, base: int) -> Shape:
        """With staging memory at `base`."""
        head = len(self.staged[0][1]) if self.staged else 0
        return Shape(
            ptrs=[base + at if staged else at for staged, at, _ in self.slices],
            sizes=[size for _, _, size in self.slices],
            total=self.total,
            head=base,
            head_bytes=head,
        )


def plan(parts: Sequence[memoryview], in_place: Callable[[memoryview], bool]) -> Plan:
    """Neighbours that are staged become one slice. The first part, a header, is always staged."""
    staged: list[tuple[int, memoryview]] = []
    slices: list[tuple[bool, int, int]] = []
    at = total = 0
    for index, part in enumerate(parts):
        size = len(part)
        total += size
        if not size and index:
            continue
        if index and size >= IN_PLACE_BYTES and in_place(part):
            slices.append((False, address_of(part), size))
            continue
        staged.append((at, part))
        if slices and slices[-1][0]:
            slices[-1] = (True, slices[-1][1], slices[-1][2] + size)
        elif size:
            slices.append((True, at, size))
        at += size
    return Plan(staged, at, slices, total)


def nothing_in_place(part: memoryview) -> bool:
    """For gets: see the module."""
    return False


class Moving(NamedTuple):
    """A call under way with what it moves."""

    batch: Batch
    call: Call[list[int]]
    plans: list[Plan]
    extent: Extent
    shapes: list[Shape]


class Mover:
    """One put or get, from its first call to its last outcome."""

    def __init__(
        self, client: MooncakeClient, segment: str, clock: Clock, deadline: float,
        watch: Callable[[Call], None],
    ) -> None:
        """segment: that is asked, "" for any. watch: told every call, so that it can be broken."""
        self.client, self.segment, self.deadline = client, segment, deadline
        self._clock, self._watch = clock, watch
        self.life: Life = client.life(deadline)
        self._most_bytes = min(BATCH_BYTES, self.life.arena.size // STAGING_SHARE)

    def run(
        self, items: Sequence[Item], slices_of: Callable[[Item], int],
        post: Callable[[Batch], Moving], settle: Callable[[Moving, list[BlockOutcome]], bool],
    ) -> list[BlockOutcome]:
        """Post batch after batch, WINDOW at a time; what is never posted shares the verdict."""
        outcomes: list[BlockOutcome | None] = [None] * len(items)
        verdict = BlockOutcome.TIMED_OUT
        waiting: deque[Moving] = deque()  # bounded: WINDOW
        try:
            for batch in batches(items, slices_of, self._most_bytes):
                while waiting and len(waiting) >= self._window(batch):
                    if not self._settle(waiting, settle, outcomes):
                        raise StoreTimeout("a call did not return")
                waiting.append(post(batch))
            while waiting and self._settle(waiting, settle, outcomes):
                pass
        except StoreTimeout:
            pass
        except StoreError:
            verdict = BlockOutcome.FAILED
        finally:
            for moving in waiting:
                self._settle_late(moving)
        return [verdict if outcome is None else outcome for outcome in outcomes]

    def _window(self, batch: Batch) -> int:
        """While it is not known whether a peer is back, one call goes ahead of the others; a large
        object might find no memory as long as an earlier call of ours keeps some."""
        gates = self.client.gate(MASTER), self.client.gate(self.segment)
        free = all(gate.open for gate in gates) and batch.size <= self._most_bytes
        return WINDOW if free else 1

    def _settle(
        self, waiting: deque[Moving], settle: Callable[[Moving, list[BlockOutcome]], bool],
        outcomes: list[BlockOutcome | None],
    ) -> bool:
        """The oldest call; False if it was not done by the deadline."""
        moving = waiting.popleft()
        if not moving.call.wait():
            self.client.gate(self.segment).failed("it does not answer")
            self._late()
            return False
        found = [BlockOutcome.FAILED] * len(moving.batch.items)
        try:
            settle(moving, found)
        finally:
            moving.call.release()
            start = moving.batch.start
            outcomes[start : start + len(found)] = found
        return True

    def _settle_late(self, moving: Moving) -> None:
        """Of a call behind one that failed: it is given up."""
        moving.call.abandon()
        if moving.call.wait():
            moving.call.release()
        else:
            self._late()

    def _late(self) -> None:
        self.client.gate(self.segment).left(+1)
        self.client.count("mooncake_calls_abandoned")

    def begin(
        self, batch: Batch, plans: list[Plan],
        work: Callable[[list[str], list[Shape]], Callable[..., list[int]]], fill: bool,
    ) -> Moving:
        """Stage a batch (`fill`: copy its parts) and post its call."""
        deadline = self._enter()
        size = sum(one.staged_bytes for one in plans)
        if size > self.life.arena.size:
            self.client.count("mooncake_staging_too_small")
            raise StoreError(f"an object of {size} bytes does not fit into the staging memory")
        extent = self.life.arena.take(size, deadline)
        if extent is None:
            raise StoreTimeout("no staging memory within the deadline")
        shapes, base = [], 0
        for one in plans:
            if fill:
                for at, part in one.staged:
                    extent.view[base + at : base + at + len(part)] = part
            shapes.append(one.shape(extent.address + base))
            base += one.staged_bytes
        keys = [text_key(item.key, self.segment) for item in batch.items]
        gate = self.client.gate(self.segment)
        use = Use((extent,), late=lambda: gate.left(-1))
        call = self.client.ask(work(keys, shapes), deadline, self.life, use)
        self._watch(call)
        return Moving(batch, call, plans, extent, shapes)

    def _enter(self) -> float:
        if self._clock.now() >= self.deadline:
            raise StoreTimeout("the deadline has passed")
        self.client.gate(self.segment).check()  # before the master's one attempt is taken
        deadline = self.client.gate(MASTER).enter(self.deadline)
        return self.client.gate(self.segment).enter(deadline)


def put_all(
    mover: Mover, items: Sequence[PutItem], hints: PutHints
) -> list[BlockOutcome]:
    """See `base.DataNode.put`."""
    client = mover.client
    client.removals.discard(text_key(item.key, mover.segment) for item in items)
    different: list[int] = []

    def config_of(start: int) -> Callable[[Sequence[int]], Any]:
        def config(some: Sequence[int]) -> Any:
            groups = [hints.group if start + i >= hints.group_from else "" for i in some]
            return replicate_config(mover.segment, groups, hints.pin_ttl_ms)

        return config

    def post(batch: Batch) -> Moving:
        plans = [plan(item.parts, client.in_place) for item in batch.items]
        config = config_of(batch.start)

        def work(keys: list[str], shapes: list[Shape]) -> Callable[..., list[int]]:
            return lambda library, asked: ops.put_objects(library, asked, keys, shapes, config)

        return mover.begin(batch, plans, work, fill=True)

    def settle(moving: Moving, found: list[BlockOutcome]) -> bool:
        codes = moving.call.result()
        for index, code in enumerate(codes):
            if code == DIFFERENT:
                different.append(moving.batch.start + index)
            done = meaning(code) is Meaning.DONE
            found[index] = BlockOutcome.OK if done else BlockOutcome.FAILED
        client.judge(mover.segment, [code for code in codes if code != DIFFERENT])
        return True

    outcomes = mover.run(items, _slices_sent, post, settle)
    if different:
        fresh = replace_all(mover, [items[i] for i in different])
        for index, outcome in zip(different, fresh, strict=True):
            outcomes[index] = outcome
    return outcomes


def replace_all(mover: Mover, items: Sequence[PutItem]) -> list[BlockOutcome]:
    """Overwrite objects that are there with other bytes: an unfinished or damaged life of a key."""
    mover.client.count("mooncake_replaced", len(items))

    def post(batch: Batch) -> Moving:
        plans = [plan(item.parts, nothing_in_place) for item in batch.items]
        config = replicate_config("")

        def work(keys: list[str], shapes: list[Shape]) -> Callable[..., list[int]]:
            return lambda library, _: ops.replace_objects(library, keys, shapes, config)

        return mover.begin(batch, plans, work, fill=True)

    def settle(moving: Moving, found: list[BlockOutcome]) -> bool:
        codes = moving.call.result()
        mover.client.judge(mover.segment, codes)
        found[:] = [
            BlockOutcome.OK if meaning(code) is Meaning.DONE else BlockOutcome.FAILED
            for code in codes
        ]
        return True

    return mover.run(items, _one, post, settle)


def get_all(
    mover: Mover, items: Sequence[GetItem], landed: Landed | None
) -> list[BlockOutcome]:
    """See `base.DataNode.get`."""
    client = mover.client
    gone = client.removals.held([text_key(item.key, mover.segment) for item in items])
    in_place = client.in_place if client.url.direct else nothing_in_place

    def post(batch: Batch) -> Moving:
        plans = [plan(item.parts, in_place) for item in batch.items]

        def work(keys: list[str], shapes: list[Shape]) -> Callable[..., list[int]]:
            return lambda library, asked: ops.get_objects(library, asked, keys, shapes)

        return mover.begin(batch, plans, work, fill=False)

    def settle(moving: Moving, found: list[BlockOutcome]) -> bool:
        codes = moving.call.result()
        client.judge(mover.segment, [code for code in codes if code != WRONG_SIZE])
        base = 0
        for index, (code, one) in enumerate(zip(codes, moving.plans, strict=True)):
            found[index] = BlockOutcome.CORRUPT if code == WRONG_SIZE else outcome_of(code)
            if text_key(moving.batch.items[index].key, mover.segment) in gone:
                found[index] = BlockOutcome.MISSING
            if found[index] is BlockOutcome.OK:
                for at, part in one.staged:
                    part[:] = moving.extent.view[base + at : base + at + len(part)]
                if landed is not None:
                    landed(moving.batch.start + index)
            base += one.staged_bytes
        return True

    return mover.run(items, _slices_sent if client.url.direct else _one, post, settle)


def _one(item: PutItem | GetItem) -> int:
    return 1


def _slices_sent(item: PutItem | GetItem) -> int:
    """At most this many."""
    return 1 + 2 * sum(len(part) >= IN_PLACE_BYTES for part in item.parts)
