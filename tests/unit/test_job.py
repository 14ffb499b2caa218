"""How a job always ends: copies are waited for, and a copy that failed fails every block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from connector.clock import ManualClock
from connector.errors import StoreTimeout, StoreUnavailable
from connector.ids import BlockHash, BlockId, JobId, NodeId, RequestId
from connector.meta import BlockOutcome, LoadMeta, Placed
from store_worker.job import JobContext, Outcomes, Slice, Ticket, run_job, slices
from store_worker.paged.copy import Batch, Fence, Landing

OK, FAILED, TIMED_OUT = BlockOutcome.OK, BlockOutcome.FAILED, BlockOutcome.TIMED_OUT


class Copies:
    """A mover that only knows whether it was waited for."""

    def __init__(self, error: Exception | None = None) -> None:
        self.finished, self._error = 0, error

    def read(self, blocks: Sequence[BlockId], after: Fence) -> Iterator[Batch]:
        raise NotImplementedError

    def write(self, blocks: Sequence[BlockId], after: Fence) -> Iterator[Landing]:
        raise NotImplementedError

    def finish(self) -> None:
        self.finished += 1
        if self._error is not None:
            raise self._error


def context(mover: Copies) -> JobContext:
    def node(name: NodeId) -> None:
        raise AssertionError("no node is needed here")

    return JobContext(
        rank=1, payload_bytes=10, mover=mover, node=node,  # type: ignore[arg-type]
        clock=ManualClock(), checksums=True, ttl_ms=1000,
    )  # fmt: skip


def ticket(*counts: int) -> Ticket:
    total = sum(counts)
    meta = LoadMeta(
        job=JobId(1),
        request=RequestId("r"),
        store=bytes(8),
        hashes=tuple(BlockHash(bytes([i])) for i in range(total)),
        blocks=tuple(BlockId(i) for i in range(total)),
        placed=tuple(Placed(NodeId(f"n{i}"), count) for i, count in enumerate(counts)),
        deadline_s=5.0,
    )
    return Ticket(meta, 0.0)


def all_good(piece: Slice, ticket: Ticket, context: JobContext, outcomes: Outcomes) -> None:
    outcomes.fill(piece, OK)


def test_copies_are_waited_for_before_the_result() -> None:
    mover = Copies()
    result = run_job(ticket(2, 1), context(mover), all_good)
    assert mover.finished == 1
    assert (result.outcomes, result.bytes_moved, result.rank) == (bytes([OK] * 3), 30, 1)


def test_copies_are_waited_for_also_when_the_job_fails() -> None:
    mover = Copies()

    def fails(*_: object) -> None:
        raise RuntimeError("on purpose")

    assert run_job(ticket(2), context(mover), fails).outcomes == bytes([FAILED] * 2)
    assert mover.finished == 1


def test_a_failed_copy_fails_every_block() -> None:
    result = run_job(ticket(2, 1), context(Copies(RuntimeError("device"))), all_good)
    assert (result.outcomes, result.bytes_moved) == (bytes([FAILED] * 3), 0)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(StoreTimeout("x"), TIMED_OUT), (StoreUnavailable("x"), FAILED), (ValueError("x"), FAILED)],
)
def test_what_a_slice_raises_is_the_outcome_of_its_open_blocks(
    error: Exception, outcome: BlockOutcome
) -> None:
    def second_fails(
        piece: Slice, ticket: Ticket, context: JobContext, outcomes: Outcomes
    ) -> None:
        outcomes.put(piece.start, [OK])
        if piece.node == "n1":
            raise error
        outcomes.fill(piece, OK)

    result = run_job(ticket(2, 3, 1), context(Copies()), second_fails)
    assert list(result.outcomes) == [OK, OK, OK, outcome, outcome, OK]


def test_slices_follow_the_placement() -> None:
    found = slices(ticket(2, 3).meta)
    assert [(s.node, s.start, list(s.blocks)) for s in found] == [
        ("n0", 0, [0, 1]), ("n1", 2, [2, 3, 4]),
    ]  # fmt: skip


def test_the_first_word_about_a_block_counts() -> None:
    outcomes = Outcomes(3)
    outcomes.put(1, [OK])
    outcomes.put(0, [TIMED_OUT, TIMED_OUT])
    assert list(outcomes.close()) == [TIMED_OUT, OK, FAILED]
