"""What every data node promises, over every back end. Bytes are compared, always."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from connector.errors import StoreError, StoreTimeout
from connector.meta import BlockOutcome
from store_worker.backends.base import DataNode, GetItem, PutItem
from tests.contract.data_node_kit import (
    CASES,
    TTL_MS,
    NodeCase,
    get_items,
    joined,
    put_items,
)
from tests.waiting import eventually

OK, MISSING, CORRUPT = BlockOutcome.OK, BlockOutcome.MISSING, BlockOutcome.CORRUPT
TIMED_OUT = BlockOutcome.TIMED_OUT


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Iterator[NodeCase]:
    with CASES[request.param]() as running:
        yield running


@pytest.fixture
def node(case: NodeCase) -> Iterator[DataNode]:
    opened = case.connect()
    yield opened
    opened.close()


@pytest.mark.parametrize(
    ("count", "sizes"),
    [
        (1, [112, 1]),
        (3, [112, 4096]),
        (200, [112, 700]),
        (40, [112, 0, 3, 0, 5]),
        (9, [112] + [32 << 10] * 32),
        (5, [112] + [512] * 1500),  # more regions than one system call takes
        (6, [2 << 20]),
        (1, [20 << 20]),  # more than is ever in flight
    ],
)
def test_what_was_put_is_got(case: NodeCase, node: DataNode, count: int, sizes: list[int]) -> None:
    items = put_items(count, sizes, b"same")
    assert node.put(items, TTL_MS, case.soon()) == [OK] * count
    found = get_items(items)
    landed: list[int] = []
    assert node.get(found, case.soon(), landed.append) == [OK] * count
    assert sorted(landed) == list(range(count))
    assert [joined(item) for item in found] == [joined(item) for item in items]


def test_parts_need_not_be_divided_the_same_way(case: NodeCase, node: DataNode) -> None:
    items = put_items(4, [112, 1000, 24], b"divide")
    node.put(items, TTL_MS, case.soon())
    found = [GetItem(i.key, [memoryview(bytearray(n)) for n in (1, 600, 535)]) for i in items]
    assert node.get(found, case.soon()) == [OK] * 4
    assert [joined(item) for item in found] == [joined(item) for item in items]


def test_landed_sees_the_bytes(case: NodeCase, node: DataNode) -> None:
    items = put_items(20, [112, 5000], b"landed")
    node.put(items, TTL_MS, case.soon())
    found, seen = get_items(items), {}
    node.get(found, case.soon(), lambda i: seen.update({i: joined(found[i])}))
    assert seen == {i: joined(item) for i, item in enumerate(items)}


def test_put_replaces(case: NodeCase, node: DataNode) -> None:
    for size in (300, 500, 200):
        [item] = put_items(1, [size], b"replace")
        node.put([item], TTL_MS, case.soon())
        [found] = get_items([item])
        assert node.get([found], case.soon()) == [OK]
        assert joined(found) == joined(item)


def test_missing_objects_between_others(case: NodeCase, node: DataNode) -> None:
    items = put_items(12, [112, 3000], b"between")
    node.put(items[::3], TTL_MS, case.soon())
    found = get_items(items)
    outcomes = node.get(found, case.soon())
    assert outcomes == [OK if i % 3 == 0 else MISSING for i in range(12)]
    assert all(joined(found[i]) == joined(items[i]) for i in range(0, 12, 3))


@pytest.mark.parametrize("stored", [1, 2999, 3001, 100_000, 3 << 20])
def test_another_length_is_corrupt_and_writes_nothing(
    case: NodeCase, node: DataNode, stored: int
) -> None:
    right = put_items(3, [1000, 2000], b"length")
    wrong = PutItem(right[1].key, [memoryview(bytes(stored))])
    node.put([right[0], wrong, right[2]], TTL_MS, case.soon())
    guard = b"\xee" * 3000
    memory = memoryview(bytearray(guard))
    found = get_items(right)
    found[1] = GetItem(wrong.key, [memory[:1000], memory[1000:]])
    assert node.get(found, case.soon()) == [OK, CORRUPT, OK]
    assert bytes(memory) == guard
    assert joined(found[2]) == joined(right[2])


def test_empty_calls(case: NodeCase, node: DataNode) -> None:
    assert node.put([], TTL_MS, case.soon()) == []
    assert node.get([], case.soon()) == []
    assert node.delete([], case.soon()) == 0
    assert node.exists([], case.soon()) == []
    assert node.persist([], case.soon()) == []


def test_delete_and_exists(case: NodeCase, node: DataNode) -> None:
    items = put_items(700, [64], b"delete")
    keys = [item.key for item in items]
    node.put(items, TTL_MS, case.soon())
    assert node.exists(keys, case.soon()) == [True] * 700
    assert node.delete(keys[:600], case.soon()) == 600
    assert node.delete(keys[:600], case.soon()) == 0
    assert node.exists(keys, case.soon()) == [False] * 600 + [True] * 100


def test_unpersisted_objects_expire(case: NodeCase, node: DataNode) -> None:
    items = put_items(3, [112], b"expire")
    keys = [item.key for item in items]
    node.put(items, 300, case.soon())
    assert node.persist([keys[1], b"expire:none"], case.soon()) == [True, False]
    eventually(lambda: not node.exists([keys[0]], case.soon())[0], what="the object to expire")
    eventually(lambda: not node.exists([keys[2]], case.soon())[0], what="the object to expire")
    assert node.get(get_items(items), case.soon()) == [MISSING, OK, MISSING]


def test_persist_again_says_the_same(case: NodeCase, node: DataNode) -> None:
    items = put_items(600, [16], b"persist")
    keys = [item.key for item in items]
    node.put(items, TTL_MS, case.soon())
    assert node.persist(keys, case.soon()) == [True] * 600
    assert node.persist(keys, case.soon()) == [True] * 600
    node.delete(keys, case.soon())
    assert node.persist(keys, case.soon()) == [False] * 600


def test_passed_deadline(case: NodeCase, node: DataNode) -> None:
    items = put_items(3, [112], b"late")
    node.ready(case.soon())
    for deadline in (case.past(), case.clock.now()):
        found = get_items(items)
        assert node.put(items, TTL_MS, deadline) == [TIMED_OUT] * 3
        assert node.get(found, deadline) == [TIMED_OUT] * 3
        with pytest.raises(StoreTimeout):
            node.exists([items[0].key], deadline)
    assert node.put(items, TTL_MS, case.soon()) == [OK] * 3  # and it goes on


def test_incarnation_is_one_for_all_and_changes_with_the_data(case: NodeCase) -> None:
    first, second = case.connect(), case.connect()
    one = first.incarnation(case.soon())
    assert len(one) == 8
    assert second.incarnation(case.soon()) == first.ready(case.soon()) == one
    case.restart()
    other = eventually(lambda: _incarnation_or_none(first, case), what="a new connection")
    assert len(other) == 8 and other != one
    assert first.ready(case.soon()) == other
    assert second.ready(case.soon()) == other


def _incarnation_or_none(node: DataNode, case: NodeCase) -> bytes | None:
    try:
        return node.incarnation(case.soon())
    except StoreError:
        return None


def test_charge_covers_the_object(case: NodeCase, node: DataNode) -> None:
    before = node.exists([b"any"], case.soon())
    for size in (1000, 65_648, 1_048_688):
        charged = node.charge(size, case.soon())
        assert size < charged < 1.5 * size + 400
        assert node.charge(size, case.soon()) == charged
    assert node.exists([b"any"], case.soon()) == before


def test_capacity_is_a_share_or_what_is_configured(case: NodeCase) -> None:
    half, whole = (case.connect(capacity_share=share) for share in (0.5, 1.0))
    assert whole.capacity(case.soon()) == pytest.approx(2 * half.capacity(case.soon()), abs=2)
    assert case.connect(capacity_bytes=12345).capacity(case.soon()) == 12345


def test_close_then_the_next_call_connects_again(case: NodeCase, node: DataNode) -> None:
    [item] = put_items(1, [112], b"close")
    node.put([item], TTL_MS, case.soon())
    node.close()
    node.close()
    assert eventually(lambda: node.exists([item.key], case.soon())) == [True]


def test_two_connections_see_each_other(case: NodeCase, node: DataNode) -> None:
    items = put_items(5, [112, 77], b"both")
    node.put(items, TTL_MS, case.soon())
    found = get_items(items)
    assert case.connect().get(found, case.soon()) == [OK] * 5
    assert [joined(item) for item in found] == [joined(item) for item in items]


@pytest.mark.parametrize("seed", range(3))
def test_random_calls_against_a_dict(case: NodeCase, node: DataNode, seed: int) -> None:
    chance, model = random.Random(seed), {}
    keys = [b"random%d:%d" % (seed, i) for i in range(12)]
    for _ in range(60):
        some = chance.sample(keys, chance.randint(1, 6))
        what = chance.choice(["put", "put", "get", "get", "delete", "exists"])
        if what == "put":
            items = [
                PutItem(key, [memoryview(chance.randbytes(n)) for n in (112, chance.randint(0, 9))])
                for key in some
            ]
            put = node.put(items, TTL_MS, case.soon())
            assert put == [OK] * len(items), (put, node.drain_counters())
            model.update((item.key, joined(item)) for item in items)
        elif what == "get":
            found = [GetItem(k, [memoryview(bytearray(117))]) for k in some]
            for item, outcome in zip(found, node.get(found, case.soon()), strict=True):
                held = model.get(item.key)
                right = MISSING if held is None else OK if len(held) == 117 else CORRUPT
                assert outcome is right, (seed, item.key)
                assert outcome is not OK or joined(item) == held
        elif what == "delete":
            there = sum(key in model for key in some)
            assert node.delete(some, case.soon()) == there
            for key in some:
                model.pop(key, None)
        else:
            assert node.exists(some, case.soon()) == [key in model for key in some]
