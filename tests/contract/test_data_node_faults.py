"""What the bulk path does when the server, or what is between, fails in mid-sentence."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time

import pytest

from connector.clock import SystemClock
from connector.errors import StoreError, StoreFull, StoreTimeout, StoreUnavailable
from connector.meta import BlockOutcome
from store_worker.backends.base import DataNode, GetItem
from store_worker.backends.breaker import FIRST_PAUSE_S
from store_worker.backends.factory import node_breaker, open_node
from tests.contract.data_node_kit import (
    TTL_MS,
    connector_to,
    get_items,
    joined,
    node_config,
    put_items,
)
from tests.contract.scripted_server import ScriptedServer
from tests.servers import Server
from tests.waiting import eventually

OK, MISSING, CORRUPT = BlockOutcome.OK, BlockOutcome.MISSING, BlockOutcome.CORRUPT
FAILED, TIMED_OUT = BlockOutcome.FAILED, BlockOutcome.TIMED_OUT
CLOCK = SystemClock()


def soon(seconds: float = 20.0) -> float:
    return CLOCK.now() + seconds


def fresh(size: int = 1000, count: int = 1) -> list[GetItem]:
    return [GetItem(b"k%d" % i, [memoryview(bytearray(size))]) for i in range(count)]


def bulk(data: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(data), data)


def test_no_late_byte_after_a_deadline() -> None:
    """Half a value, then silence; the rest comes after the call has returned."""
    returned, sent = threading.Event(), threading.Event()

    def half(conn: socket.socket, args: list[bytes]) -> bool:
        conn.sendall(b"$1000\r\n" + b"a" * 400)
        returned.wait(20)
        with contextlib.suppress(OSError):
            conn.sendall(b"b" * 600 + b"\r\n")
        sent.set()
        return False

    with ScriptedServer(half) as server:
        node = connector_to(server.url, CLOCK)()
        node.ready(soon())
        [item] = fresh()
        assert node.get([item], soon(0.2)) == [TIMED_OUT]
        before = joined(item)
        returned.set()
        assert sent.wait(20)
        assert joined(item) == before
        assert b"b" not in before


def test_blocks_before_a_broken_connection_count() -> None:
    asked = []

    def two_then_gone(conn: socket.socket, args: list[bytes]) -> bool:
        asked.append(args)
        if len(asked) <= 2:
            conn.sendall(bulk(b"%d" % len(asked) * 1000))
            return True
        conn.sendall(b"$1000\r\nxxx")
        return False

    with ScriptedServer(two_then_gone) as server:
        node = connector_to(server.url, CLOCK)()
        items = fresh(count=5)
        assert node.get(items, soon()) == [OK, OK, FAILED, FAILED, FAILED]
        assert [joined(item)[:1] for item in items[:2]] == [b"1", b"2"]
        assert node.drain_counters()["connections_dropped{why=StoreUnavailable}"] == 1


def test_answers_before_a_connection_that_broke_while_sending_count() -> None:
    asked = []

    def two_then_gone(conn: socket.socket, args: list[bytes]) -> bool:
        asked.append(args[1])
        conn.sendall(b"+OK\r\n")
        return len(asked) < 2

    with ScriptedServer(two_then_gone) as server:
        node = connector_to(server.url, CLOCK)()
        items = put_items(20, [1 << 20])
        assert node.put(items, TTL_MS, soon()) == [OK] * 2 + [FAILED] * 18
        assert asked == [item.key for item in items[:2]]


@pytest.mark.parametrize(
    "noise",
    [b"?\r\n", b":5\r\n", b"*1\r\n$2\r\nab\r\n", b"$abc\r\n", b"$99999999999\r\n", b"+OK\r\n",
     b"x" * 2000, b"$1000\r\n" + b"y" * 1003, b"$-1\r", b"\r\n"],
)
def test_noise_is_a_failure_and_ends_the_connection(noise: bytes) -> None:
    def answer(conn: socket.socket, args: list[bytes]) -> bool:
        conn.sendall(noise)
        return noise != b"$-1\r"

    with ScriptedServer(answer) as server:
        node = connector_to(server.url, CLOCK)()
        items = fresh(count=2)
        assert node.get(items, soon(5)) == [FAILED, FAILED]
        assert node.get(fresh(), soon(5)) == [FAILED]
        assert server.accepted == 2, "it did not connect again"


@pytest.mark.parametrize("seed", range(8))
def test_any_fragments(seed: int) -> None:
    """Replies cut at random places, lengths and errors mixed."""
    chance = random.Random(seed)
    sizes = [chance.choice([1, 5, 500, 520, 3000, 70_000]) for _ in range(30)]
    kinds = [chance.choice("vvvnel") for _ in sizes]
    wire = {
        "v": lambda i: bulk(bytes([i + 1]) * sizes[i]),
        "n": lambda i: b"$-1\r\n",
        "e": lambda i: b"-ERR no\r\n",
        "l": lambda i: bulk(b"z" * (sizes[i] + chance.choice([-1, 1, 9000]))),
    }
    stream = b"".join(wire[kind](i) for i, kind in enumerate(kinds))
    asked = []

    def answer(conn: socket.socket, args: list[bytes]) -> bool:
        asked.append(args)
        if len(asked) < len(sizes):
            return True
        at = 0
        while at < len(stream):
            count = chance.choice([1, 2, 7, 300, 5000])
            conn.sendall(stream[at : at + count])
            at += count
        return True

    with ScriptedServer(answer) as server:
        node = connector_to(server.url, CLOCK)()
        items = [
            GetItem(b"k", [memoryview(bytearray(n)) for n in (size // 3, size - size // 3)])
            for size in sizes
        ]
        right = {"v": OK, "n": MISSING, "e": FAILED, "l": CORRUPT}
        assert node.get(items, soon()) == [right[kind] for kind in kinds], f"seed {seed}"
        for i, kind in enumerate(kinds):
            assert joined(items[i]) == (bytes([i + 1]) if kind == "v" else b"\0") * sizes[i]


def test_a_trickle_does_not_outlive_the_deadline() -> None:
    def drip(conn: socket.socket, args: list[bytes]) -> bool:
        conn.sendall(b"$1000000\r\n")
        while not server.ended.wait(0.002):
            conn.sendall(b"z")
        return False

    with ScriptedServer(drip) as server:
        node = connector_to(server.url, CLOCK)()
        node.ready(soon())
        began = time.monotonic()
        assert node.get(fresh(1_000_000), soon(0.3)) == [TIMED_OUT]
        assert time.monotonic() - began < 5


def test_a_server_that_accepts_and_never_answers() -> None:
    """It costs one connect timeout, then everybody is told at once until the next probe."""
    with ScriptedServer(None) as server:
        config = node_config(server.url, connect_timeout_s=0.2)
        breaker = node_breaker(server.url, config, CLOCK)
        first, second = (open_node(server.url, config, CLOCK, breaker) for _ in range(2))
        with pytest.raises(StoreUnavailable):
            first.get(fresh(), soon())
        accepted = server.accepted
        began = time.monotonic()
        for node in (first, second, first):
            with pytest.raises(StoreUnavailable, match="away"):
                node.get(fresh(), soon())
        assert time.monotonic() - began < FIRST_PAUSE_S
        assert server.accepted == accepted


def test_a_stopped_server_costs_no_more_than_the_deadline() -> None:
    with Server() as server:
        node = connector_to(server.url, CLOCK)(connect_timeout_s=0.3)
        items = put_items(4, [112, 100_000])
        node.put(items, TTL_MS, soon())
        server.pause()
        found = get_items(items)
        assert node.get(found, soon(0.3)) == [TIMED_OUT] * 4
        with pytest.raises(StoreError):
            node.put(items, TTL_MS, soon(10))
        server.resume()
        eventually(lambda: _get(node, found) == [OK] * 4, what="the node to be used again")
        assert [joined(i) for i in found] == [joined(i) for i in items]


def _get(node: DataNode, items: list[GetItem]) -> list[BlockOutcome]:
    try:
        return node.get(items, soon())
    except StoreError:
        return []


def test_put_to_a_stopped_server_stops_at_the_deadline() -> None:
    """More than the socket's buffers hold, so that sending itself is what blocks."""
    with Server() as server:
        node = connector_to(server.url, CLOCK)()
        node.ready(soon())
        server.pause()
        assert node.put(put_items(6, [2 << 20]), TTL_MS, soon(0.3)) == [TIMED_OUT] * 6
        server.resume()


def test_a_server_killed_in_mid_transfer() -> None:
    """Whatever moment it hits, each item ends, and what is OK has the right bytes."""
    with Server() as server:
        node = connector_to(server.url, CLOCK)()
        items = put_items(40, [112, 1 << 20])
        assert node.put(items, TTL_MS, soon()) == [OK] * 40
        found = get_items(items)
        # The kill comes from inside, when the fifth object has landed.
        outcomes = node.get(found, soon(), lambda i: server.kill() if i == 4 else None)
        assert outcomes[:5] == [OK] * 5 and outcomes[-1] is FAILED
        assert set(outcomes) == {OK, FAILED}
        for item, want, outcome in zip(found, items, outcomes, strict=True):
            assert outcome is not OK or joined(item) == joined(want)
        with pytest.raises(StoreUnavailable):
            node.get(found, soon())
        server.start()
        eventually(lambda: _get(node, found) == [MISSING] * 40, what="the empty server's answer")


def test_full_server() -> None:
    with Server(memory="8mb") as server:
        node = connector_to(server.url, CLOCK)()
        items = put_items(20, [112, 1 << 20])
        outcomes = node.put(items, TTL_MS, soon())
        stored = outcomes.count(OK)
        assert 1 <= stored < 20 and outcomes == [OK] * stored + [FAILED] * (20 - stored)
        counters = node.drain_counters()
        assert counters["store_full"] == counters["server_errors{kind=OOM}"] == 20 - stored
        found = get_items(items[:stored])
        assert node.get(found, soon()) == [OK] * stored
        assert node.charge(3 << 20, soon()) > 3 << 20  # an estimate, where asking is refused
        assert node.delete([item.key for item in items], soon()) == stored


def test_a_server_too_full_for_its_first_key() -> None:
    with Server(memory="1") as server, pytest.raises(StoreUnavailable, match="no room"):
        connector_to(server.url, CLOCK)().ready(soon())


def test_wrong_type_is_corrupt() -> None:
    with Server() as server, server.client() as client:
        client.rpush("k0", "a")
        assert connector_to(server.url, CLOCK)().get(fresh(), soon()) == [CORRUPT]


def test_capacity_rules() -> None:
    with Server(memory="100mb") as server, server.client() as client:
        node = connector_to(server.url, CLOCK)()
        assert node.capacity(soon()) == int((100 << 20) * 0.9)
        client.config_set("maxmemory-policy", "allkeys-lru")
        assert node.capacity(soon()) == 0
        client.config_set("maxmemory", 0)
        total = int(client.info("memory")["total_system_memory"])
        assert node.capacity(soon()) == int(total // 2 * 0.9)


def test_a_password_is_used_and_never_shown() -> None:
    with Server(tcp=True) as server, server.client() as client:
        client.config_set("requirepass", "hunter2")
        right = server.tcp_url.replace("redis://", "redis://:hunter2@")
        assert len(connector_to(right, CLOCK)().ready(soon())) == 8
        for wrong in (server.tcp_url, server.tcp_url.replace("redis://", "redis://:hunter3@")):
            with pytest.raises(StoreUnavailable) as raised:
                connector_to(wrong, CLOCK)().ready(soon())
            assert "hunter" not in str(raised.value)


def test_a_read_only_user_is_named() -> None:
    with Server() as server, server.client() as client:
        client.execute_command("ACL", "SETUSER", "default", "-@write")
        with pytest.raises(StoreUnavailable, match="refuses writes"):
            connector_to(server.url, CLOCK)().ready(soon())


def test_a_refused_delete_is_not_taken_for_done() -> None:
    with Server() as server, server.client() as client:
        node = connector_to(server.url, CLOCK)()
        items = put_items(3, [112])
        node.put(items, TTL_MS, soon())
        client.execute_command("ACL", "SETUSER", "default", "-unlink")
        with pytest.raises(StoreUnavailable, match="refuses UNLINK"):
            node.delete([item.key for item in items], soon())
        assert node.get(get_items(items), soon()) == [OK] * 3


def test_close_from_another_thread_breaks_a_stuck_call() -> None:
    stuck = threading.Event()

    def silent(conn: socket.socket, args: list[bytes]) -> bool:
        stuck.set()
        server.ended.wait(30)
        return False

    with ScriptedServer(silent) as server:
        node = connector_to(server.url, CLOCK)()
        found: list[list[BlockOutcome]] = []
        thread = threading.Thread(target=lambda: found.append(node.get(fresh(), soon(60))))
        thread.start()
        assert stuck.wait(20)
        node.close()
        thread.join(20)
        assert found == [[FAILED]]


def test_an_idle_connection_that_the_server_closed_is_no_failure() -> None:
    with Server() as server, server.client() as client:
        node = connector_to(server.url, CLOCK)()
        items = put_items(2, [112])
        node.put(items, TTL_MS, soon())
        client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        assert node.get(get_items(items), soon()) == [OK, OK]
        assert node.drain_counters()["connects"] == 2


def test_unsolicited_bytes_end_a_connection() -> None:
    def chatty(conn: socket.socket, args: list[bytes]) -> bool:
        conn.sendall(bulk(b"1" * 1000) + bulk(b"2" * 1000))
        return True

    with ScriptedServer(chatty) as server:
        node = connector_to(server.url, CLOCK)()
        for _ in range(3):
            [item] = fresh()
            assert node.get([item], soon()) == [OK]
            assert joined(item) == b"1" * 1000
        assert server.accepted == 3


def test_too_little_time_to_connect_is_a_timeout_not_an_outage() -> None:
    with Server() as server:
        node = connector_to(server.url, CLOCK)()
        with pytest.raises(StoreTimeout):
            node.ready(CLOCK.now() - 0.001)
        assert len(node.ready(soon())) == 8


def test_store_full_is_a_store_error() -> None:
    assert issubclass(StoreFull, StoreError)
