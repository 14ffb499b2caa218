"""One process of the index's stress test: threads that save, load, close and give up at random.

    python -m tests.index_stress URL SEED THREADS STEPS

A block's object is a key on the same server, written before the commit, with an expiry that the
commit takes off, and deleted when the index says so, as the store does it.
"""

from __future__ import annotations

import random
import sys
import threading

import redis

from connector.errors import StoreError
from connector.ids import NO_HASH, BlockHash, NodeId
from connector.indexmsg import (
    Boundary,
    CommitOutcome,
    CommitRequest,
    CopyStep,
    Declined,
    PrepareRequest,
    TurnEnd,
    Victim,
)
from store_worker.index.options import IndexOptions
from store_worker.index.redis import RedisIndex
from tests.index_kit import NS, chain, key

NODES = (NodeId("x"), NodeId("y"))
BLOCK = 1000
NODE_BLOCKS = 300
SESSIONS = 60
GRANT_S = 2.0


def object_name(node: str, block: bytes) -> bytes:
    return b"obj:" + node.encode() + b":" + block


class Worker:
    """One thread's connections and random choices."""

    def __init__(self, url: str, seed: str) -> None:
        self.random = random.Random(seed)
        self.client = redis.Redis.from_url(url, socket_timeout=20)
        self.index = RedisIndex(url, IndexOptions(timeout_s=20.0))

    def delete(self, victims: tuple[Victim, ...]) -> None:
        if victims:
            self.client.delete(*(object_name(v.node, v.hash) for v in victims))
            self.index.freed(victims)

    def chain_of(self, number: int) -> tuple[BlockHash, ...]:
        """Conversations of one group share their first blocks."""
        stem = chain(f"group{number % 5}", 6)
        return chain(f"chat{number}", self.random.randint(1, 40), stem)

    def step(self) -> None:
        number = self.random.randrange(SESSIONS)
        what = self.random.random()
        if what < 0.05:
            closed = self.index.close(key(str(number)))
            self.delete(closed.victims)
        elif what < 0.1:
            self.delete(self.index.dying(self.random.choice(NODES)))
        elif what < 0.3:
            c = self.chain_of(number)
            self.index.acquire(NS, [(c[-1], len(c)), (c[5], 6)], 0.5, key(str(number)))
        else:
            self.turn(number)

    def turn(self, number: int) -> None:
        c, session = self.chain_of(number), key(str(number))
        generation = self.index.recall(NS, session).generation
        depth = sum(self.index.probe(NS, c))
        if depth == len(c):
            return
        answer = self.index.prepare(
            PrepareRequest(
                namespace=NS, session=session, generation=generation,
                parent=c[depth - 1] if depth else NO_HASH, start=depth, hashes=c[depth:],
                nodes=NODES, object_bytes=BLOCK, grant_s=GRANT_S,
            )
        )  # fmt: skip
        self.delete(answer.victims)
        if isinstance(answer, Declined):
            return
        blocks = c[depth + answer.first_missing :]
        saved = len(blocks) if self.random.random() < 0.8 else self.random.randint(0, len(blocks))
        for block in blocks[:saved]:
            self.client.set(object_name(answer.node, block), b"x", px=600_000)
        if self.random.random() < 0.1:
            self.delete(self.index.abort(answer.grant))
            return
        done = self.index.commit(
            CommitRequest(
                namespace=NS, session=session, generation=generation, grant=answer.grant,
                saved=saved, turn_end=TurnEnd((Boundary(len(c), c[-1]),)),
            )
        )  # fmt: skip
        if done.outcome is CommitOutcome.OK:
            self.persist([(answer.node, block) for block in blocks[:saved]])
        self.delete(done.losers)
        self.copy(done.copy)

    def copy(self, steps: tuple[CopyStep, ...]) -> None:
        if steps and self.random.random() < 0.8:
            for step in steps:
                self.client.set(object_name(step.node, step.hash), b"x", px=600_000)
            gone = self.index.copied(steps)
            lost = {(v.node, v.hash) for v in gone}
            self.persist([(s.node, s.hash) for s in steps if (s.node, s.hash) not in lost])
            self.delete(gone)

    def persist(self, objects: list[tuple[NodeId, BlockHash]]) -> None:
        """Take the expiry off; what was evicted in that very moment gets one again, as it may be
        the late write of another."""
        for node, block in objects:
            self.client.persist(object_name(node, block))
        listed = self.index.probe(NS, [block for _, block in objects])
        for (node, block), there in zip(objects, listed, strict=True):
            if not there:
                self.client.pexpire(object_name(node, block), 600_000)

    def run(self, steps: int, failures: list[str]) -> None:
        try:
            for _ in range(steps):
                self.step()
        except (StoreError, AssertionError, redis.RedisError) as error:
            failures.append(repr(error))


def main(url: str, seed: str, threads: int, steps: int) -> int:
    failures: list[str] = []
    workers = [Worker(url, f"{seed}/{i}") for i in range(threads)]
    running = [threading.Thread(target=w.run, args=(steps, failures)) for w in workers]
    for thread in running:
        thread.start()
    print("started", flush=True)
    for thread in running:
        thread.join()
    for failure in failures[:5]:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
