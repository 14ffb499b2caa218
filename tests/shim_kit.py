"""Stand-ins for the shim engine's tests: a runner without a model, and a small connector.

`PatternRunner` writes, where the model writes KV, a digest of all tokens up to that position (and
of the rank), and asserts before it samples that every position of the request's block table holds
the digest it must hold. Its tokens are a pure function of the tokens before: so any mistake with
blocks, by the engine or by a connector, is an assertion or a wrong token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from connector.errors import ConfigError
from engine_shim.api import RequestOptions
from engine_shim.config import EngineConfig
from engine_shim.connector_port import (
    Connector,
    FinishResult,
    MatchResult,
    PoolPort,
    RequestView,
    StepOutput,
    WorkerReport,
)
from engine_shim.engine import EngineCore
from engine_shim.protocol import EngineCoreOutput, EngineCoreRequest, SamplingParams
from engine_shim.scheduler_output import Sampled, Work
from engine_shim.validation import build_message

_PRIME = (1 << 61) - 1
WRONG = -7


def small_config(**changes: object) -> EngineConfig:
    """An engine of few, small blocks."""
    base: dict[str, object] = {
        "block_size": 4,
        "num_blocks": 64,
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
    }
    return EngineConfig(**{**base, **changes})  # type: ignore[arg-type]


def digest(state: int, token: int) -> int:
    """State after one more token."""
    return (state * 1_000_003 + token + 1) % _PRIME


def states(tokens: Sequence[int]) -> list[int]:
    """State after each token."""
    found, state = [], 1
    for token in tokens:
        state = digest(state, token)
        found.append(state)
    return found


def next_token(state: int) -> int:
    """Printable, never EOS."""
    return 32 + state % 95


def expected_tokens(prompt: Sequence[int], count: int) -> list[int]:
    """What any correct engine answers with PatternRunner."""
    state, found = states(prompt)[-1], []
    for _ in range(count):
        found.append(next_token(state))
        state = digest(state, found[-1])
    return found


class PatternRunner:
    """See the module."""

    def __init__(self, config: EngineConfig) -> None:
        self._size = config.block_size
        shape = (config.num_blocks, config.block_size)
        self.caches = [
            [torch.full(shape, WRONG, dtype=torch.int64)] for _ in range(config.tp_size)
        ]
        self.tokens: dict[str, list[int]] = {}
        self.checking = True
        """False: let wrong KV pass (a synchronous load that failed is noticed after the step)."""

    def execute(self, work: Sequence[Work]) -> dict[str, Sampled]:
        found = {}
        for part in work:
            if part.token_ids is not None:
                self.tokens[part.request_id] = list(part.token_ids)
            known = self.tokens[part.request_id]
            end = part.start + part.count
            assert end <= len(known), "tokens asked that nobody knows"
            chain = states(known[:end])
            self._write(part, chain)
            if self.checking:
                self._check(part, chain)
            if part.samples:
                assert end == len(known), "samples in the middle"
                token = next_token(chain[-1])
                known.append(token)
                found[part.request_id] = Sampled(token)
        return found

    def _slot(self, part: Work, position: int) -> tuple[int, int]:
        return part.block_ids[position // self._size], position % self._size

    def _write(self, part: Work, chain: list[int]) -> None:
        for position in range(part.start, part.start + part.count):
            block, offset = self._slot(part, position)
            for rank, layers in enumerate(self.caches):
                layers[0][block, offset] = chain[position] ^ rank

    def _check(self, part: Work, chain: list[int]) -> None:
        for position, value in enumerate(chain):
            block, offset = self._slot(part, position)
            for rank, layers in enumerate(self.caches):
                held = int(layers[0][block, offset])
                assert held == value ^ rank, (
                    f"{part.request_id}: position {position}, block {block}, rank {rank}:"
                    f" {'never written' if held == WRONG else 'the KV of other tokens'}"
                )

    def forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self.tokens.pop(request_id, None)


@dataclass
class Faults:
    """What goes wrong. load_steps: steps a load takes. lost: hashes whose load fails.

    ask_again: answers "ask again" so often per request. synchronous: loads end in start_step.
    promise: answers instead of the honest connector.
    """

    load_steps: int = 1
    save_steps: int = 1
    lost: set[bytes] = field(default_factory=set)
    ask_again: int = 0
    synchronous: bool = False
    delay_free_steps: int = 0
    promise: Callable[[RequestView, int], MatchResult] | None = None


@dataclass
class _Meta:
    loads: list[tuple[str, list[bytes], list[int]]]
    saves: list[tuple[int, list[bytes], list[int]]]
    sends: list[str]


class ToyConnector:
    """A connector in memory that keeps its part of `connector_port`; `faults` may change any time.

    It saves every full block, holding the engine's blocks until all ranks have reported.
    """

    def __init__(self, config: EngineConfig, faults: Faults | None = None) -> None:
        self.faults = faults or Faults()
        self.size = config.block_size
        self.ranks = config.tp_size
        self.store: dict[tuple[int, bytes], torch.Tensor] = {}
        self.listed: set[bytes] = set()
        self.log: list[tuple[object, ...]] = []
        self.closed: list[tuple[str, str | None]] = []
        self._pool: PoolPort
        self.asked: dict[str, int] = {}
        self._loads: list[tuple[str, list[bytes], list[int]]] = []
        self._saved: dict[str, int] = {}
        self._held: dict[int, tuple[list[bytes], list[int], set[int]]] = {}
        self._jobs = 0
        self._sends: list[str] = []
        self._given_up: set[bytes] = set()
        self.sessions_seen: dict[str, str | None] = {}

    def bundle(self) -> Connector:
        return Connector(self, tuple(ToyWorker(self, rank) for rank in range(self.ranks)))

    # ---- scheduler half

    def bind_block_pool(self, pool: PoolPort) -> None:
        self._pool = pool

    def on_new_request(self, request: RequestView) -> None:
        self.log.append(("new", request.request_id))
        self.sessions_seen[request.request_id] = request.session_id

    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int
    ) -> MatchResult:
        self.log.append(("match", request.request_id, num_computed_tokens))
        asked = self.asked.get(request.request_id, 0)
        self.asked[request.request_id] = asked + 1
        if asked < self.faults.ask_again:
            return MatchResult(None)
        if self.faults.promise is not None:
            return self.faults.promise(request, num_computed_tokens)
        first = num_computed_tokens // self.size
        most = (request.num_tokens - 1) // self.size
        count = 0
        for block_hash in request.block_hashes[first:most]:
            if block_hash not in self.listed or block_hash in self._given_up:
                break
            count += 1
        return MatchResult(count * self.size, count > 0 and not self.faults.synchronous)

    def update_state_after_alloc(
        self, request: RequestView, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        self.log.append(("alloc", request.request_id, len(block_ids), num_external_tokens))
        if num_external_tokens:
            first = (request.num_computed_tokens - num_external_tokens) // self.size
            count = num_external_tokens // self.size
            assert first + count <= min(len(request.block_hashes), len(block_ids))
            hashes = list(request.block_hashes[first : first + count])
            blocks = list(block_ids[first : first + count])
            self._loads.append((request.request_id, hashes, blocks))

    def build_step(self, output: StepOutput) -> object | None:
        saves = []
        for request_id in output.preempted_ids:
            self.log.append(("preempted", request_id))
        for part in output.scheduled:
            done = (part.num_computed_tokens + part.num_scheduled_tokens) // self.size
            done = min(done, len(part.request.block_hashes))
            new = [
                (part.request.block_hashes[i], part.block_ids[i])
                for i in range(done)
                if part.request.block_hashes[i] not in self.listed
            ]
            if new:
                self._jobs += 1
                hashes, blocks = [h for h, _ in new], [b for _, b in new]
                self._pool.touch(blocks)
                self._held[self._jobs] = (hashes, blocks, set())
                saves.append((self._jobs, hashes, blocks))
        meta = _Meta(self._loads, saves, self._sends)
        self._loads, self._sends = [], []
        return meta if meta.loads or meta.saves or meta.sends else None

    def on_worker_reports(self, reports: Sequence[object]) -> None:
        for report in reports:
            assert isinstance(report, tuple)
            rank, saved, lost = report
            self._given_up |= lost
            for job in saved:
                hashes, blocks, ranks = self._held[job]
                ranks.add(rank)
                if len(ranks) == self.ranks:
                    del self._held[job]
                    self._pool.free(blocks)
                    self.listed.update(hashes)

    def request_finished(self, request: RequestView, block_ids: Sequence[int]) -> FinishResult:
        self.log.append(("finished", request.request_id, request.aborted))
        self.asked.pop(request.request_id, None)
        delay = self.faults.delay_free_steps > 0 and not request.aborted and bool(block_ids)
        if delay:
            self._sends.append(request.request_id)
        return FinishResult(delay, {"tokens": request.num_tokens} if delay else None)

    def has_pending_work(self) -> bool:
        return bool(self._held or self._sends or self._loads)

    def reset_cache(self) -> bool:
        self.listed.clear()
        return True

    def drop_holds(self) -> None:
        """It keeps them until its saves have ended."""

    def close_session(self, session_id: str, cache_salt: str | None) -> None:
        self.closed.append((session_id, cache_salt))

    def stats(self) -> Mapping[str, object]:
        return {"listed": len(self.listed)}

    def shutdown(self) -> None:
        self.log.append(("shutdown",))


class ToyWorker:
    """One rank of ToyConnector. Copies happen at the end of their time, on the engine's thread."""

    def __init__(self, owner: ToyConnector, rank: int) -> None:
        self._owner, self._rank = owner, rank
        self.cache: torch.Tensor
        self._loads: list[list[object]] = []
        self._saves: list[list[object]] = []
        self._sends: list[list[object]] = []
        self._failed: set[int] = set()
        self._lost: set[bytes] = set()
        self._meta: _Meta | None = None

    def register_kv_caches(self, regions: Sequence[torch.Tensor]) -> None:
        (self.cache,) = regions

    def start_step(self, meta: object | None) -> None:
        assert meta is None or isinstance(meta, _Meta)
        self._meta = meta
        faults = self._owner.faults
        for request_id, hashes, blocks in meta.loads if meta else ():
            if faults.synchronous:
                self._load(hashes, blocks)
            else:
                # Ranks end at different times.
                self._loads.append([faults.load_steps + self._rank, request_id, hashes, blocks])

    def _load(self, hashes: list[bytes], blocks: list[int]) -> None:
        for block_hash, block in zip(hashes, blocks, strict=True):
            held = self._owner.store.get((self._rank, block_hash))
            if held is None or (block_hash in self._owner.faults.lost and self._rank == 0):
                self._failed.add(block)
                self._lost.add(block_hash)
                self.cache[block] = WRONG
            else:
                self.cache[block] = held

    def end_step(self) -> None:
        faults = self._owner.faults
        for job, hashes, blocks in self._meta.saves if self._meta else ():
            self._saves.append([faults.save_steps + self._rank, job, hashes, blocks])
        for request_id in self._meta.sends if self._meta else ():
            self._sends.append([faults.delay_free_steps, request_id])

    def poll(self) -> WorkerReport:
        loaded, saved, sent = self._due(self._loads), self._due(self._saves), self._due(self._sends)
        for _, _, hashes, blocks in loaded:
            self._load(hashes, blocks)  # type: ignore[arg-type]
        for _, _, hashes, blocks in saved:
            for block_hash, block in zip(hashes, blocks, strict=True):  # type: ignore[call-overload]
                self._owner.store[(self._rank, block_hash)] = self.cache[block].clone()
        payload = (self._rank, [row[1] for row in saved], self._lost)
        report = WorkerReport(
            finished_loads=frozenset(str(row[1]) for row in loaded),
            failed_blocks=frozenset(self._failed),
            finished_sends=frozenset(str(row[1]) for row in sent),
            payload=payload if saved or self._lost else None,
        )
        self._failed, self._lost = set(), set()
        return report

    @staticmethod
    def _due(rows: list[list[object]]) -> list[list[object]]:
        due = []
        for row in list(rows):
            row[0] -= 1  # type: ignore[operator]
            if row[0] <= 0:  # type: ignore[operator]
                rows.remove(row)
                due.append(row)
        return due

    def shutdown(self) -> None:
        pass


def pattern_engine(
    config: EngineConfig, connector: ToyConnector | None = None
) -> EngineCore:
    """An engine with PatternRunner."""
    bundle = connector.bundle() if connector is not None else None
    return EngineCore(config, bundle, PatternRunner(config))


def request(
    request_id: str,
    prompt: Sequence[int],
    max_tokens: int = 8,
    session_id: str | None = None,
    cache_salt: str | None = None,
) -> EngineCoreRequest:
    """A greedy request."""
    options = RequestOptions(session_id=session_id, cache_salt=cache_salt)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return build_message(list(prompt), params, options, request_id, 0.0)


@dataclass
class Outcome:
    """All outputs of one request. `last` is None while it runs."""

    tokens: list[int] = field(default_factory=list)
    last: EngineCoreOutput | None = None
    outputs: list[EngineCoreOutput] = field(default_factory=list)


class Driver:
    """Steps an engine and collects outputs."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.outcomes: dict[str, Outcome] = {}

    def add(self, message: EngineCoreRequest) -> Outcome:
        self.core.add_request(message)
        return self.outcomes.setdefault(message.request_id, Outcome())

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for _, output in self.core.step()[0]:
                outcome = self.outcomes.setdefault(output.request_id, Outcome())
                assert outcome.last is None, "output after the last one"
                outcome.tokens.extend(output.new_token_ids)
                outcome.outputs.append(output)
                if output.ended:
                    outcome.last = output
            faults = self.core.check_integrity()
            assert not faults, faults

    def run(self, steps_max: int = 2000) -> None:
        """Until nothing is left to do, the connector's work included."""
        for _ in range(steps_max):
            if not (self.core.has_work or self.core.must_poll):
                return
            self.step()
        raise AssertionError(f"not at rest after {steps_max} steps: {self.core.stats()}")

    def assert_at_rest(self) -> None:
        """Nothing is held."""
        stats = self.core.stats()
        assert stats["free_blocks"] == stats["num_blocks"], stats
        assert not self.core.scheduler.requests
        assert not self.core.must_poll


def toy_factory(config: EngineConfig) -> Connector:
    """A `connector_port.ConnectorFactory` for engine processes of the tests."""
    assert config.kv_transfer_config is not None
    if config.kv_transfer_config.get("fail"):
        raise ConfigError("fail", True, "a connector that works")
    return ToyConnector(config, Faults(**config.kv_transfer_config.get("faults", {}))).bundle()
