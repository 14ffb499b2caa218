"""Faults that others have shipped, shown to be absent on the shim engine. The numbers are those of
tests/faults.py, where the guards are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from connector.errors import StoreTimeout, StoreUnavailable
from connector.meta import JobKind
from engine_shim.protocol import FinishReason
from store_worker.backends.memory import Value
from store_worker.codec import HEADER_BYTES
from store_worker.keys import parse_object_key
from tests.integration.conversation_kit import Fleet, Gate, Shim, Talk, rank_of, some_tokens
from tests.servers import Server
from tests.waiting import eventually


@pytest.fixture
def two() -> Iterator[tuple[Server, Server]]:
    """An index server and a data server."""
    with Server() as index, Server() as data:
        yield index, data


def store_of(two: tuple[Server, Server]) -> dict[str, str]:
    index, data = two
    return {"index": index.url, "data": data.url}


# ---- blocks


def test_fault_04_no_block_is_handed_out_while_it_is_being_saved() -> None:
    """Also when the other request's blocks were allocated without the store's help."""
    with Fleet(engine={"num_blocks": 24, "max_model_len": 96}) as fleet:
        shim = fleet.engine()
        with Gate(fleet.data, "put") as gate:
            first = shim.ask("a", some_tokens("a", 24), 2, session="s")
            shim.run_until(lambda: first.finished and gate.reached(), "a save on its way")
            held = {block for save in shim.saves() for block in save.blocks}
            other = shim.ask("b", some_tokens("b", 40), 20, session="t")
            shim.run_until(lambda: len(other.tokens) > 1, "the other request")
            table = set(shim.core.scheduler.requests["b"].block_ids)
            assert len(held) == 6 and table and not held & table
            pool = shim.core.scheduler.pool
            assert all(pool.refs(block) for block in held), "they could be handed out"
            shim.run_until(lambda: other.finished, "the other request's end")
        shim.run_all()
        more = fleet.engine().answer("c", first.prompt, 2, session="s")
        fleet.check(more)
        assert more.loaded == 20


def test_fault_05_blocks_of_an_unfinished_load_are_never_saved() -> None:
    with Fleet() as fleet:
        writer, reader = fleet.engine(), fleet.engine()
        talk = Talk(fleet, "s", 30)
        talk.turn(writer)
        with Gate(fleet.data, "get") as gate:
            answer = talk.ask(reader)
            reader.run_until(gate.reached, "the load")
            reader.abort(answer.id)
            for _ in range(5):
                reader.step()
            assert reader.loads() and not reader.saves()
        reader.run_all()
        assert not reader.saves()


def test_fault_07_blocks_that_the_engine_has_are_never_written() -> None:
    """A local hit of some blocks, a stored one that is longer and ends within a block."""
    with Fleet() as fleet:
        writer, reader = fleet.engine(), fleet.engine()
        prompt = some_tokens("local", 34)
        reader.answer("local", prompt[:14], 1)  # 3 blocks of its own
        writer.answer("w", prompt, 1)
        running = reader.ask("first", prompt[:14], 30)
        reader.run_until(lambda: len(running.tokens) > 2, "a request that reads the local blocks")
        mine = set(reader.core.scheduler.requests["first"].block_ids[:3])
        answer = reader.ask("second", prompt, 6)
        reader.run_until(lambda: answer.finished and running.finished, "both")
        fleet.check(answer)
        fleet.check(running)
        (load,) = reader.loads()
        assert answer.usage.local_cached_tokens == 12 and len(load.blocks) == 5
        assert not mine & set(load.blocks)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_fault_08_a_connector_that_always_misses_changes_nothing(mode: str) -> None:
    with Fleet(pattern=False, engine={"async_scheduling": mode == "async"}) as fleet:

        def away(operation: str, keys: object) -> None:
            raise StoreUnavailable("there is no store")

        fleet.data.hook = away
        shim = fleet.engine()
        talk = Talk(fleet, "s", 70)
        for _ in range(3):
            assert talk.turn(shim, must_hit=False).loaded == 0


# ---- wrong bytes


def flipped(data: bytes, other: bytes) -> bytes:
    return data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]


def truncated(data: bytes, other: bytes) -> bytes:
    return data[:-1]


def longer(data: bytes, other: bytes) -> bytes:
    return data + b"\0"


def swapped(data: bytes, other: bytes) -> bytes:
    return other


def payload_of_another(data: bytes, other: bytes) -> bytes:
    return data[:HEADER_BYTES] + other[HEADER_BYTES:]


def another_version(data: bytes, other: bytes) -> bytes:
    return data[:4] + bytes([data[4] + 1]) + data[5:]


SPOILS = [flipped, truncated, longer, swapped, payload_of_another, another_version]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("spoil", SPOILS)
def test_fault_13_14_wrong_bytes_are_computed_again(
    spoil: Callable[[bytes, bytes], bytes], rank: int
) -> None:
    with Fleet(tp=2) as fleet:
        writer, reader = fleet.engine(), fleet.engine()
        talk = Talk(fleet, "s", 30)
        talk.turn(writer)
        Talk(fleet, "t", 30).turn(writer)
        change_stored(fleet, talk, 4, rank, spoil)
        answer = talk.turn(reader, must_hit=False)
        # Right text (turn checks it), the blocks before it used, and it was forgotten.
        assert answer.loaded == 4 * reader.block
        assert reader.counters()["load_objects{outcome=CORRUPT}"] == 1
        assert reader.counters()["blocks_forgotten"] == 1
        # The same turn has stored it again.
        assert talk.turn(fleet.engine()).loaded >= 36


def change_stored(
    fleet: Fleet, talk: Talk, index: int, rank: int, spoil: Callable[[bytes, bytes], bytes]
) -> None:
    """Change one rank's object of one block; `other` is the next block's."""
    chain, values = fleet.chain(talk.history), fleet.objects()
    keys = {}
    for key in values:
        name = parse_object_key(key)
        if name is not None and name.rank == rank:
            keys[name.hash] = key
    mine, other = keys[chain[index]], keys[chain[index + 1]]
    values[mine] = Value(spoil(values[mine].data, values[other].data), None)


def drop_stored(fleet: Fleet, tokens: list[int], index: int, ranks: tuple[int, ...]) -> None:
    """The store has lost some ranks' objects of one block."""
    block = fleet.chain(tokens)[index]
    for key in list(fleet.objects()):
        if key.endswith(block) and rank_of(key) in ranks:
            del fleet.data.values[key]


@pytest.mark.parametrize("index", [0, 2, 4])
def test_fault_15_what_lies_before_a_missing_block_is_used(index: int) -> None:
    with Fleet() as fleet:
        writer, reader = fleet.engine(), fleet.engine()
        prompt = some_tokens("hole", 21)
        writer.answer("w", prompt, 1, session="s")
        drop_stored(fleet, prompt, index, (0,))
        answer = reader.answer("r", prompt, 4, session="s")
        fleet.check(answer)
        assert answer.loaded == index * reader.block
        assert reader.counters()["blocks_forgotten"] == 1
        # Nobody is promised the hole again, and the last turn has filled it.
        again = fleet.engine()
        more = again.answer("again", prompt, 4, session="s")
        fleet.check(more)
        assert more.loaded == 20 and "load_blocks_failed" not in again.counters()


@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)])
def test_fault_44_half_of_a_block_is_a_clean_miss(ranks: tuple[int, ...]) -> None:
    with Fleet(tp=2) as fleet:
        writer, reader = fleet.engine(), fleet.engine()
        prompt = some_tokens("pair", 21)
        writer.answer("w", prompt, 1, session="s")
        drop_stored(fleet, prompt, 3, ranks)
        answer = reader.answer("r", prompt, 4, session="s")
        fleet.check(answer)
        assert answer.loaded == 12 and reader.counters()["blocks_forgotten"] == 1


# ---- whose blocks


def test_fault_27_reset_moves_this_engine_and_nobody_else() -> None:
    with Fleet() as fleet:
        mine, its, reader = fleet.engine(), fleet.engine(), fleet.engine()
        talk = Talk(fleet, "s", 30)
        talk.turn(mine)
        objects = dict(fleet.objects())
        old = mine.counters()["namespace"]
        assert mine.core.reset_prefix_cache(reset_external=True)
        assert mine.counters()["namespace"] != old == its.counters()["namespace"]
        assert objects.items() <= fleet.data.values.items(), "somebody's objects were deleted"
        assert talk.turn(mine, must_hit=False).cached == 0
        # What it saves now is for its new life only; the others still find theirs.
        found = its.answer("its", talk.turns[0].prompt, 2, session="s")
        assert found.loaded == 28
        answer = reader.answer("r", talk.history, 2, session="s")
        fleet.check(answer)
        assert answer.loaded == (30 + 9 - 1) // 4 * 4


# ---- ends


def test_fault_28_48_aborted_after_any_number_of_steps() -> None:
    """With a lookup, a load or a save under way, and between plan and transfer."""
    with Fleet(tp=2) as fleet:
        writer = fleet.engine()
        talk = Talk(fleet, "s", 30)
        talk.turn(writer)
        for steps in range(14):
            shim = fleet.engine()
            answer = shim.ask(f"a{steps}", talk.history, 12, session="s")
            for _ in range(steps):
                shim.step()
            shim.abort(answer.id)
            shim.run_all()
            shim.assert_idle()
            assert answer.last is not None
            assert answer.last.finish_reason in (FinishReason.ABORT, FinishReason.LENGTH)
        fleet.check(fleet.engine().answer("after", talk.history, 12, session="s"))


def test_fault_28_abort_during_a_load_keeps_its_blocks_until_it_has_ended() -> None:
    with Fleet() as fleet:
        writer, reader = fleet.engine(), fleet.engine()
        talk = Talk(fleet, "s", 30)
        talk.turn(writer)
        with Gate(fleet.data, "get") as gate:
            answer = talk.ask(reader)
            reader.run_until(gate.reached, "the load")
            reader.abort(answer.id)
            reader.step()
            (load,) = reader.loads()
            pool = reader.core.scheduler.pool
            assert all(pool.refs(block) for block in load.blocks)
            assert reader.core.must_poll, "an idle engine would never hear of the load's end"
        reader.run_all()
        assert reader.held == 0


def test_fault_29_a_second_request_whose_blocks_are_all_stored_ends_too() -> None:
    with Fleet() as fleet:
        first, second = fleet.engine(), fleet.engine(min_load_tokens=1000)
        prompt = some_tokens("twice", 29)
        first.answer("a", prompt, 4, session="s")
        # It loads nothing, computes everything, and finds that all of it is there already.
        answer = second.answer("b", prompt, 4, session="s")
        fleet.check(answer)
        assert second.held == 0 and not second.saves()
        assert second.counters()["commits{by=ok}"] >= 1


def test_fault_30_every_hold_ends_by_its_deadline(two: tuple[Server, Server]) -> None:
    _, data = two
    with Fleet(store_of(two), save_deadline_s=1.0, connect_timeout_s=0.5) as fleet:
        shim = fleet.engine()
        Talk(fleet, "warm", 20).turn(shim)
        data.pause()
        try:
            answer = shim.ask("a", some_tokens("held", 30), 2, session="s")
            shim.run_until(lambda: answer.finished and shim.held, "a save that hangs")
            shim.run_all(20.0)
            assert shim.held == 0, "blocks are held for a node that never answers"
        finally:
            data.resume()
        assert fleet.listed(answer.prompt) == 0


def test_fault_31_a_refused_request_leaves_nothing() -> None:
    with Fleet() as fleet:
        shim = fleet.engine()
        answer = shim.ask("long", some_tokens("long", 48 * 4), 1, session="s")
        assert not shim.step() or answer.finished
        assert answer.last is not None and answer.last.finish_reason is FinishReason.ERROR
        shim.assert_idle()


def test_fault_33_34_only_what_was_issued_is_reported() -> None:
    """The engine raises on a load's end that it does not wait for, and on any send's."""
    with Fleet(tp=2) as fleet:
        shim = fleet.engine()
        for number in range(3):
            talk = Talk(fleet, f"s{number}", 20 + number)
            talk.turn(shim)
            talk.turn(shim)
        assert shim.core.reset_prefix_cache()
        talk.turn(shim)
        issued = [load.job for load in shim.loads() for _ in range(2)]
        loads = [r.job for r in shim.half.results if r.kind is JobKind.LOAD]
        assert sorted(loads) == sorted(issued) and len(issued) == 2


@pytest.mark.parametrize("error", [StoreUnavailable("no"), StoreTimeout("late"), ValueError("bug")])
def test_fault_36_38_41_every_get_raises_and_nothing_else_happens(error: Exception) -> None:
    """A single request, no other traffic: it is told, computes, and the engine goes on."""
    with Fleet() as fleet:
        writer, reader = fleet.engine(), fleet.engine()
        talk = Talk(fleet, "s", 30)
        talk.turn(writer)

        def broken(operation: str, keys: object) -> None:
            if operation == "get":
                raise error

        fleet.data.hook = broken
        answer = talk.turn(reader, must_hit=False)
        assert answer.loaded == 0 and reader.core.stats()["failed_loads"] == 1
        assert len(reader.loads()) == 1, "the same hit was promised again and again"
        fleet.data.hook = None
        assert talk.turn(fleet.engine()).loaded > 0


def test_fault_39_50_a_get_that_hangs_is_computed(two: tuple[Server, Server]) -> None:
    _, data = two
    with Fleet(store_of(two), load_deadline_s=1.0, save_deadline_s=1.0) as fleet:
        writer, reader = fleet.engine(), fleet.engine()
        talk = Talk(fleet, "s", 30)
        for shim in (writer, reader, writer):
            talk.turn(shim)
        data.pause()
        try:
            answer = talk.ask(reader)
            reader.run_until(lambda: answer.finished, "the request to be computed", 20.0)
        finally:
            data.resume()
        talk.settle(must_hit=False)
        reader.run_all()
        assert reader.counters()["load_objects{outcome=TIMED_OUT}"] > 0
        negative = {n: v for n, v in reader.counters().items() if isinstance(v, int) and v < 0}
        assert not negative, "a counter went down"


def test_fault_54_chunked_prefill_stores_every_block() -> None:
    with Fleet(engine={"max_num_batched_tokens": 13}) as fleet:
        shim, other = fleet.engine(), fleet.engine()
        prompt = some_tokens("chunks", 40)
        shim.answer("a", prompt, 1, session="s")
        assert fleet.listed(prompt) == 10
        answer = other.answer("b", [*prompt, 50], 2, session="s")
        fleet.check(answer)
        assert answer.loaded == 40


def test_fault_55_what_was_stored_is_hit() -> None:
    with Fleet() as fleet:
        writer, reader = fleet.engine(), fleet.engine()
        talk = Talk(fleet, "s", 50)
        talk.turn(writer)
        answer = talk.turn(reader)
        stored, hit = writer.counters()["tokens_saved"], reader.counters()["tokens_loaded{by=tip}"]
        assert stored == hit == answer.loaded == 56


# ---- prefill and decode


def hand_off(fleet: Fleet, shim: Shim, prompt: list[int]) -> dict[str, Any]:
    """The prefill engine has answered; its saves may still be on their way."""
    answer = shim.ask("p", prompt, 1, session="s")
    shim.run_until(lambda: answer.finished, "the prefill")
    assert answer.last is not None and answer.last.kv_transfer_params
    return answer.last.kv_transfer_params


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_fault_60_decode_waits_for_the_hand_off(mode: str) -> None:
    ahead = {"async_scheduling": mode == "async"}
    with Fleet(engine=ahead, pd_wait_s=30.0, save_wait_s=0.0) as fleet:
        prefill, decode = fleet.engine(pd_role="prefill"), fleet.engine(pd_role="decode")
        prompt = some_tokens("handed", 30)
        with Gate(fleet.data, "put") as gate:
            params = hand_off(fleet, prefill, prompt)
            prefill.run_until(gate.reached, "a save that takes its time")
            answer = decode.ask("d", prompt, 6, session="s", kv_transfer_params=params)
            decode.run_until(lambda: decode.half.asked_again["d"] > 3, "decode to wait")
            assert not answer.tokens
        fleet.run_all()
        fleet.check(answer)
        assert answer.loaded == 28


def test_fault_60_a_hand_off_that_failed_is_not_waited_for() -> None:
    with Fleet(pd_wait_s=50.0) as fleet:
        prefill, decode = fleet.engine(pd_role="prefill"), fleet.engine(pd_role="decode")

        def broken(operation: str, keys: object) -> None:
            if operation == "put":
                raise StoreUnavailable("no")

        fleet.data.hook = broken
        prompt = some_tokens("failed", 30)
        params = hand_off(fleet, prefill, prompt)
        answer = decode.ask("d", prompt, 6, session="s", kv_transfer_params=params)
        both = [prefill, decode]

        def ended() -> bool:
            for shim in both:
                shim.step()
            return answer.finished

        eventually(ended, 20.0, "decode to compute it, long before its wait is over", 0.0005)
        fleet.data.hook = None
        fleet.check(answer)
        assert answer.loaded == 0


def test_fault_60_decode_falls_back_at_its_deadline() -> None:
    with Fleet(pd_wait_s=0.4, lookup_deadline_s=0.3) as fleet:
        prefill, decode = fleet.engine(pd_role="prefill"), fleet.engine(pd_role="decode")
        prompt = some_tokens("late", 30)
        with Gate(fleet.data, "put"):
            params = hand_off(fleet, prefill, prompt)
            answer = decode.ask("d", prompt, 6, session="s", kv_transfer_params=params)
            decode.run_until(lambda: answer.finished, "decode to fall back", 20.0)
        fleet.check(answer)
        assert answer.loaded == 0
