"""Random jobs against nodes that fail by a seed: whatever happens, each job has one result, and a
page that is reported good holds the bytes of its hash (I3, I7)."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from connector.clock import ManualClock
from connector.ids import JobId
from connector.meta import BlockOutcome, JobResult, Placed
from store_worker.backends.base import DataNode
from store_worker.backends.faulty import FaultPlan, FaultyNode
from tests.unit.worker_kit import OK, Rig, hash_of

STEPS = 40
PLAN = FaultPlan(
    late=0.2, delay_s=4.0, lost=0.05, unanswered=0.05, fail=0.05, drop=0.05, corrupt=0.05,
    swap=0.05, swap_payload=0.05,
)  # fmt: skip


class Run:
    """One seeded run on virtual time."""

    def __init__(self, seed: int, plan: FaultPlan) -> None:
        self.chance = random.Random(seed)
        self.clock = ManualClock()
        self.faulty: list[FaultyNode] = []
        self.plan = plan
        self.rig = Rig(nodes=2, clock=self.clock, wrap=self.wrap)
        self.open: dict[JobId, tuple[str, range, int]] = {}
        self.ended: dict[JobId, JobResult] = {}

    def wrap(self, node: DataNode) -> DataNode:
        chance = random.Random(self.chance.random())
        self.faulty.append(FaultyNode(node, self.plan, chance, self.clock.advance))
        return self.faulty[-1]

    def submit(self) -> None:
        """A save of pages 0-31 (which hold their hash), or a load into pages 32-63."""
        rig, chance = self.rig, self.chance
        count, first = chance.randint(1, 12), chance.randint(0, 19)
        deadline_s = chance.choice([0.5, 2.0, 10.0])
        if chance.random() < 0.5:
            blocks = range(first, first + count)
            job = rig.save(blocks, first, deadline_s=deadline_s, placed=self.place(first, count))
            self.open[job] = ("save", blocks, first)
        else:
            start = chance.randint(32, 64 - count)
            blocks = range(start, start + count)
            job = rig.load(blocks, first, deadline_s=deadline_s, placed=self.place(first, count))
            self.open[job] = ("load", blocks, first)

    def place(self, first: int, count: int) -> list[Placed]:
        """Each hash has its node: five go to the one, the next five to the other."""
        nodes = [self.rig.nodes[(first + i) // 5 % 2] for i in range(count)]
        return [Placed(node, len(list(run))) for node, run in itertools.groupby(nodes)]

    def step(self) -> None:
        """Run one task, then look at what has ended (another load may reuse its pages)."""
        self.chance.choice(self.rig.pools).step()
        for result in self.rig.worker.poll().results:
            self.check(result)

    def check(self, result: JobResult) -> None:
        assert result.job not in self.ended, "a job ended twice"
        kind, blocks, first = self.open.pop(result.job)
        self.ended[result.job] = result
        assert len(result.outcomes) == len(blocks)
        assert result.bytes_moved == result.outcomes.count(OK) * self.rig.cache.block_bytes
        for index, (block, code) in enumerate(zip(blocks, result.outcomes, strict=True)):
            BlockOutcome(code)
            if kind == "load" and code == OK:
                assert self.rig.holds(block, first + index), (result, index)

    def drain(self) -> None:
        while any(pool.waiting() for pool in self.rig.pools):
            self.step()
        for result in self.rig.worker.poll().results:
            self.check(result)
        assert not self.open and self.rig.worker.pending() == 0
        assert all(pool.bytes_in_flight() == 0 for pool in self.rig.pools)


@pytest.mark.parametrize("seed", range(25))
def test_every_job_ends_once_and_ok_means_right(seed: int) -> None:
    print(f"seed {seed}")
    run = Run(seed, PLAN)
    run.rig.fill(range(32), 0)
    for _ in range(STEPS):
        if run.chance.random() < 0.6:
            run.submit()
        if run.chance.random() < 0.5:
            run.step()
        if run.chance.random() < 0.05:
            run.chance.choice(run.rig.stores).restart()
    run.drain()
    # Pages that are only read by saves are never written.
    assert all(run.rig.holds(block, block) for block in range(32))
    # Once the faults stop, everything works again.
    for node in run.faulty:
        node.plan = FaultPlan()
    job = run.rig.save(range(20), 0, placed=run.place(0, 20))
    run.rig.run()
    run.rig.load(range(40, 60), 0, placed=run.place(0, 20))
    run.rig.run()
    saved, loaded = run.rig.worker.poll().results
    assert saved.job == job and set(saved.outcomes) == set(loaded.outcomes) == {OK}
    assert all(run.rig.holds(40 + i, i) for i in range(20))


def test_the_faults_really_happen() -> None:
    """Every fault was injected, and every outcome was seen, over all the seeds above."""
    injected: Counter[str] = Counter()
    outcomes: Counter[BlockOutcome] = Counter()
    for seed in range(25):
        run = Run(seed, PLAN)
        run.rig.fill(range(32), 0)
        for _ in range(STEPS):
            run.submit()
            run.step()
        run.drain()
        for node in run.faulty:
            injected.update(node.injected)
        for result in run.ended.values():
            outcomes.update(BlockOutcome(code) for code in result.outcomes)
    assert set(injected) == {name for name in FaultPlan._fields if name != "delay_s"}
    wanted = set(BlockOutcome) - {BlockOutcome.DECLINED}
    assert wanted <= set(outcomes), outcomes


def test_without_checksums_the_same_faults_are_noticed_by_the_pages() -> None:
    """The check above can fail: swapped payloads do get through when nobody looks."""
    run = Run(3, FaultPlan(swap_payload=1.0))
    run.rig = Rig(nodes=2, clock=run.clock, wrap=run.wrap, checksums=False)
    run.rig.fill(range(32), 0)
    run.rig.save(range(8), 0)
    run.rig.run()
    run.rig.worker.poll()
    job = run.rig.load(range(40, 48), 0)
    run.open[job] = ("load", range(40, 48), 0)
    with pytest.raises(AssertionError):
        run.drain()


def test_hashes_of_the_kit_are_distinct() -> None:
    assert len({hash_of(i) for i in range(100)}) == 100
