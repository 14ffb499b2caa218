"""Anything in any order, from a seed: turns, aborts, closes, resets, a store that fails, is slow,
loses or changes objects. Every answer that ends is a cold engine's; nothing is held at the end."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from connector.errors import StoreUnavailable
from engine_shim.protocol import FinishReason
from store_worker.backends.memory import Value
from tests.integration.conversation_kit import Answer, Fleet, Shim, some_tokens

SEEDS = range(12)
SEEN: Counter[str] = Counter()
"""What has happened in all seeds together."""
SESSIONS = ("a", "b", "c", None)


class Weather:
    """The network to a memory node."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.fails = self.slow = 0.0

    def __call__(self, operation: str, keys: Sequence[bytes]) -> None:
        if operation not in ("get", "put", "delete", "persist"):
            return
        if self._chance.random() < self.slow:
            threading.Event().wait(self._chance.random() / 50)
        if self._chance.random() < self.fails:
            raise StoreUnavailable("bad weather")


class World:
    """Engines, their store, and what was asked."""

    def __init__(self, fleet: Fleet, chance: random.Random) -> None:
        self.fleet, self.chance = fleet, chance
        self.weather = fleet.data.hook = Weather(random.Random(chance.random()))
        self.shims = [fleet.engine() for _ in range(chance.choice((1, 2, 3)))]
        self.said: dict[str | None, list[int]] = {}
        self.asked: list[tuple[Shim, Answer, str | None]] = []

    def ask(self) -> None:
        """A turn of some conversation, sometimes with its end rewritten, on some engine."""
        chance, number = self.chance, len(self.asked)
        session = chance.choice(SESSIONS)
        longest = self.shims[0].config.max_model_len - 40
        before = self.said.get(session, ())[: chance.choice((longest, longest, 20))]
        prompt = [*before, *some_tokens((session, number), chance.randrange(1, 20))][:longest]
        shim, salt = chance.choice(self.shims), chance.choice((None, None, None, "x"))
        reply = chance.randrange(1, 30)
        answer = shim.ask(f"q{number}", prompt, reply, session=session, salt=salt)
        self.asked.append((shim, answer, session))

    def step(self) -> None:
        shim = self.chance.choice(self.shims)
        for _ in range(self.chance.randrange(1, 25)):
            shim.step()
        for _, answer, session in self.asked:
            if ended_well(answer) and self.chance.random() < 0.3:
                self.said[session] = answer.prompt + answer.tokens

        self.listen()

    def listen(self) -> None:
        """Conversations go on from answers that have come."""
        for _, answer, session in self.asked:
            if ended_well(answer) and self.chance.random() < 0.3:
                self.said[session] = answer.prompt + answer.tokens

    def finish(self) -> None:
        self.chance.choice(self.shims).run_all()
        self.listen()

    def abort(self) -> None:
        if self.asked:
            shim, answer, _ = self.chance.choice(self.asked)
            shim.abort(answer.id)

    def close(self) -> None:
        self.chance.choice(self.shims).core.close_session(self.chance.choice("abc"))

    def reset(self) -> None:
        shim = self.chance.choice(self.shims)
        shim.core.reset_prefix_cache(reset_external=self.chance.random() < 0.3)

    def change_weather(self) -> None:
        self.weather.fails = self.chance.choice((0.0, 0.0, 0.0, 0.0, 0.02, 0.1, 1.0))
        self.weather.slow = self.chance.choice((0.0, 0.0, 0.2, 1.0))

    def spoil(self) -> None:
        """An object is lost, or one bit of it changes."""
        data = self.fleet.data
        with data.lock:
            if not data.values:
                return
            key = self.chance.choice(sorted(data.values))
            value = data.values.pop(key)
            if self.chance.random() < 0.5:
                changed = bytearray(value.data)
                changed[self.chance.randrange(len(changed))] ^= 1 << self.chance.randrange(8)
                data.values[key] = Value(bytes(changed), value.expires)

    def restart(self) -> None:
        self.fleet.data.restart()


WEIGHTS: dict[Callable[[World], None], int] = {
    World.ask: 320, World.step: 330, World.finish: 120, World.abort: 50, World.change_weather: 50,
    World.close: 25, World.reset: 80, World.spoil: 80, World.restart: 2,
}  # fmt: skip


def ended_well(answer: Answer) -> bool:
    return answer.last is not None and answer.last.finish_reason is FinishReason.LENGTH


def some_fleet(chance: random.Random) -> Fleet:
    """Engines of a random kind: small pools, small steps, short deadlines."""
    pick = chance.choice
    blocks = pick((20, 28, 48, 64))
    engine: dict[str, Any] = {
        "num_blocks": blocks,
        "max_model_len": min(4 * blocks, 160),
        "async_scheduling": pick((True, False)),
        "max_num_batched_tokens": pick((7, 16, 64, 128)),
        "max_num_seqs": pick((2, 4, 16)),
    }
    return Fleet(
        tp=pick((1, 1, 2)),
        engine=engine,
        hold_share_max=pick((0.1, 0.25, 1.0)),
        io_threads=pick((1, 2)),
        lookup_deadline_s=pick((0.01, 20.0, 20.0)),
        save_deadline_s=pick((0.05, 30.0, 30.0)),
        load_deadline_s=pick((0.02, 30.0, 30.0)),
        blocks_per_job_max=pick((1, 3, 128)),
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_anything_in_any_order(seed: int) -> None:
    chance = random.Random(seed)
    with some_fleet(chance) as fleet:
        world = World(fleet, chance)
        for act in chance.choices(list(WEIGHTS), list(WEIGHTS.values()), k=120):
            act(world)
            assert not [words for shim in world.shims for words in shim.violations()]
        world.weather.fails = world.weather.slow = 0.0
        fleet.run_all()
        for _, answer, _ in world.asked:
            if ended_well(answer):
                fleet.check(answer)
            else:
                assert answer.last is not None
                assert answer.last.finish_reason is FinishReason.ABORT, answer.last
        SEEN["seeds"] += 1
        for shim in world.shims:
            SEEN["preemptions"] += int(str(shim.core.stats()["preemptions"]))
            SEEN.update({name: shim.counters().get(name, 0) for name in EVENTS})


EVENTS = (
    "loads",
    "load_blocks_failed",
    "commits{by=ok}",
    "saves_failed",
    "sessions_closed",
    "load_objects{outcome=MISSING}",
)


def test_all_of_it_has_happened() -> None:
    if SEEN["seeds"] < len(SEEDS):
        pytest.skip(f"only {SEEN['seeds']} of {len(SEEDS)} seeds were run")
    missing = [name for name in (*EVENTS, "preemptions") if not SEEN[name]]
    assert not missing, SEEN
