"""A data node that fails on purpose, from a seed: wraps any other node.

Everything that can happen to a request happens here by chance: it is late, it never arrives, it is
done but the answer is lost, one object of it fails or vanishes, bytes change, two objects change
places. The same seed and the same calls give the same faults. Thread: see `base`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from connector.errors import StoreUnavailable
from connector.meta import BlockOutcome
from store_worker.backends.base import DataNode, GetItem, Landed, PutItem

T = TypeVar("T")


class FaultPlan(NamedTuple):
    """Chances from 0 to 1. The first group is per call, the second per object.

    late: delayed by up to `delay_s`. lost: never arrives. unanswered: done, but not confirmed.
    fail: refused. drop: confirmed but not kept (put), or gone (get). corrupt: a byte read differs.
    swap: reads another object of the same call in full. swap_payload: the same, but each keeps its
    own first part (the header), so that only a checksum can tell.
    """

    late: float = 0.0
    delay_s: float = 0.0
    lost: float = 0.0
    unanswered: float = 0.0
    fail: float = 0.0
    drop: float = 0.0
    corrupt: float = 0.0
    swap: float = 0.0
    swap_payload: float = 0.0


class FaultyNode:
    """See `base.DataNode`. `plan` may be replaced at any time; `injected` counts what was done."""

    def __init__(
        self,
        inner: DataNode,
        plan: FaultPlan,
        chance: random.Random,
        delay: Callable[[float], None],
    ) -> None:
        """delay: lets that many seconds pass, such as `ManualClock.advance`."""
        self.inner, self.plan = inner, plan
        self.injected: Counter[str] = Counter()
        self._chance, self._delay = chance, delay

    def _hits(self, name: str) -> bool:
        hit = self._chance.random() < getattr(self.plan, name)
        if hit:
            self.injected[name] += 1
        return hit

    def _over(self, call: Callable[[], T]) -> T:
        """Go over the faulty network and back."""
        if self._hits("late"):
            self._delay(self._chance.uniform(0, self.plan.delay_s))
        if self._hits("lost"):
            raise StoreUnavailable("fault: the request was lost")
        answer = call()
        if self._hits("unanswered"):
            raise StoreUnavailable("fault: the answer was lost")
        return answer

    def put(self, items: Sequence[PutItem], ttl_ms: int, deadline: float) -> list[BlockOutcome]:
        outcomes = [BlockOutcome.OK] * len(items)
        through = []
        for index in range(len(items)):
            if self._hits("fail"):
                outcomes[index] = BlockOutcome.FAILED
            elif not self._hits("drop"):
                through.append(index)
        some = [items[index] for index in through]
        found = self._over(lambda: self.inner.put(some, ttl_ms, deadline))
        for index, outcome in zip(through, found, strict=True):
            outcomes[index] = outcome
        return outcomes

    def get(
        self, items: Sequence[GetItem], deadline: float, landed: Landed | None = None
    ) -> list[BlockOutcome]:
        asked = list(items)
        for index, other in self._pairs(len(items), "swap"):
            asked[index] = GetItem(items[other].key, items[index].parts)
            asked[other] = GetItem(items[index].key, items[other].parts)
        outcomes = self._over(lambda: self.inner.get(asked, deadline))
        for index, other in self._pairs(len(items), "swap_payload"):
            if outcomes[index] is outcomes[other] is BlockOutcome.OK:
                _exchange(items[index].parts[1:], items[other].parts[1:])
        for index, item in enumerate(items):
            if outcomes[index] is BlockOutcome.OK:
                outcomes[index] = self._spoil(item)
            if outcomes[index] is BlockOutcome.OK and landed is not None:
                landed(index)
        return outcomes

    def _spoil(self, item: GetItem) -> BlockOutcome:
        if self._hits("fail"):
            return BlockOutcome.FAILED
        if self._hits("drop"):
            return BlockOutcome.MISSING
        if self._hits("corrupt"):
            part = self._chance.choice([part for part in item.parts if len(part)])
            part[self._chance.randrange(len(part))] ^= 1 << self._chance.randrange(8)
        return BlockOutcome.OK

    def _pairs(self, count: int, name: str) -> list[tuple[int, int]]:
        """Neighbours that change places."""
        return [(i, i + 1) for i in range(0, count - 1, 2) if self._hits(name)]

    def delete(self, keys: Sequence[bytes], deadline: float) -> int:
        return self._over(lambda: self.inner.delete(keys, deadline))

    def exists(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        return self._over(lambda: self.inner.exists(keys, deadline))

    def persist(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        return self._over(lambda: self.inner.persist(keys, deadline))

    def ready(self, deadline: float) -> bytes:
        return self._over(lambda: self.inner.ready(deadline))

    def incarnation(self, deadline: float) -> bytes:
        return self._over(lambda: self.inner.incarnation(deadline))

    def charge(self, object_bytes: int, deadline: float) -> int:
        return self._over(lambda: self.inner.charge(object_bytes, deadline))

    def capacity(self, deadline: float) -> int:
        return self._over(lambda: self.inner.capacity(deadline))

    def drain_counters(self) -> dict[str, int]:
        return self.inner.drain_counters()

    def close(self) -> None:
        self.inner.close()


def _exchange(some: Sequence[memoryview], others: Sequence[memoryview]) -> None:
    for one, other in zip(some, others, strict=True):
        kept = bytes(one)
        one[:] = other
        other[:] = kept
