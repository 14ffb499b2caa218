"""The scheduler one step ahead of the tokens: what is saved of a turn's end, and what is not."""

from __future__ import annotations

import pytest

from connector.errors import StoreUnavailable
from tests.integration.conversation_kit import Fleet, Gate, Shim, Talk, some_tokens

MODES = pytest.mark.parametrize("mode", ["sync", "async"])


def fleet_of(mode: str, pattern: bool = True) -> Fleet:
    return Fleet(pattern=pattern, engine={"async_scheduling": mode == "async"})


@MODES
@pytest.mark.parametrize("pattern", [True, False], ids=["pattern", "model"])
def test_the_last_whole_block_is_stored_wherever_a_turn_ends(mode: str, pattern: bool) -> None:
    """A block that the last computed token fills is seen by no further step; a block that the last
    sampled token would fill has no KV."""
    with fleet_of(mode, pattern) as fleet:
        shim, other = fleet.engine(), fleet.engine()
        block = shim.block
        prompt = 2 * block + block // 2
        for reply in range(1, 2 * block + 2, 1 if pattern else 5):
            tokens = some_tokens(f"end-{reply}", prompt)
            answer = shim.answer(f"a{reply}", tokens, reply, session=f"s{reply}")
            fleet.check(answer)
            whole = tokens + answer.tokens
            assert fleet.listed(whole) == (prompt + reply - 1) // block, f"reply of {reply}"
            # The next turn reads it to the last block.
            more = other.answer(f"b{reply}", [*whole, 50], 2, session=f"s{reply}")
            fleet.check(more)
            assert more.loaded == (prompt + reply - 1) // block * block


@MODES
def test_nothing_is_stored_of_tokens_that_were_never_computed(mode: str) -> None:
    """Aborted after any number of steps: what is visible is right, and was computed."""
    with fleet_of(mode) as fleet:
        shim, other = fleet.engine({"max_num_batched_tokens": 7}), fleet.engine()
        for steps in range(1, 14):
            tokens = some_tokens(f"abort-{steps}", 22)
            answer = shim.ask(f"a{steps}", tokens, 30, session=f"s{steps}")
            shim.run_until(lambda id=answer.id: _computed(shim, id) > 0, "the first step")  # type: ignore[misc]
            for _ in range(steps):
                shim.step()
            computed = _computed(shim, answer.id)
            shim.abort(answer.id)
            shim.run_all()
            whole = tokens + answer.tokens
            listed = fleet.listed(whole)
            assert listed <= computed // shim.block
            more = other.answer(f"b{steps}", [*whole, 50, 51], 2, session=f"s{steps}")
            fleet.check(more)
            assert more.loaded == listed * shim.block


def _computed(shim: Shim, id: str) -> int:
    requests = shim.core.scheduler.requests
    return requests[id].num_computed_tokens if id in requests else 0


@MODES
def test_fault_09_a_refused_load_is_computed_and_gives_the_same_text(mode: str) -> None:
    for pattern in (True, False):
        with fleet_of(mode, pattern) as fleet:
            writer, reader = fleet.engine(), fleet.engine()
            talk = Talk(fleet, "s", 4 * writer.block + 3)
            talk.turn(writer)

            def refuse(operation: str, keys: object) -> None:
                if operation == "get":
                    raise StoreUnavailable("no")

            fleet.data.hook = refuse
            refused = talk.turn(reader, must_hit=False)
            assert refused.loaded == 0 and reader.counters()["load_blocks_failed"] > 0
            fleet.data.hook = None
            talk.turn(reader)


@MODES
def test_a_turn_that_is_aborted_in_its_load_or_its_save(mode: str) -> None:
    with fleet_of(mode) as fleet:
        shim, other = fleet.engine(), fleet.engine()
        talk = Talk(fleet, "s", 30)
        talk.turn(shim)
        with Gate(fleet.data, "get") as gate:
            answer = talk.ask(other)
            other.run_until(gate.reached, "the load")
            other.abort(answer.id)
            other.step()
            held = other.held
            assert held >= 7, "the blocks of a load belong to it until it has ended"
        other.run_all()
        with Gate(fleet.data, "put") as gate:
            answer = other.ask("again", talk.history, 30, session="s")
            other.run_until(lambda: gate.reached() and len(answer.tokens) > 2, "a save")
            other.abort("again")
            other.step()
            assert other.held > 0
        other.run_all()
        reader = fleet.engine()
        more = reader.answer("more", talk.history, 4, session="s")
        fleet.check(more)
        assert more.loaded == (len(talk.history) - 1) // 4 * 4
