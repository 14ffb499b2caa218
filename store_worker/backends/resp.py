"""Redis' protocol (RESP 2) on a connected socket, without copies for the bulk of the bytes.

Requests go out as lists of buffers, replies are received straight into the memory that they are
for. What is read beyond a reply lands in a small buffer here, never in memory of a later reply: a
byte is put into a caller's part only after the length before it was seen and is the expected one.

Everything raises StoreTimeout at its deadline and StoreUnavailable when the connection breaks or
the peer does not keep to the protocol. After either the link is unusable and must be closed.

Thread: one owner; `close` may be called from another thread to break a stuck call.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
from collections.abc import Sequence

from connector.clock import Clock
from connector.errors import StoreTimeout, StoreUnavailable

Buffer = bytes | bytearray | memoryview

AHEAD_BYTES = 512
"""How far reading may go beyond a bulk reply: enough for the next lengths and small replies."""

WINDOW_PARTS = 64
"""Buffers handed to one system call; far below the system's IOV_MAX (1024)."""

LINE_MAX = AHEAD_BYTES - 2
BULK_MAX = 1 << 30
VALUE_MAX = 64 << 20
"""Of a reply that is returned as a value."""
_SCRATCH_BYTES = 64 << 10
_TLS_JOIN_BYTES = 64 << 10


class RespError(str):
    """An error reply, without the leading dash; its first word is the kind."""

    @property
    def kind(self) -> str:
        return self.split(" ", 1)[0]


Reply = RespError | bytes | int | None | list["Reply"]


def command(*args: bytes | str | int) -> bytes:
    """A request whose arguments are all small, as one piece of bytes."""
    out = [b"*%d\r\n" % len(args)]
    for arg in args:
        data = arg if isinstance(arg, bytes) else str(arg).encode()
        out.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(out)


class RespLink:
    """Both directions of one connection."""

    def __init__(self, sock: socket.socket, clock: Clock) -> None:
        """Takes over a connected socket, which nobody else may read from any more."""
        self._sock, self._clock = sock, clock
        self._tls = isinstance(sock, ssl.SSLSocket)
        sock.setblocking(False)
        self._poll = select.poll()
        self._poll.register(sock, 0)
        self._fd = sock.fileno()
        self._ahead = bytearray(AHEAD_BYTES)
        self._ahead_view = memoryview(self._ahead)
        self._low = self._high = 0  # what lies in _ahead and has not been used yet
        self._closed = False

    # ---- state ---------------------------------------------------------------------------------

    def idle_ok(self) -> bool:
        """Between calls: is the peer still there, and silent as it should be?"""
        if self._closed or self._low != self._high:
            return False
        # TLS may have records of its own to tell, so that only the end counts there.
        self._poll.modify(self._fd, select.POLLRDHUP | (0 if self._tls else select.POLLIN))
        return not self._poll.poll(0)

    def close(self) -> None:
        """Wakes a call that waits, which then raises StoreUnavailable. Any thread."""
        self._closed = True
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def release(self) -> None:
        """Close, and give the descriptor back: the owner's last call."""
        self.close()
        with contextlib.suppress(OSError):
            self._sock.close()

    # ---- out -----------------------------------------------------------------------------------

    def send(self, buffers: Sequence[Buffer], deadline: float) -> None:
        """Send all of the buffers in order. When it returns or raises they are not read again."""
        if self._tls:
            self._send_tls(buffers, deadline)
            return
        at, offset = 0, 0
        while at < len(buffers):
            window = list(buffers[at : at + WINDOW_PARTS])
            if offset:
                window[0] = memoryview(window[0])[offset:]
            try:
                count = self._sock.sendmsg(window)
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline)
                continue
            except OSError as error:
                raise self._broken(error) from error
            count += offset
            while at < len(buffers) and count >= len(buffers[at]):
                count -= len(buffers[at])
                at += 1
            offset = count
            self._check(deadline)

    def _send_tls(self, buffers: Sequence[Buffer], deadline: float) -> None:
        joined: list[Buffer] = []
        size = 0
        for buffer in buffers:
            # Each send is a record (or more): small pieces go together.
            joined.append(buffer)
            size += len(buffer)
            if size >= _TLS_JOIN_BYTES:
                self._send_plain(joined[0] if len(joined) == 1 else b"".join(joined), deadline)
                joined, size = [], 0
        self._send_plain(b"".join(joined), deadline)

    def _send_plain(self, data: Buffer, deadline: float) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[self._sock.send(view) :]
                self._check(deadline)
            except (BlockingIOError, ssl.SSLWantWriteError):
                self._wait(select.POLLOUT, deadline)
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN, deadline)
            except OSError as error:
                raise self._broken(error) from error

    # ---- in ------------------------------------------------------------------------------------

    def read_reply(self, deadline: float) -> Reply:
        """One reply of any kind, as a value."""
        line = self._line(deadline)
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            return RespError(rest.decode(errors="replace"))
        if kind == b":":
            return self._number(rest)
        if kind == b"$":
            size = self._number(rest)
            if size < 0:
                return None
            if size > VALUE_MAX:
                raise StoreUnavailable(f"a value of {size} bytes where a small one was expected")
            value = bytearray(size)
            self._receive([memoryview(value)], deadline)
            self._end_of_bulk(deadline)
            return bytes(value)
        if kind == b"*":
            return [self.read_reply(deadline) for _ in range(max(0, self._number(rest)))]
        raise StoreUnavailable(f"not a reply of this protocol: {line[:32]!r}")

    def read_into(
        self, parts: Sequence[memoryview], size: int, deadline: float
    ) -> RespError | int | None:
        """A bulk reply into `parts`, whose bytes add up to `size`.

        Returns its length: if that is not `size` the parts are untouched and the reply was skipped.
        None if there is no value, or the server's error.
        """
        line = self._line(deadline)
        if line[:1] == b"-":
            return RespError(line[1:].decode(errors="replace"))
        if line[:1] != b"$":
            raise StoreUnavailable(f"not a bulk reply: {line[:32]!r}")
        length = self._number(line[1:])
        if length < 0:
            return None
        if length == size:
            self._receive(parts, deadline)
        else:
            self._skip(length, deadline)
        self._end_of_bulk(deadline)
        return length

    def _receive(self, parts: Sequence[memoryview], deadline: float) -> None:
        """Fill all parts; what was read ahead comes first."""
        at, offset = self._use_ahead(parts)
        while at < len(parts):
            window: list[memoryview] = list(parts[at : at + WINDOW_PARTS])
            if offset:
                window[0] = window[0][offset:]
            whole = at + WINDOW_PARTS >= len(parts)
            count = self._receive_some(window, whole, deadline) + offset
            while at < len(parts) and count >= len(parts[at]):
                count -= len(parts[at])
                at += 1
            if at == len(parts):
                self._low, self._high = 0, count
                break
            offset = count
            self._check(deadline)

    def _receive_some(self, window: list[memoryview], whole: bool, deadline: float) -> int:
        """Bytes received into the window and, if that is the `whole` rest, into _ahead."""
        assert self._low == self._high
        while True:
            try:
                if self._tls:
                    count = self._sock.recv_into(window[0])
                elif whole:
                    count = self._sock.recvmsg_into([*window, self._ahead_view])[0]
                else:
                    count = self._sock.recvmsg_into(window)[0]
            except (BlockingIOError, ssl.SSLWantReadError):
                self._wait(select.POLLIN, deadline)
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT, deadline)
            except OSError as error:
                raise self._broken(error) from error
            else:
                if not count:
                    raise StoreUnavailable("the server closed the connection")
                return count

    def _use_ahead(self, parts: Sequence[memoryview]) -> tuple[int, int]:
        """Move what was read ahead into the parts; (part, offset) where receiving goes on."""
        at, offset = 0, 0
        while at < len(parts) and (self._low < self._high or not len(parts[at])):
            part = parts[at]
            count = min(len(part) - offset, self._high - self._low)
            part[offset : offset + count] = self._ahead_view[self._low : self._low + count]
            self._low += count
            offset += count
            if offset == len(part):
                at, offset = at + 1, 0
        return at, offset

    def _skip(self, length: int, deadline: float) -> None:
        scratch = memoryview(bytearray(min(length, _SCRATCH_BYTES)))
        while length:
            count = min(length, len(scratch))
            self._receive([scratch[:count]], deadline)
            length -= count

    def _end_of_bulk(self, deadline: float) -> None:
        while self._high - self._low < 2:
            self._fill(deadline)
        end = self._ahead[self._low : self._low + 2]
        if end != b"\r\n":
            raise StoreUnavailable("a bulk reply is longer than it says")
        self._low += 2

    def _line(self, deadline: float) -> bytes:
        """Up to the next line end, which is taken off."""
        while True:
            end = self._ahead.find(b"\r\n", self._low, self._high)
            if end >= 0:
                line = bytes(self._ahead_view[self._low : end])
                self._low = end + 2
                return line
            if self._high - self._low >= LINE_MAX:
                raise StoreUnavailable("a line without an end")
            self._fill(deadline)

    def _fill(self, deadline: float) -> None:
        """Read at least one byte more into _ahead."""
        kept = self._high - self._low
        self._ahead[:kept] = self._ahead[self._low : self._high]
        self._low = self._high = 0
        self._high = kept + self._receive_some([self._ahead_view[kept:]], False, deadline)

    @staticmethod
    def _number(text: bytes) -> int:
        try:
            number = int(text)
        except ValueError as error:
            raise StoreUnavailable(f"not a number: {text[:32]!r}") from error
        if number > BULK_MAX:
            raise StoreUnavailable(f"a reply of {number} bytes")
        return number

    # ---- waiting -------------------------------------------------------------------------------

    def _check(self, deadline: float) -> float:
        """Seconds left. A peer that keeps sending must not carry us past the deadline either."""
        left_s = deadline - self._clock.now()
        if left_s <= 0:
            raise StoreTimeout("not done within the deadline")
        return left_s

    def _wait(self, event: int, deadline: float) -> None:
        left_s = self._check(deadline)
        if self._closed:
            raise StoreUnavailable("the connection was closed here")
        self._poll.modify(self._fd, event)
        # One millisecond more than is left: the poll counts in whole ones, rounded down.
        self._poll.poll(int(left_s * 1000) + 1)

    def _broken(self, error: OSError) -> StoreUnavailable:
        return StoreUnavailable(f"the connection broke: {error}")
