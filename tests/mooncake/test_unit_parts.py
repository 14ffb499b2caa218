"""The parts of the Mooncake back end that need no server."""

from __future__ import annotations

import random
import threading

import pytest

from connector.clock import ManualClock, SystemClock
from connector.config import Config, parse_config
from connector.errors import ConfigError, StoreUnavailable
from connector.ids import BlockHash, Namespace, NodeId
from connector.indexmsg import Acquired, RunSlice
from connector.meta import BlockOutcome
from store_worker.backends.base import PutItem
from store_worker.backends.memory import MemoryNode, MemoryStore
from store_worker.backends.mooncake_arena import ALIGN, Arena, Extent
from store_worker.backends.mooncake_bulk import (
    BATCH_BYTES,
    IN_PLACE_BYTES,
    SLICES_MAX,
    batches,
    nothing_in_place,
    plan,
    text_key,
)
from store_worker.backends.mooncake_codes import (
    Meaning,
    MooncakeCode,
    code_name,
    meaning,
    outcome_of,
)
from store_worker.backends.mooncake_library import address_of
from store_worker.backends.mooncake_state import ABANDONED_MAX, REMOVALS_MAX, Gate, Removals
from store_worker.backends.mooncake_url import MooncakeUrl, parse_mooncake_url
from store_worker.index.precheck import Precheck
from store_worker.keys import object_key

# ---- URL -----------------------------------------------------------------------------------------


def test_a_short_url_has_the_ports_that_mooncake_uses() -> None:
    assert parse_mooncake_url("mooncake://master.example") == MooncakeUrl(
        master="master.example:50051",
        metadata="http://master.example:8080/metadata",
        admin="http://master.example:9003",
    )


def test_every_option() -> None:
    url = parse_mooncake_url(
        "mooncake://10.0.0.1:7000?metadata=etcd://10.0.0.2:2379&admin=http://10.0.0.1:7001/"
        "&protocol=rdma&devices=mlx5_0,mlx5_1&host=10.0.0.9&segment=1073741824&buffer=67108864"
        "&direct=true"
    )
    assert url == MooncakeUrl(
        master="10.0.0.1:7000",
        metadata="etcd://10.0.0.2:2379",
        admin="http://10.0.0.1:7001",
        protocol="rdma",
        devices="mlx5_0,mlx5_1",
        host="10.0.0.9",
        segment_bytes=1 << 30,
        buffer_bytes=1 << 26,
        direct=True,
    )
    assert (url.master_host, url.master_port) == ("10.0.0.1", 7000)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("mooncake://h?protocol=udp", "'udp'"),
        ("mooncake://h?segmnt=1", "did you mean 'segment'"),
        ("mooncake://h?whatever=1", "known: metadata"),
        ("mooncake://h?segment=1GB", "'1GB'"),
        ("mooncake://h?segment=5", "at least 16777216"),
        ("mooncake://h?buffer=-1", "'-1'"),
        ("mooncake://h?direct=yes", '"true" or "false"'),
        ("mooncake://h?metadata=h:8080", "an http:// URL"),
        ("mooncake://h?admin=etcd://h", "an http:// URL"),
        ("mooncake://h?direct=true&direct=true", "twice"),
        ("mooncake://h:99999", "a URL"),
        ("mooncake://h/segment", "question mark"),
        ("mooncake://", "MASTER_HOST"),
    ],
)
def test_a_bad_url_is_explained(url: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_mooncake_url(url)
    assert said in str(error.value)
    assert "store.data" in str(error.value)


def test_the_config_accepts_it() -> None:
    store = {"index": "redis://h", "data": "mooncake://h:50051?segment=0"}
    assert isinstance(parse_config({"store": store}), Config)


# ---- codes ---------------------------------------------------------------------------------------


def test_every_code_means_something() -> None:
    for code in MooncakeCode:
        assert meaning(code) is not Meaning.UNKNOWN, code
        assert code_name(code) == code.name
    assert meaning(4096) is Meaning.DONE and code_name(4096) == "OK"
    assert meaning(-31337) is Meaning.UNKNOWN and code_name(-31337) == "other"


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        (0, BlockOutcome.OK),
        (1 << 20, BlockOutcome.OK),
        (MooncakeCode.OBJECT_NOT_FOUND, BlockOutcome.MISSING),
        (MooncakeCode.REPLICA_IS_NOT_READY, BlockOutcome.MISSING),
        (MooncakeCode.TRANSFER_FAIL, BlockOutcome.FAILED),
        (MooncakeCode.RPC_TIMEOUT, BlockOutcome.FAILED),
        (MooncakeCode.NO_AVAILABLE_HANDLE, BlockOutcome.FAILED),
        (-31337, BlockOutcome.FAILED),
    ],
)
def test_outcomes(code: int, outcome: BlockOutcome) -> None:
    assert outcome_of(code) is outcome


# ---- staging memory ------------------------------------------------------------------------------


def test_extents_never_overlap_and_all_come_back() -> None:
    clock, chance = SystemClock(), random.Random(7)
    arena = Arena(64 * ALIGN, clock)
    held: list[tuple[Extent, int]] = []
    for step in range(3000):
        if held and chance.random() < 0.5:
            extent, mark = held.pop(chance.randrange(len(held)))
            assert set(extent.view) == {mark}
            extent.release()
            extent.release()
            continue
        taken = arena.take(chance.randint(1, 9 * ALIGN), clock.now())
        if taken is not None:
            mark = step % 251
            taken.view[:] = bytes([mark]) * taken.size
            held.append((taken, mark))
    for extent, _ in held:
        extent.release()
    assert arena.free_bytes() == arena.size
    whole = arena.take(arena.size, clock.now())
    assert whole is not None and whole.address == arena.address


def test_waiting_for_an_extent() -> None:
    clock = SystemClock()
    arena = Arena(4 * ALIGN, clock)
    first = arena.take(4 * ALIGN, clock.now())
    assert first is not None
    assert arena.take(1, clock.now() + 0.01) is None
    assert arena.take(5 * ALIGN, clock.now() + 60) is None  # at once: it never fits
    timer = threading.Timer(0.02, first.release)
    timer.start()
    assert arena.take(ALIGN, clock.now() + 10) is not None
    timer.join()


# ---- plans ---------------------------------------------------------------------------------------


def parts_of(*sizes: int) -> list[memoryview]:
    return [memoryview(bytes([i + 1]) * size) for i, size in enumerate(sizes)]


def test_small_parts_are_one_slice() -> None:
    one = plan(parts_of(112, 1000, 0, 24), lambda _: True)
    assert [at for at, _ in one.staged] == [0, 112, 1112]
    assert one.shape(5000) == ([5000], [1136], 1136, 5000, 112)


def test_large_parts_go_from_where_they_lie() -> None:
    parts = parts_of(112, IN_PLACE_BYTES, 10, 20, 2 * IN_PLACE_BYTES, IN_PLACE_BYTES)
    shape = plan(parts, lambda _: True).shape(5000)
    assert shape.ptrs == [
        5000, address_of(parts[1]), 5112, address_of(parts[4]), address_of(parts[5])
    ]
    assert shape.sizes == [112, IN_PLACE_BYTES, 30, 2 * IN_PLACE_BYTES, IN_PLACE_BYTES]
    assert shape.offsets == [0, 112, IN_PLACE_BYTES + 112, IN_PLACE_BYTES + 142,
                             3 * IN_PLACE_BYTES + 142]
    assert shape.total == sum(map(len, parts))
    staged = plan(parts, nothing_in_place).shape(0)
    assert (staged.ptrs, staged.sizes) == ([0], [shape.total])


def test_the_first_part_is_always_staged() -> None:
    parts = parts_of(IN_PLACE_BYTES, IN_PLACE_BYTES)
    shape = plan(parts, lambda _: True).shape(64)
    assert shape.ptrs == [64, address_of(parts[1])]
    assert (shape.head, shape.head_bytes) == (64, IN_PLACE_BYTES)


def test_batches_keep_within_bytes_and_slices() -> None:
    chance = random.Random(3)
    sizes = [chance.choice([100, 5000, 1 << 20, 9 << 20]) for _ in range(900)]
    page = memoryview(bytes(9 << 20))
    items = [PutItem(b"%d" % i, [page[:size]]) for i, size in enumerate(sizes)]
    seen = 0
    for batch in batches(items, lambda _: 3, BATCH_BYTES):
        assert batch.start == seen
        seen += len(batch.items)
        total = sum(len(item.parts[0]) for item in batch.items)
        assert batch.size == total
        assert len(batch.items) == 1 or total <= BATCH_BYTES
        assert len(batch.items) * 3 <= SLICES_MAX
    assert seen == 900


def test_keys_are_text_and_differ() -> None:
    keys = [b"", b"\0", b"\xff\xfe", b"skvo:abc", b"SKVO:abc"]
    names = {text_key(key, segment) for key in keys for segment in ("", "h:1", "h:2")}
    assert len(names) == 15 and all(name.isascii() and name.isprintable() for name in names)


# ---- who is away, what is to be removed ----------------------------------------------------------


def test_a_gate_lets_one_probe_through_and_doubles_its_pause() -> None:
    clock = ManualClock()
    gate = Gate("s", clock)
    assert gate.enter(100.0) == 100.0
    gate.failed("why")
    for pause in (1.0, 2.0, 2.0, 2.0, 2.0):
        with pytest.raises(StoreUnavailable, match="why"):
            gate.enter(1000.0)
        with pytest.raises(StoreUnavailable):
            gate.check()
        assert not gate.open
        clock.advance(pause)
        gate.check()
        assert gate.enter(1000.0) == clock.now() + 0.5
        with pytest.raises(StoreUnavailable):
            gate.enter(1000.0)  # one at a time
        gate.failed("why")
    assert gate.failures == 6
    gate.succeeded()
    assert gate.open and gate.failures == 0 and gate.enter(1000.0) == 1000.0


def test_a_gate_bounds_the_calls_that_have_not_returned() -> None:
    gate = Gate("s", ManualClock())
    for _ in range(ABANDONED_MAX):
        gate.left(+1)
    with pytest.raises(StoreUnavailable, match="not returned"):
        gate.enter(1.0)
    gate.left(-1)
    assert gate.enter(1.0) == 1.0


def test_a_gate_of_no_one_peer_never_closes() -> None:
    gate = Gate("any", ManualClock(), closes=False)
    gate.failed("x")
    assert gate.enter(5.0) == 5.0


def test_removals_are_tried_again_and_given_up() -> None:
    clock = ManualClock()
    removals = Removals(clock)
    assert removals.add(["a", "b", "a"]) == 2
    assert removals.add(["a"]) == 0
    assert removals.held(["a", "x"]) == {"a"}
    assert removals.due() == []
    clock.advance(1.0)
    assert removals.due() == ["a", "b"]
    assert removals.due() == []
    removals.discard(["a"])
    clock.advance(1.0)
    assert removals.due() == ["b"]
    clock.advance(60.0)
    assert removals.due() == [] and len(removals) == 0 and removals.given_up == 1


def test_removals_are_bounded() -> None:
    removals = Removals(ManualClock())
    assert removals.add(str(i) for i in range(REMOVALS_MAX + 5)) == REMOVALS_MAX
    assert removals.given_up == 5


# ---- what was planned is looked for --------------------------------------------------------------


def test_planned_objects_are_looked_for_on_their_own_nodes() -> None:
    clock = SystemClock()
    hashes = [BlockHash(bytes([i]) * 32) for i in range(6)]
    store, namespace = bytes(8), Namespace(bytes(16))
    stores = {NodeId(name): MemoryStore() for name in "ab"}
    nodes = {name: MemoryNode(held, parse_config({"store": "memory://x"}), clock)
             for name, held in stores.items()}
    found = Acquired(
        depth=6,
        slices=(
            RunSlice(node=NodeId("a"), incarnation=b"", start=0, stop=4, ranks=2),
            RunSlice(node=NodeId("b"), incarnation=b"", start=4, stop=6, ranks=2),
        ),
    )
    for piece in found.slices:
        items = [
            PutItem(object_key(store, namespace, hashes[d], rank), [memoryview(b"x")])
            for d in range(piece.start, piece.stop) for rank in range(2)
        ]
        nodes[piece.node].put(items, 60_000, clock.now() + 10)
    look = Precheck(nodes.__getitem__, clock)
    assert look.first_missing(store, namespace, hashes, found) == 6
    for depth, name in ((5, "b"), (4, "b"), (2, "a")):
        stores[NodeId(name)].values.pop(object_key(store, namespace, hashes[depth], 1))
        assert look.first_missing(store, namespace, hashes, found) == depth
    stores[NodeId("a")].up = False
    assert look.first_missing(store, namespace, hashes, found) == 6  # nothing is known
    look.close()
