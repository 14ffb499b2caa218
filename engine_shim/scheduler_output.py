"""What passes between scheduler, worker ranks and connector in one step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engine_shim.connector_port import ScheduledRequest, WorkerReport
from engine_shim.errors import ConnectorContractError
from engine_shim.protocol import SamplingParams, TokenLogprobs
from engine_shim.request import Request


@dataclass(frozen=True)
class PlannedRequest:
    """The scheduler's own notes on one scheduled request.

    samples: the step ends at the last planned token, so a new one is sampled.
    suppress_stop: see Work.
    """

    request: Request
    num_scheduled_tokens: int
    num_computed_tokens: int
    samples: bool
    suppress_stop: bool


@dataclass(frozen=True)
class SchedulerOutput:
    """One step as planned. Implements `connector_port.StepOutput`.

    scheduled[i] and planned[i] speak of the same request.
    """

    step: int
    scheduled: list[ScheduledRequest]
    planned: list[PlannedRequest]
    preempted_ids: list[str]
    finished_ids: list[str]

    @property
    def num_tokens(self) -> int:
        """Tokens to compute."""
        return sum(part.num_scheduled_tokens for part in self.scheduled)

    def work(self) -> list[Work]:
        """The step as the model runner gets it."""
        return [
            Work(
                request_id=part.request.request_id,
                start=part.num_computed_tokens,
                count=part.num_scheduled_tokens,
                block_ids=shown.block_ids,
                samples=part.samples,
                params=part.request.params,
                seed=part.request.seed,
                suppress_stop=part.suppress_stop,
                token_ids=shown.token_ids,
            )
            for part, shown in zip(self.planned, self.scheduled, strict=True)
        ]


@dataclass(frozen=True)
class Work:
    """One request's part of a forward pass, as the model runner gets it.

    token_ids: all known tokens, or None if the runner has them (it appends what it samples).
    suppress_stop: no token that would end the request may be chosen (min_tokens).
    """

    request_id: str
    start: int
    count: int
    block_ids: tuple[int, ...]
    samples: bool
    params: SamplingParams
    seed: int
    suppress_stop: bool
    token_ids: Sequence[int] | None


@dataclass(frozen=True)
class Sampled:
    """A chosen token."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass
class MergedReports:
    """The ranks' reports of one step, as one. payloads: in the order of ranks."""

    finished_loads: list[str] = field(default_factory=list)
    failed_blocks: set[int] = field(default_factory=set)
    finished_sends: list[str] = field(default_factory=list)
    payloads: list[object] = field(default_factory=list)


class ReportMerger:
    """An id has ended when every rank has said so, each exactly once."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._loads: dict[str, set[int]] = {}
        self._sends: dict[str, set[int]] = {}

    def merge(self, reports: Sequence[WorkerReport]) -> MergedReports:
        """reports[i] is of rank i. Raises ConnectorContractError on a second word on one id."""
        merged = MergedReports()
        for rank, report in enumerate(reports):
            merged.failed_blocks |= report.failed_blocks
            merged.finished_loads += self._add(self._loads, rank, report.finished_loads)
            merged.finished_sends += self._add(self._sends, rank, report.finished_sends)
            if report.payload is not None:
                merged.payloads.append(report.payload)
        return merged

    def _add(self, seen: dict[str, set[int]], rank: int, ids: Iterable[str]) -> list[str]:
        ended = []
        for request_id in sorted(ids):
            ranks = seen.setdefault(request_id, set())
            if rank in ranks:
                raise ConnectorContractError(f"rank {rank} reported the end of {request_id} twice")
            ranks.add(rank)
            if len(ranks) == self._num_ranks:
                del seen[request_id]
                ended.append(request_id)
        return ended
