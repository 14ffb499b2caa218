"""The checks of the other tests can fail: each is shown the fault that it is there to find."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from connector.ids import BlockHash
from store_worker.backends.base import DataNode
from store_worker.backends.faulty import FaultPlan, FaultyNode
from store_worker.backends.memory import Value
from store_worker.codec import HEADER_BYTES
from store_worker.keys import parse_object_key
from tests.integration.conversation_kit import Fleet, Shim, Talk, Wrap, some_tokens


def faulty(made: list[FaultyNode], **chances: float) -> Wrap:
    """A node with these faults in place of each; they are kept in `made`."""

    def wrap(node: DataNode) -> DataNode:
        found = FaultyNode(node, FaultPlan(**chances), random.Random(1), lambda seconds: None)
        made.append(found)
        return found

    return wrap


def moved(fleet: Fleet, **reader: Any) -> Shim:
    """A conversation's first turn on one engine, its second on another; that one."""
    writer, other = fleet.engine(), fleet.engine(**reader)
    talk = Talk(fleet, "s", 6 * writer.block + 3)
    talk.turn(writer)
    talk.turn(other, must_hit=False)
    return other


def swap_stored(fleet: Fleet, one: BlockHash, other: BlockHash) -> None:
    """Two stored blocks change places, under their own headers."""
    values = fleet.objects()
    keys = {name.hash: key for key in values if (name := parse_object_key(key)) is not None}
    first, second = values[keys[one]], values[keys[other]]
    for key, mine, its in ((keys[one], first, second), (keys[other], second, first)):
        data = mine.data[:HEADER_BYTES] + its.data[HEADER_BYTES:]
        values[key] = Value(data, mine.expires)


@pytest.mark.parametrize("kind", ["model", "pattern"])
@pytest.mark.parametrize("checksums", [False, True])
def test_two_stored_blocks_swapped_without_checksums_are_another_text(
    kind: str, checksums: bool
) -> None:
    """Blocks of two conversations: within one prefix the real model's keys carry their positions,
    so that two of its blocks may change places unseen."""
    with Fleet(pattern=kind == "pattern", checksums=checksums) as fleet:
        writer, reader = fleet.engine(), fleet.engine()
        talk, other = (Talk(fleet, s, 6 * writer.block + 3) for s in ("s", "t"))
        talk.turn(writer)
        other.turn(writer)
        swap_stored(fleet, fleet.chain(talk.history)[2], fleet.chain(other.history)[3])
        if checksums:
            assert talk.turn(reader, must_hit=False).loaded == 2 * writer.block
            return
        with pytest.raises(AssertionError, match=r"another text|the KV of other tokens"):
            talk.turn(reader)
        for id in list(reader.core.scheduler.requests):
            reader.abort(id)


def test_a_faulty_node_that_swaps_payloads_is_noticed() -> None:
    made: list[FaultyNode] = []
    with Fleet() as fleet:
        with pytest.raises(AssertionError, match="the KV of other tokens"):
            moved(fleet, wrap=faulty(made, swap_payload=1.0), checksums=False)
        fleet.engines[1].abort("s/None-1")
    assert sum(node.injected["swap_payload"] for node in made) > 0


@pytest.mark.parametrize("kind", ["model", "pattern"])
def test_with_checksums_the_same_fault_changes_nothing(kind: str) -> None:
    made: list[FaultyNode] = []
    with Fleet(pattern=kind == "pattern") as fleet:
        reader = moved(fleet, wrap=faulty(made, swap_payload=1.0))
        assert sum(node.injected["swap_payload"] for node in made) > 0
        assert reader.counters()["load_objects{outcome=CORRUPT}"] > 0
        assert reader.answers["s/None-1"].loaded == 0


def test_whole_objects_swapped_are_found_by_their_headers() -> None:
    made: list[FaultyNode] = []
    with Fleet() as fleet:
        reader = moved(fleet, wrap=faulty(made, swap=1.0), checksums=False)
        assert sum(node.injected["swap"] for node in made) > 0
        assert reader.answers["s/None-1"].loaded == 0


def test_one_changed_byte_of_kv_is_another_text() -> None:
    """Not only whole blocks: the comparison sees the top byte of one number."""
    with Fleet(pattern=False) as fleet:
        writer, reader = fleet.engine(checksums=False), fleet.engine(checksums=False)
        talk = Talk(fleet, "s", 6 * writer.block + 3)
        talk.turn(writer)
        chain = fleet.chain(talk.history)
        for key, value in list(fleet.objects().items()):
            name = parse_object_key(key)
            if name is not None and name.hash == chain[2]:
                data = bytearray(value.data)
                data[HEADER_BYTES + 3] ^= 0x7F
                fleet.data.values[key] = Value(bytes(data), value.expires)
        with pytest.raises(AssertionError, match=r"another text|log-probabilities differ"):
            talk.turn(reader)


def test_less_than_the_need_is_noticed() -> None:
    with Fleet() as fleet:
        writer, reader = fleet.engine(), fleet.engine(min_load_tokens=1000)
        talk = Talk(fleet, "s", 30)
        talk.turn(writer)
        with pytest.raises(AssertionError, match="tokens of 36 were not computed"):
            talk.turn(reader)


def held_block(shim: Shim) -> Callable[[], None]:
    shim.core.scheduler.pool.touch((5,))
    return lambda: shim.core.scheduler.pool.free((5,))


def hidden_job(shim: Shim) -> Callable[[], None]:
    shim.ask("never", some_tokens("never", 20), 4)
    return lambda: shim.abort("never")


@pytest.mark.parametrize(
    ("spoil", "words"), [(held_block, "1 blocks are held"), (hidden_job, "num_waiting")]
)
def test_an_engine_that_is_not_idle_is_noticed(
    spoil: Callable[[Shim], Callable[[], None]], words: str
) -> None:
    with Fleet() as fleet:
        shim = fleet.engine()
        undo = spoil(shim)
        with pytest.raises(AssertionError, match=words):
            shim.assert_idle()
        undo()


def test_threads_of_a_running_engine_are_seen() -> None:
    with Fleet() as fleet:
        assert fleet.threads() == []
        fleet.engine()
        names = {name.split("-r")[0] for name in fleet.threads()}
        assert names >= {"skv-load", "skv-save", "session-index"}
