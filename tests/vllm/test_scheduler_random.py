"""Anything at any time: two engines on vLLM's scheduler, one store, and a seed that decides.

Requests come, go on with earlier conversations, are preempted and aborted; caches are emptied;
objects vanish and change; the data node hangs, the index loses its connections. Whatever happens,
every request that is left alone ends with the right text, and at the end nothing is held.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from tests.vllm.conftest import Engines, Solo, Store
from tests.vllm.scheduler_kit import B, Engine, Text, prompt

EVENTS = 120
SHORT = {
    "lookup_deadline_s": 0.3,
    "index_timeout_s": 0.5,
    "load_deadline_s": 0.6,
    "save_deadline_s": 0.8,
    "object_ttl_s": 60.0,
    "connect_timeout_s": 0.3,
}


@dataclass
class World:
    """What the events act upon."""

    engines: list[Engine]
    store: Store
    chance: random.Random
    solo: Solo
    paused: bool = False
    count: int = 0
    talks: dict[str, list[int]] = field(default_factory=dict)
    open: list[tuple[Engine, str, str, Text]] = field(default_factory=list)
    dropped: set[str] = field(default_factory=set)

    # -- events ----------------------------------------------------------------------------------

    def ask(self) -> None:
        """A new conversation, or the next turn of one whose last turn has ended."""
        engine, self.count = self.chance.choice(self.engines), self.count + 1
        free = [t for t in self.talks if t not in {talk for _, talk, _, _ in self.open}]
        if free and self.chance.random() < 0.6:
            talk = self.chance.choice(sorted(free))
            tokens = [*self.talks[talk], *prompt(self.count, self.chance.randrange(1, 40))]
        else:
            talk = f"talk-{self.count}"
            # Some conversations begin alike.
            shared = prompt(self.chance.randrange(3), self.chance.randrange(1, 4) * B + 7)
            tokens = [*shared, *prompt(1000 + self.count, self.chance.randrange(1, 2 * B))]
        if len(tokens) > 20 * B:
            self.talks.pop(talk, None)
            return
        name, salt = f"r{self.count}", self.chance.choice([None, None, "salt"])
        session = None if self.chance.random() < 0.2 else talk
        text = engine.ask(
            name, tokens, self.chance.randrange(1, 60), session_id=session, cache_salt=salt
        )
        self.open.append((engine, talk, name, text))

    def abort(self) -> None:
        if self.open:
            entry = self.chance.choice(self.open)
            entry[0].abort(entry[2])
            self.dropped.add(entry[2])
            self.open.remove(entry)

    def preempt(self) -> None:
        scheduler = self.chance.choice(self.engines).scheduler
        if scheduler.running and not self.engines[0].in_flight and not self.engines[1].in_flight:
            request = scheduler.running.pop()
            scheduler._preempt_request(request, 0.0, drop_stale_output=True)
            scheduler.prev_step_scheduled_req_ids.discard(request.request_id)

    def empty_cache(self) -> None:
        self.chance.choice(self.engines).scheduler.reset_prefix_cache()

    def lose_objects(self) -> None:
        if not self.paused and (objects := sorted(self.store.objects())):
            with self.store.data.client() as client:
                client.delete(*self.chance.sample(objects, min(3, len(objects))))

    def spoil_object(self) -> None:
        if not self.paused and (objects := self.store.objects()):
            key = self.chance.choice(sorted(objects))
            value = bytearray(objects[key])
            value[self.chance.randrange(len(value))] ^= 1 << self.chance.randrange(8)
            with self.store.data.client() as client:
                client.set(key, bytes(value))

    def hang(self) -> None:
        if self.paused:
            self.store.data.resume()
        else:
            self.store.data.pause()
        self.paused = not self.paused

    def cut_index(self) -> None:
        with self.store.index.client() as client:
            client.client_kill_filter(_type="normal", skipme=True)

    # -- the run ---------------------------------------------------------------------------------

    def go(self) -> None:
        """Events and steps, in an order that the seed decides."""
        events: list[Callable[[], None]] = [self.ask] * 8 + [self.abort] * 2 + [self.preempt] * 3
        events += [self.empty_cache] * 2 + [self.lose_objects] * 2 + [self.spoil_object] * 2
        events += [self.hang] * 2 + [self.cut_index]
        for _ in range(EVENTS):
            self.chance.choice(events)()
            for _ in range(self.chance.randrange(12)):
                self.chance.choice(self.engines).step()
                self.collect()
        if self.paused:
            self.hang()
        for engine in self.engines:
            engine.run_all()
        self.collect()

    def collect(self) -> None:
        """Check what has ended."""
        for entry in [e for e in self.open if e[3].finished]:
            _, talk, name, text = entry
            request = text.request
            tokens = list(request.prompt_token_ids or ())
            assert text.finished == "length", (name, text.finished)
            assert text.tokens == self.solo(tokens, request.max_tokens), f"{name} of {talk}"
            self.talks[talk] = tokens + text.tokens
            self.open.remove(entry)


@pytest.fixture(scope="module")
def tally() -> Counter[str]:
    """What happened in all tests of this module."""
    return Counter()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("ahead", [0, 1], ids=["sync", "async"])
@pytest.mark.parametrize("seed", range(4))
def test_anything_at_any_time(
    engines: Engines, store: Store, solo: Solo, tally: Counter[str], seed: int, ahead: int
) -> None:
    chance = random.Random(f"{seed}/{ahead}")
    kits = [{"num_blocks": chance.randrange(24, 60), "tokens_per_step": 96} for _ in range(2)]
    made = [engines(kit={**kit, "steps_ahead": ahead}, **SHORT) for kit in kits]
    world = World(made, store, chance, solo)
    world.go()
    assert not world.open, f"{[name for _, _, name, _ in world.open]} never ended"
    for engine in made:
        engine.assert_empty()
        assert not engine.connector.has_pending_push_work()
        tally.update(loads=len(engine.loads()), saves=len(engine.saves()))


def test_something_was_loaded_and_saved(tally: Counter[str]) -> None:
    """In all of the above together: what one of them comes to is a matter of time."""
    assert not tally or (tally["loads"] and tally["saves"]), tally
