"""Conversations over several shim engines in this process that share one store.

A `Fleet` makes the engines, on one thread, over `memory://` or a real server. An engine runs the
real model, whose text and log-probabilities are compared with those of a cold engine, or the
`PatternRunner`, which asserts before every token that each position of the request holds its own
KV. When a fleet is left, every engine must be idle with nothing held, and the index must be sound.
"""

from __future__ import annotations

import random
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from connector.clock import Clock
from connector.config import Config
from connector.ids import BlockHash, Namespace, NodeId
from connector.meta import JobResult, LoadMeta, SaveMeta, StepMeta, WorkerReport
from engine_shim import connector_port as port
from engine_shim.api import RequestOptions
from engine_shim.config import EngineConfig, ModelConfig
from engine_shim.engine import EngineCore
from engine_shim.hashing import extend_chain
from engine_shim.protocol import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    SamplingParams,
    Usage,
)
from engine_shim.validation import build_message
from engine_shim.wiring import SchedulerHalf, WorkerHalf, parse_flag, payload_bytes
from store_worker.assemble import open_worker_side
from store_worker.backends.base import DataNode
from store_worker.backends.factory import node_id
from store_worker.backends.memory import MemoryStore, Value, memory_store
from store_worker.index import SessionIndex, open_index
from store_worker.index.locked import locked
from store_worker.keys import parse_object_key
from store_worker.paged.layout import paged_cache
from store_worker.worker import StoreWorker, WorkerPorts, system_ports
from tests.shim_kit import PatternRunner, expected_tokens
from tests.waiting import eventually

MODEL = ModelConfig(
    num_layers=3, hidden_size=64, num_heads=8, num_kv_heads=4, head_dim=16, intermediate_size=128
)
MODEL_BLOCK, PATTERN_BLOCK = 16, 4
# Two ways to the same KV differ by rounding; another KV differs by far more.
LOGPROB_TOLERANCE = 1e-4
STEPS_PER_LOOK = 200
DEADLINE_S = 60.0
# A loaded machine must not look like a store that is away.
PATIENT: dict[str, Any] = {
    "lookup_deadline_s": 20.0,
    "index_timeout_s": 20.0,
    "load_deadline_s": 30.0,
    "save_deadline_s": 30.0,
    "cost_model": False,
    "hold_share_max": 1.0,
}

Wrap = Callable[[DataNode], DataNode]


class Gate:
    """A hook of a memory node: some calls wait here until `open`. Leave it as a context manager.

    ranks: of which objects; empty: of all.
    """

    def __init__(self, store: MemoryStore, *operations: str, ranks: Sequence[int] = ()) -> None:
        self._operations, self._ranks = operations, ranks
        self._opened = threading.Event()
        self._reached = threading.Event()
        self._store = store
        store.hook = self._pass

    def _pass(self, operation: str, keys: Sequence[bytes]) -> None:
        if operation not in self._operations or self._opened.is_set():
            return
        if not self._ranks or any(rank_of(key) in self._ranks for key in keys):
            self._reached.set()
            assert self._opened.wait(DEADLINE_S), "a gate was never opened"

    def reached(self) -> bool:
        """True once a call waits, or has waited."""
        return self._reached.is_set()

    def open(self) -> None:
        """Let everybody through."""
        self._opened.set()

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *_: object) -> None:
        self.open()
        self._store.hook = None


def rank_of(key: bytes) -> int:
    """The worker rank whose object has this key."""
    name = parse_object_key(key)
    assert name is not None, key
    return name.rank


def pattern_model(tp: int) -> ModelConfig:
    """Shapes under which one position of one rank takes the 8 bytes that PatternRunner writes."""
    return ModelConfig(
        num_layers=1, hidden_size=2 * tp, num_heads=tp, num_kv_heads=tp, head_dim=2,
        intermediate_size=tp, dtype="float16",
    )  # fmt: skip


def some_tokens(seed: object, count: int) -> list[int]:
    """Printable tokens that depend on the seed alone."""
    chance = random.Random(str(seed))
    return [chance.randrange(32, 127) for _ in range(count)]


def need(block: int, before: int, reply: int, prompt: int) -> int:
    """Tokens that a turn must not compute. before, reply: tokens of the last turn's prompt and
    reply (the last sampled token has no KV). prompt: this one's (one token is always computed)."""
    return min((before + reply - 1) // block, (prompt - 1) // block) * block


@dataclass
class Answer:
    """What came of a request so far."""

    id: str
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    last: EngineCoreOutput | None = None

    @property
    def finished(self) -> bool:
        return self.last is not None

    @property
    def usage(self) -> Usage:
        assert self.last is not None and self.last.usage is not None, f"{self.id} has not ended"
        return self.last.usage

    @property
    def cached(self) -> int:
        """Prompt tokens that were not computed: the engine's own, and loaded ones."""
        return self.usage.cached_tokens

    @property
    def loaded(self) -> int:
        return self.usage.external_cached_tokens

    def take(self, output: EngineCoreOutput) -> None:
        assert self.last is None, f"{self.id}: an output after the last one"
        self.tokens += output.new_token_ids
        self.logprobs += [row.logprob for row in output.new_logprobs or ()]
        self.last = output if output.ended else None


class Recorder:
    """A scheduler half, with what passes through it written down."""

    def __init__(self, half: SchedulerHalf) -> None:
        self.half = half
        self.metas: list[StepMeta] = []
        self.results: list[JobResult] = []
        self.asked_again: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.half, name)

    def get_num_new_matched_tokens(
        self, request: port.RequestView, num_computed_tokens: int
    ) -> port.MatchResult:
        found = self.half.get_num_new_matched_tokens(request, num_computed_tokens)
        self.asked_again[request.request_id] += found.num_tokens is None
        return found

    def build_step(self, output: port.StepOutput) -> object | None:
        meta = self.half.build_step(output)
        if isinstance(meta, StepMeta):
            self.metas.append(meta)
        return meta

    def on_worker_reports(self, reports: Sequence[object]) -> None:
        for report in reports:
            assert isinstance(report, WorkerReport)
            self.results += report.results
        self.half.on_worker_reports(reports)


class Shim:
    """One engine and its connector, if it has one."""

    def __init__(
        self, config: EngineConfig, pattern: bool, connector: port.Connector | None = None
    ) -> None:
        self.config = config
        self.connector = connector
        self.core = EngineCore(config, connector, PatternRunner(config) if pattern else None)
        self.answers: dict[str, Answer] = {}

    # ---- driving

    def ask(
        self,
        id: str,
        prompt: Sequence[int],
        reply: int = 8,
        session: str | None = None,
        salt: str | None = None,
        **extra: Any,
    ) -> Answer:
        """Queue a greedy request of `reply` tokens. extra: its `extra_args`."""
        options = RequestOptions(session_id=session, cache_salt=salt)
        params = SamplingParams(
            temperature=0.0, max_tokens=reply, ignore_eos=True, logprobs=0,
            extra_args=extra or None,
        )  # fmt: skip
        return self.add(build_message(list(prompt), params, options, id, 0.0))

    def add(self, message: EngineCoreRequest) -> Answer:
        answer = Answer(message.request_id, list(message.prompt_token_ids or ()))
        self.answers[answer.id] = answer
        self.core.add_request(message)
        return answer

    def refuse(self, message: EngineCoreRequest) -> list[EngineCoreOutput]:
        """Add a message that leads to no request of its own; the outputs that say so."""
        self.core.add_request(message)
        taken = [output for _, output in self.core.scheduler.take_outputs()]
        assert all(output.error for output in taken), taken
        return taken

    def answer(self, id: str, prompt: Sequence[int], reply: int = 8, **more: Any) -> Answer:
        """Ask, and run until everything of it has ended, its saves included."""
        answer = self.ask(id, prompt, reply, **more)
        self.run_until(lambda: answer.finished, f"{id} to end")
        self.run_all()
        return answer

    def abort(self, id: str) -> None:
        """The client of a request is gone."""
        self.core.abort([id])

    def step(self) -> bool:
        """One step; False if it brought nothing."""
        outputs, computed = self.core.step()
        for _, output in outputs:
            self.answers[output.request_id].take(output)
        return computed or bool(outputs)

    def run_until(
        self, look: Callable[[], object], what: str, deadline_s: float = DEADLINE_S
    ) -> None:
        """Step until `look()` is true; other threads get their turn whenever a step brought
        nothing."""

        def steps() -> bool:
            for _ in range(STEPS_PER_LOOK):
                if look():
                    return True
                if not self.step():
                    break
            return bool(look())

        eventually(steps, deadline_s, what, again_s=0.0005)

    @property
    def busy(self) -> bool:
        return self.core.has_work or self.core.must_poll

    def run_all(self, deadline_s: float = DEADLINE_S) -> None:
        """Step until nothing is left to do: no request, no job, no answer that is due."""
        self.run_until(lambda: not self.busy, "the engine to be idle", deadline_s)

    # ---- looking

    @property
    def block(self) -> int:
        return self.config.block_size

    @property
    def half(self) -> Recorder:
        assert self.connector is not None, "this engine has no connector"
        found: Any = self.connector.scheduler
        return found

    def loads(self) -> list[LoadMeta]:
        """Loads that were sent to the workers so far."""
        return [load for meta in self.half.metas for load in meta.loads]

    def saves(self) -> list[SaveMeta]:
        """Saves that were sent to the workers so far."""
        return [save for meta in self.half.metas for save in meta.saves]

    def counters(self) -> Mapping[str, Any]:
        """The connector's counters since the start."""
        found = self.core.stats()["connector"]
        assert isinstance(found, Mapping)
        return found

    @property
    def held(self) -> int:
        """Blocks that somebody has a reference on."""
        pool = self.core.scheduler.pool
        return pool.num_blocks - pool.num_free

    def violations(self) -> list[str]:
        """What is wrong now, whatever the engine is doing."""
        found = self.core.check_integrity()
        return found + self.half.check_integrity() if self.connector is not None else found

    def assert_idle(self) -> None:
        """Nothing runs, nothing is held, everything is sound."""
        assert not self.busy, self.core.stats()
        assert self.held == 0, f"{self.held} blocks are held"
        assert self.violations() == []
        if self.connector is not None:
            assert self.counters()["open_jobs"] == 0
            assert [w.pending() for w in self.connector.workers] == [0] * self.config.tp_size  # type: ignore[attr-defined]


class Fleet:
    """Engines of one kind over one store. Leave it as a context manager.

    store: `kv_connector_extra_config["store"]`; None: a memory store of its own. engine: changes of
    EngineConfig. Keyword arguments are changes of the connector's config, over `PATIENT`.
    """

    def __init__(
        self,
        store: Any = None,
        pattern: bool = True,
        tp: int = 1,
        engine: Mapping[str, Any] | None = None,
        **extra: Any,
    ) -> None:
        name = uuid.uuid4().hex
        self.store = store or {"index": f"memory://i-{name}", "data": f"memory://d-{name}"}
        self.pattern, self.tp = pattern, tp
        self._engine = dict(engine or {})
        self._extra = {**PATIENT, **extra}
        self.engines: list[Shim] = []
        self._solo: Shim | None = None
        self._known: dict[tuple[tuple[int, ...], int], Answer] = {}
        self._threads = set(threading.enumerate())

    # ---- engines

    def engine_config(self, **changes: Any) -> EngineConfig:
        """Small by default: 64 blocks of 4 tokens, or 64 of 16 with the model."""
        block = PATTERN_BLOCK if self.pattern else MODEL_BLOCK
        base: dict[str, Any] = {
            "model": pattern_model(self.tp) if self.pattern else MODEL,
            "block_size": block,
            "num_blocks": 64,
            "max_model_len": 48 * block,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 32 * block,
            "tp_size": self.tp,
        }
        return EngineConfig(**{**base, **self._engine, **changes})

    def engine(
        self,
        engine: Mapping[str, Any] | None = None,
        wrap: Wrap | None = None,
        around: Callable[[StoreWorker], Any] | None = None,
        **extra: Any,
    ) -> Shim:
        """One more engine. wrap: put around each connection to a data node that its load and save
        threads make. around: put around each rank's worker."""
        flag = {
            "kv_connector": "SessionKVConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"store": self.store, **self._extra, **extra},
        }
        config = self.engine_config(kv_transfer_config=flag, **(engine or {}))
        parsed = parse_flag(flag)
        opened = _opener(wrap, around)
        workers = tuple(WorkerHalf(parsed, config, r, opened) for r in range(config.tp_size))
        half: Any = Recorder(SchedulerHalf(parsed, config))
        shim = Shim(config, self.pattern, port.Connector(half, workers))
        self.engines.append(shim)
        return shim

    def solo(self, prompt: Sequence[int], reply: int) -> Answer:
        """What an engine without connector and without prefix cache answers."""
        key = (tuple(prompt), reply)
        if key not in self._known:
            self._known[key] = self._solo_answer(list(prompt), reply)
        return self._known[key]

    def _solo_answer(self, prompt: list[int], reply: int) -> Answer:
        if self.pattern:
            return Answer("solo", prompt, expected_tokens(prompt, reply))
        if self._solo is None:
            size = {"num_blocks": 128, "max_model_len": 128 * MODEL_BLOCK}
            config = self.engine_config(enable_prefix_caching=False, **size)
            self._solo = Shim(config, False)
        return self._solo.answer(f"solo-{len(self._known)}", prompt, reply)

    def run_all(self, deadline_s: float = DEADLINE_S) -> None:
        """Step all engines, one after the other, until none has anything left to do."""

        def steps() -> bool:
            busy = [shim for shim in self.engines if shim.busy]
            while any(list(map(Shim.step, busy))):
                busy = [shim for shim in self.engines if shim.busy]
            return not busy

        eventually(steps, deadline_s, "all engines to be idle", again_s=0.0005)

    def check(self, answer: Answer) -> None:
        """The answer is that of a cold engine."""
        assert answer.last is not None, f"{answer.id} has not ended"
        assert answer.last.finish_reason is FinishReason.LENGTH, answer.last
        cold = self.solo(answer.prompt, len(answer.tokens))
        assert answer.tokens == cold.tokens, f"{answer.id}: another text than a cold engine's"
        pairs = zip(answer.logprobs, cold.logprobs, strict=not self.pattern)
        far = max((abs(one - other) for one, other in pairs), default=0.0)
        assert far < LOGPROB_TOLERANCE, f"{answer.id}: log-probabilities differ by {far}"

    # ---- the store

    @property
    def index_url(self) -> str:
        return self.store if isinstance(self.store, str) else self.store["index"]

    @property
    def data_urls(self) -> list[str]:
        urls = self.store if isinstance(self.store, str) else self.store["data"]
        return [urls] if isinstance(urls, str) else urls

    def index(self) -> SessionIndex:
        """The index, for this thread."""
        found = open_index(self.index_url)
        return locked(found) if self.index_url.startswith("memory:") else found

    @property
    def data(self) -> MemoryStore:
        """The one memory node."""
        (url,) = self.data_urls
        return memory_store(url)

    def objects(self) -> dict[bytes, Value]:
        """What the memory node holds, once the janitors are done with what was committed: they
        look at it again a moment later."""
        data = self.data

        def kept() -> bool:
            with data.lock:
                return all(value.expires is None for value in data.values.values())

        eventually(kept, DEADLINE_S, "committed objects to be kept")
        return data.values

    def namespace(self) -> Namespace:
        return Namespace(bytes.fromhex(self.engines[0].counters()["namespace"]))

    def chain(self, tokens: Sequence[int], salt: str | None = None) -> list[BlockHash]:
        """Hashes of the whole blocks of a prompt."""
        found: list[bytes] = []
        extend_chain(found, tokens, self.engine_config().block_size, salt)
        return [BlockHash(h) for h in found]

    def listed(self, tokens: Sequence[int], salt: str | None = None) -> int:
        """Depth up to which the chain of these tokens is visible to other engines; a hole in it is
        a failure."""
        there = self.index().probe(self.namespace(), self.chain(tokens, salt))
        depth = sum(there)
        assert there == (True,) * depth + (False,) * (len(there) - depth), f"a hole: {there}"
        return depth

    def payload_bytes(self) -> int:
        """Of one block, all ranks together."""
        return payload_bytes(self.engine_config()) * self.tp

    # ---- the end

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.assert_idle()
        finally:
            for shim in self.engines:
                shim.core.shutdown()
        if kind is None:
            eventually(lambda: not self.threads(), 10.0, "the threads to end")

    def threads(self) -> list[str]:
        """Threads that have begun since the fleet was made."""
        return [t.name for t in threading.enumerate() if t not in self._threads]

    def assert_idle(self) -> None:
        """Every engine is idle, and the index is sound."""
        self.run_all()
        for shim in self.engines:
            shim.assert_idle()
        assert self.index().check_integrity() == []


def _opener(
    wrap: Wrap | None, around: Callable[[StoreWorker], Any] | None
) -> Callable[..., StoreWorker]:
    def opened(config: Config, rank: int, regions: Any, blocks: int, clock: Clock) -> StoreWorker:
        if wrap is None:
            worker = open_worker_side(config, rank, regions, blocks, clock)
        else:
            ports = _wrapped(wrap, config, clock)
            worker = StoreWorker.with_ports(config, rank, paged_cache(regions, blocks), ports)
        return worker if around is None else around(worker)

    return opened


def _wrapped(wrap: Wrap, config: Config, clock: Clock) -> WorkerPorts:
    urls = {node_id(url): url for url in config.resolved_store().data}
    ports = system_ports(config, clock, urls)

    def open_node(name: NodeId) -> DataNode:
        return wrap(ports.open_node(name))

    return ports._replace(open_node=open_node)


class Talk:
    """One conversation: each turn's prompt is all that was said, and some new tokens."""

    def __init__(
        self,
        fleet: Fleet,
        session: str | None,
        prompt: int,
        salt: str | None = None,
        shared: Sequence[int] = (),
    ) -> None:
        """prompt: tokens of the first one, of its own, after the `shared` ones."""
        self.fleet, self.session, self.salt = fleet, session, salt
        self.seed = f"{session}/{salt}"
        self.history = [*shared, *some_tokens(self.seed, prompt)]
        self.turns: list[Answer] = []
        self._need = 0
        self._open: Answer | None = None

    def ask(self, shim: Shim, reply: int = 9) -> Answer:
        """Begin the next turn."""
        assert self._open is None, "the last turn has not been settled"
        id = f"{self.seed}-{len(self.turns)}"
        self._open = shim.ask(id, self.history, reply, session=self.session, salt=self.salt)
        return self._open

    def settle(self, more: int = 11, must_hit: bool = True) -> Answer:
        """The turn has ended: check it, and say `more` tokens.

        must_hit: what the turns before have left must not be computed again.
        """
        answer, self._open = self._open, None
        assert answer is not None
        self.fleet.check(answer)
        if must_hit:
            assert answer.cached >= self._need, (
                f"{answer.id}: {answer.cached} tokens of {self._need} were not computed"
            )
        self.turns.append(answer)
        before = len(self.history)
        self.history += answer.tokens + some_tokens(f"{self.seed}-{len(self.turns)}", more)
        block = self.fleet.engine_config().block_size
        self._need = need(block, before, len(answer.tokens), len(self.history))
        return answer

    def turn(self, shim: Shim, reply: int = 9, more: int = 11, must_hit: bool = True) -> Answer:
        """A whole turn, its saves included."""
        answer = self.ask(shim, reply)
        shim.run_until(lambda: answer.finished, f"{answer.id} to end")
        shim.run_all()
        return self.settle(more, must_hit)
