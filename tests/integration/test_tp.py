"""Two ranks: a block is visible once both have saved it, and a rank that fails hides it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from connector.errors import StoreUnavailable
from connector.meta import BlockOutcome
from store_worker.backends.base import DataNode, GetItem, Landed, PutItem
from tests.integration.conversation_kit import (
    Fleet,
    Gate,
    Talk,
    pattern_model,
    rank_of,
    some_tokens,
)


class Refusing:
    """A node that fails for some keys; everything else goes through. See `base.DataNode`."""

    def __init__(self, inner: DataNode, refuses: Callable[[bytes], bool]) -> None:
        self._inner, self._refuses = inner, refuses

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def put(self, items: Sequence[PutItem], ttl_ms: int, deadline: float) -> list[BlockOutcome]:
        good = [item for item in items if not self._refuses(item.key)]
        found = iter(self._inner.put(good, ttl_ms, deadline))
        return [
            BlockOutcome.FAILED if self._refuses(item.key) else next(found) for item in items
        ]

    def get(
        self, items: Sequence[GetItem], deadline: float, landed: Landed | None = None
    ) -> list[BlockOutcome]:
        return [
            BlockOutcome.MISSING
            if self._refuses(item.key)
            else self._inner.get([item], deadline, lambda _, i=index: landed and landed(i))[0]  # type: ignore[misc]
            for index, item in enumerate(items)
        ]


def test_a_block_is_visible_when_both_ranks_have_saved_it() -> None:
    with Fleet(tp=2) as fleet:
        shim, other = fleet.engine(), fleet.engine()
        prompt = some_tokens("both", 30)
        with Gate(fleet.data, "put", ranks=[1]) as gate:
            answer = shim.ask("a", prompt, 2, session="s")
            shim.run_until(lambda: gate.reached() and answer.finished, "rank 1 to hang")
            (save,) = shim.saves()
            shim.run_until(lambda: {r.rank for r in shim.half.results} == {0}, "rank 0 to report")
            assert {rank_of(key) for key in fleet.data.values} == {0}
            assert fleet.listed(prompt) == 0
            assert shim.held == len(save.blocks), "blocks are held until every rank has reported"
            early = other.ask("b", prompt, 2, session="s")
            other.run_until(lambda: early.finished, "the other engine's answer")
            fleet.check(early)
            assert early.loaded == 0
        fleet.run_all()
        assert fleet.listed(prompt) == 7
        assert other.core.reset_prefix_cache()
        late = other.answer("c", prompt, 2, session="s")
        fleet.check(late)
        assert late.loaded == 28


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("how", ["unreachable", "from the fourth block on"])
def test_what_one_rank_could_not_save_is_not_visible(failing: int, how: str) -> None:
    with Fleet(tp=2) as fleet:
        prompt = some_tokens("half", 30)
        chain = fleet.chain(prompt)
        bad = chain if how == "unreachable" else chain[3:]

        def refuses(key: bytes) -> bool:
            if rank_of(key) != failing:
                return False
            if how == "unreachable":
                raise StoreUnavailable("this rank has lost its network")
            return any(key.endswith(block) for block in bad)

        shim = fleet.engine(wrap=lambda node: Refusing(node, refuses))
        other = fleet.engine()
        fleet.check(shim.answer("a", prompt, 2, session="s"))
        assert fleet.listed(prompt) == len(chain) - len(bad)
        answer = other.answer("b", prompt, 2, session="s")
        fleet.check(answer)
        assert answer.loaded == (len(chain) - len(bad)) * other.block


@pytest.mark.parametrize("failing", [0, 1])
def test_one_rank_that_cannot_load_is_a_shorter_hit_on_all(failing: int) -> None:
    with Fleet(tp=2) as fleet:
        prompt = some_tokens("short", 30)
        lost = fleet.chain(prompt)[4]
        fleet.engine().answer("a", prompt, 2, session="s")
        reader = fleet.engine(
            wrap=lambda node: Refusing(
                node, lambda key: rank_of(key) == failing and key.endswith(lost)
            )
        )
        answer = reader.answer("b", prompt, 2, session="s")
        fleet.check(answer)
        assert answer.loaded == 4 * reader.block
        assert reader.counters()["blocks_forgotten"] == 1


def test_a_rank_that_dies_in_the_middle_of_a_conversation() -> None:
    with Fleet(tp=2, pattern=False) as fleet:
        dead = False

        def refuses(key: bytes) -> bool:
            if dead and rank_of(key) == 1:
                raise StoreUnavailable("this rank is gone")
            return False

        shim = fleet.engine(wrap=lambda node: Refusing(node, refuses))
        other = fleet.engine()
        talk = Talk(fleet, "s", 40)
        talk.turn(shim)
        talk.turn(other)
        dead = True
        talk.turn(shim, must_hit=False)
        missed = talk.turn(other, must_hit=False)
        # It has its own last turn, and finds nothing of the one that a rank could not save.
        assert missed.loaded == 0
        dead = False
        talk.turn(shim, must_hit=False)
        assert talk.turn(other).loaded > 0


def test_fault_62_other_tp_sizes_are_a_clean_miss() -> None:
    with Fleet(tp=2) as fleet:
        prompt = some_tokens("tp", 30)
        two = fleet.engine()
        one = fleet.engine({"tp_size": 1, "model": pattern_model(1)})
        two.answer("a", prompt, 2, session="s")
        answer = one.answer("b", prompt, 2, session="s")
        fleet.check(answer)
        assert answer.loaded == 0
        assert one.counters()["namespace"] != two.counters()["namespace"]
