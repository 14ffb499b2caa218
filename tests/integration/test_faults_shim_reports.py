"""What the ranks report of loads that fail together, and what becomes of several lost blocks."""

from __future__ import annotations

from typing import Any

from connector.meta import WorkerReport
from store_worker.worker import StoreWorker
from tests.integration.conversation_kit import Fleet, rank_of, some_tokens


class Together:
    """A worker whose reports come all at once, when it is told to `release` them."""

    def __init__(self, inner: StoreWorker) -> None:
        self._inner = inner
        self.kept: list[WorkerReport] = []
        self._released = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def poll(self) -> WorkerReport:
        self.kept.append(self._inner.poll())
        if not self._released:
            return WorkerReport(rank=0)
        kept, self.kept = self.kept, []
        results = tuple(result for report in kept for result in report.results)
        counters: dict[str, int] = {}
        for report in kept:
            for name, count in report.counters.items():
                counters[name] = counters.get(name, 0) + count
        return WorkerReport(rank=0, results=results, counters=counters)

    @property
    def results(self) -> int:
        return sum(len(report.results) for report in self.kept)

    def release(self) -> None:
        self._released = True


def forget_objects(fleet: Fleet, tokens: list[int], *indices: int) -> None:
    """The store has lost these blocks of a chain."""
    chain = fleet.chain(tokens)
    lost = {chain[index] for index in indices}
    for key in list(fleet.objects()):
        if key[-32:] in lost and rank_of(key) == 0:
            del fleet.data.values[key]


def test_fault_09_every_failed_block_of_a_step_is_reported() -> None:
    """Two loads fail in one step: each request must hear of its own bad blocks."""
    made: list[Together] = []

    def around(worker: StoreWorker) -> Together:
        made.append(Together(worker))
        return made[0]

    with Fleet() as fleet:
        writer, reader = fleet.engine(), fleet.engine(around=around)
        prompts = [some_tokens(f"two-{i}", 26) for i in range(2)]
        for number, prompt in enumerate(prompts):
            writer.answer(f"w{number}", prompt, 1, session=f"s{number}")
            forget_objects(fleet, prompt, 2)
        answers = [
            reader.ask(f"r{number}", prompt, 5, session=f"s{number}")
            for number, prompt in enumerate(prompts)
        ]
        reader.run_until(lambda: made[0].results == 2, "both loads to end")
        made[0].release()
        reader.run_all()
        for answer in answers:
            fleet.check(answer)
            assert answer.loaded == 2 * reader.block


def test_fault_15_every_lost_block_is_forgotten() -> None:
    """Not only the first: whoever comes next must not be promised the second."""
    with Fleet() as fleet:
        writer, reader, later = (fleet.engine() for _ in range(3))
        prompt = some_tokens("holes", 37)
        writer.answer("w", prompt, 1, session="s")
        forget_objects(fleet, prompt, 2, 6)
        answer = reader.answer("r", prompt, 5, session="s")
        fleet.check(answer)
        assert answer.loaded == 2 * reader.block
        assert reader.counters()["blocks_forgotten"] == 2
        more = later.answer("l", prompt, 5, session="s")
        fleet.check(more)
        assert more.loaded == 36 and "load_blocks_failed" not in later.counters()


def test_fault_19_other_weights_under_the_same_name_share_nothing() -> None:
    with Fleet() as fleet:
        prompt = some_tokens("weights", 30)
        fleet.engine(model_revision="one").answer("w", prompt, 1, session="s")
        for change in ({"model_revision": "two"}, {"weights_version": "two"}, {"tenant": "two"}):
            other = fleet.engine(**{"model_revision": "one", **change})
            answer = other.answer("o", prompt, 2, session="s")
            fleet.check(answer)
            assert answer.loaded == 0, change
        same = fleet.engine(model_revision="one").answer("r", prompt, 2, session="s")
        assert same.loaded == 28
