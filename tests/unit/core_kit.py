"""A scheduler half with everything around it under the test's control, and no threads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from connector.clock import ManualClock
from connector.config import Config, parse_config
from connector.ids import BlockId, Namespace, NodeId, RequestId
from connector.indexmsg import CommitOutcome, RunSlice
from connector.lookup import (
    CommitOp,
    CommitReply,
    DoneReply,
    IndexOp,
    IndexReply,
    LookupOp,
    LookupOutcome,
    LookupReply,
    PrepareOp,
    PrepareReply,
)
from connector.meta import BlockOutcome, JobKind, JobResult, LoadMeta, SaveMeta, WorkerReport
from connector.planner import Engine
from connector.scheduler import ConnectorScheduler, Said, Scheduled

B = 4
STORE = b"store-01"
NODE = NodeId("node")
INCARNATION = b"incarn-1"


@dataclass
class FakeRequest:
    """A request whose tokens the test grows."""

    request_id: str
    num_prompt_tokens: int
    num_tokens: int
    salt: str = ""

    @property
    def block_hashes(self) -> Sequence[bytes]:
        return [f"{self.salt}/{i}".encode().ljust(32, b".") for i in range(self.num_tokens // B)]


@dataclass
class FakePool:
    """Counts references."""

    refs: Counter[int] = field(default_factory=Counter)
    share: float = 1.0

    def hold(self, blocks: Sequence[BlockId]) -> None:
        self.refs.update(blocks)

    def release(self, blocks: Sequence[BlockId]) -> None:
        self.refs.subtract(blocks)
        assert min(self.refs.values()) >= 0, "a reference was given back twice"
        self.refs += Counter()

    def free_share(self) -> float:
        return self.share


@dataclass
class FakeIndex:
    """Holds operations until the test answers them."""

    ops: list[IndexOp] = field(default_factory=list)
    replies: list[IndexReply] = field(default_factory=list)
    full: bool = False
    due: int = 0
    posted: list[IndexOp] = field(default_factory=list)

    def post(self, op: IndexOp) -> bool:
        if self.full:
            return False
        self.ops.append(op)
        self.posted.append(op)
        self.due += 1
        return True

    def poll(self) -> Sequence[IndexReply]:
        replies, self.replies = self.replies, []
        self.due -= len(replies)
        return replies

    def pending(self) -> int:
        return self.due

    def gauges(self) -> dict[str, float]:
        return {}

    def close(self, timeout_s: float) -> None:
        """Nothing to stop."""

    def take(self, kind: type[Any]) -> Any:
        """The oldest unanswered operation of a kind."""
        found = next(op for op in self.ops if isinstance(op, kind))
        self.ops.remove(found)
        return found

    def has(self, kind: type[Any]) -> bool:
        return any(isinstance(op, kind) for op in self.ops)

    def answer(self, reply: IndexReply) -> None:
        self.replies.append(reply)


class Kit:
    """One engine's scheduler half with fakes, and shorthands."""

    def __init__(self, ranks: int = 1, num_blocks: int = 1000, **config: Any) -> None:
        self.clock = ManualClock()
        self.index = FakeIndex()
        self.pool = FakePool()
        self.config: Config = parse_config({"store": "memory://test", **config})
        engine = Engine(tokens_per_block=B, ranks=ranks, object_bytes=100, num_blocks=num_blocks)
        self.core = ConnectorScheduler(
            self.config, engine, self.index, self.clock, lambda e: Namespace(e.encode().ljust(16))
        )
        self.core.bind_block_pool(self.pool)
        self.ranks = ranks

    def arrive(self, request: FakeRequest, **said: Any) -> None:
        self.core.on_new_request(request, Said(**{"session_id": "s", **said}))

    def hit(self, depth: int, **change: Any) -> LookupOp:
        """Answer the oldest lookup with so many blocks."""
        op: LookupOp = self.index.take(LookupOp)
        slices = (RunSlice(node=NODE, incarnation=INCARNATION, start=0, stop=depth),)
        reply = LookupReply(
            **{
                "ticket": op.ticket,
                "request": op.request,
                "outcome": LookupOutcome.HIT_TIP if depth else LookupOutcome.MISS,
                "session": b"session-key",
                "generation": 7,
                "store": STORE,
                "depth": depth,
                "slices": slices if depth else (),
                **change,
            }
        )
        self.index.answer(reply)
        return op

    def step(
        self, request: FakeRequest | None = None, computed: int = 0, tokens: int = 0
    ) -> tuple[list[LoadMeta], list[SaveMeta]]:
        """Build one step; `tokens` tokens of `request` are computed with it."""
        parts = []
        if request is not None:
            table = [BlockId(100 + i) for i in range(-(-(computed + tokens) // B))]
            parts.append(
                Scheduled(RequestId(request.request_id), computed, tokens, blocks(table))
            )
        meta = self.core.build_step(parts)
        return list(meta.loads), list(meta.saves)

    def grant(self, first_missing: int = 0, **change: Any) -> PrepareOp:
        """Answer the oldest prepare with room."""
        op: PrepareOp = self.index.take(PrepareOp)
        self.index.answer(
            PrepareReply(
                **{
                    "job": op.job,
                    "grant": op.job,
                    "node": NODE,
                    "incarnation": INCARNATION,
                    "store": STORE,
                    "first_missing": first_missing,
                    **change,
                }
            )
        )
        return op

    def commit(self, outcome: CommitOutcome | None = CommitOutcome.OK) -> CommitOp:
        """Answer the oldest commit."""
        op: CommitOp = self.index.take(CommitOp)
        self.index.answer(CommitReply(job=op.job, outcome=outcome))
        return op

    def saved(self, request: FakeRequest) -> list[bytes]:
        """Let the one open save of the request succeed; its hashes."""
        self.grant()
        _, (save,) = self.step()
        self.report(save)
        self.commit()
        self.core.poll()
        return list(save.hashes)

    def done(self) -> None:
        """Answer everything that needs no content."""
        for op in list(self.index.ops):
            self.index.ops.remove(op)
            self.index.answer(DoneReply(op=type(op).__name__, ok=True))

    def report(
        self,
        meta: LoadMeta | SaveMeta,
        bad: dict[int, BlockOutcome] | None = None,
        rank: int | None = None,
    ) -> None:
        """Ranks report a job; `bad`: outcomes that are not OK, by index."""
        outcomes = bytes((bad or {}).get(i, BlockOutcome.OK) for i in range(len(meta.blocks)))
        kind = JobKind.LOAD if isinstance(meta, LoadMeta) else JobKind.SAVE
        for r in range(self.ranks) if rank is None else [rank]:
            result = JobResult(
                job=meta.job,
                request=meta.request,
                kind=kind,
                rank=r,
                outcomes=outcomes,
                bytes_moved=100,
                seconds=0.01,
            )
            self.core.on_reports([WorkerReport(rank=r, results=(result,))])

    def finish(self, request: FakeRequest, computed: int) -> dict[str, object] | None:
        table = [BlockId(100 + i) for i in range(computed // B)]
        return self.core.on_finished(RequestId(request.request_id), computed, table)

    def end_of(self, request: FakeRequest, computed: int) -> None:
        """The rest is computed in one step, of which nothing can be asked for; then it ends."""
        self.index.full = True
        self.step(request, 0, computed)
        self.index.full = False
        self.finish(request, computed)

    def match(self, request: FakeRequest, computed: int = 0) -> int | None:
        return self.core.match(RequestId(request.request_id), computed)

    def allocate(self, request: FakeRequest, blocks: int, tokens: int) -> None:
        table = [BlockId(100 + i) for i in range(blocks)]
        self.core.on_allocated(RequestId(request.request_id), table, tokens)

    def idle(self) -> bool:
        """Nothing open, nothing held, sound."""
        return (
            self.core.open_jobs() == 0
            and not self.pool.refs
            and self.core.check_integrity() == []
        )


def blocks(table: list[BlockId]) -> Callable[[], Sequence[BlockId]]:
    """A table, given when asked for."""
    return lambda: table
