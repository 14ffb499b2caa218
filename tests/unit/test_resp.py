"""The protocol on a pair of sockets: values, errors, waiting, and where bytes may go."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from connector.clock import ManualClock, SystemClock
from connector.errors import StoreTimeout, StoreUnavailable
from store_worker.backends.resp import WINDOW_PARTS, RespError, RespLink, command

CLOCK = SystemClock()


class Pair:
    """A link and the server's end of its connection."""

    def __init__(self, clock: SystemClock | ManualClock = CLOCK) -> None:
        ours, self.peer = socket.socketpair()
        self.peer.settimeout(20)
        self.link = RespLink(ours, clock)

    def close(self) -> None:
        self.link.release()
        self.peer.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def soon() -> float:
    return CLOCK.now() + 20


def test_command() -> None:
    assert command("SET", b"a\r\n", 7) == b"*3\r\n$3\r\nSET\r\n$3\r\na\r\n\r\n$1\r\n7\r\n"


@pytest.mark.parametrize(
    ("wire", "value"),
    [
        (b"+OK\r\n", b"OK"),
        (b"+\r\n", b""),
        (b":-42\r\n", -42),
        (b"$5\r\na\r\nbc\r\n", b"a\r\nbc"),
        (b"$0\r\n\r\n", b""),
        (b"$-1\r\n", None),
        (b"*-1\r\n", []),
        (b"*3\r\n:1\r\n*1\r\n$1\r\nx\r\n$-1\r\n", [1, [b"x"], None]),
        (b"$%d\r\n%b\r\n" % (5000, b"y" * 5000), b"y" * 5000),
        (b"-OOM command not allowed\r\n", "OOM command not allowed"),
    ],
)
def test_replies_as_values(pair: Pair, wire: bytes, value: object) -> None:
    pair.peer.sendall(wire + b"+next\r\n")
    assert pair.link.read_reply(soon()) == value
    assert pair.link.read_reply(soon()) == b"next"
    assert pair.link.idle_ok()


def test_errors_have_a_kind(pair: Pair) -> None:
    pair.peer.sendall(b"-LOADING Redis is loading\r\n")
    reply = pair.link.read_reply(soon())
    assert isinstance(reply, RespError) and reply.kind == "LOADING"


@pytest.mark.parametrize("parts", [1, 2, WINDOW_PARTS, WINDOW_PARTS + 1, 3 * WINDOW_PARTS, 2500])
def test_out_and_in_again(pair: Pair, parts: int) -> None:
    """What the one end sends part by part the other receives part by part."""
    sizes = [(i * 7919) % 4000 for i in range(parts)]
    values = [bytes([i % 251]) * size for i, size in enumerate(sizes)]
    total = sum(sizes)
    other = RespLink(pair.peer, CLOCK)
    head = b"$%d\r\n" % total
    sender = threading.Thread(
        target=other.send, args=([head, *map(memoryview, values), b"\r\n+next\r\n"], soon())
    )
    sender.start()
    found = [memoryview(bytearray(size)) for size in sizes]
    assert pair.link.read_into(found, total, soon()) == total
    sender.join(20)
    assert [bytes(part) for part in found] == values
    assert pair.link.read_reply(soon()) == b"next"


def test_a_deadline_counts_also_while_bytes_keep_coming() -> None:
    clock = ManualClock()
    pair = Pair(clock)
    count = 3 * WINDOW_PARTS
    pair.peer.sendall(b"$%d\r\n%b\r\n" % (count * 16, b"z" * count * 16))
    clock.advance(10)
    parts = [memoryview(bytearray(16)) for _ in range(count)]
    with pytest.raises(StoreTimeout):
        pair.link.read_into(parts, count * 16, 5.0)
    assert not any(parts[-1]), "it went on to the end"
    pair.close()


def test_a_deadline_counts_also_while_bytes_keep_going() -> None:
    clock = ManualClock()
    pair = Pair(clock)
    clock.advance(10)
    with pytest.raises(StoreTimeout):
        pair.link.send([b"x" * 16] * (3 * WINDOW_PARTS), 5.0)
    assert len(pair.peer.recv(1 << 20)) == 16 * WINDOW_PARTS
    pair.close()


def test_waiting_ends_at_the_deadline(pair: Pair) -> None:
    with pytest.raises(StoreTimeout):
        pair.link.read_reply(CLOCK.now() + 0.05)
    with pytest.raises(StoreTimeout):
        pair.link.send([bytes(16 << 20)], CLOCK.now() + 0.05)


def test_the_end_of_the_connection(pair: Pair) -> None:
    pair.peer.sendall(b"$10\r\nabc")
    pair.peer.close()
    assert not pair.link.idle_ok()
    with pytest.raises(StoreUnavailable, match="closed"):
        pair.link.read_into([memoryview(bytearray(10))], 10, soon())
    with pytest.raises(StoreUnavailable, match="broke"):
        pair.link.send([b"x"], soon())


def test_idle_means_silent(pair: Pair) -> None:
    assert pair.link.idle_ok()
    pair.peer.sendall(b"+")
    assert not pair.link.idle_ok()


def test_bytes_left_over_are_not_idle(pair: Pair) -> None:
    pair.peer.sendall(b"+OK\r\n+again\r\n")
    assert pair.link.read_reply(soon()) == b"OK"
    assert not pair.link.idle_ok()


def test_close_wakes_a_reader(pair: Pair) -> None:
    errors: list[Exception] = []

    def read() -> None:
        try:
            pair.link.read_reply(soon())
        except StoreUnavailable as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    pair.link.close()
    thread.join(20)
    assert len(errors) == 1 and not pair.link.idle_ok()
    with pytest.raises(StoreUnavailable):
        pair.link.send([b"x"], soon())


@pytest.mark.parametrize("extra", [-1, 1, 5000, 100_000])
def test_a_reply_of_another_length_is_skipped(pair: Pair, extra: int) -> None:
    size = 2000 + extra
    wire = b"$%d\r\n%b\r\n+next\r\n" % (size, b"w" * size)
    sender = threading.Thread(target=pair.peer.sendall, args=(wire,))
    sender.start()
    part = memoryview(bytearray(2000))
    assert pair.link.read_into([part], 2000, soon()) == size
    assert not any(part)
    assert pair.link.read_reply(soon()) == b"next"
    sender.join(20)
