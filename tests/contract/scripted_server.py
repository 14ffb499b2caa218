"""A server that speaks Redis' protocol as badly as a test wants it to."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

JOIN_S = 10.0

# Answers a command on its connection; False ends the connection.
Answer = Callable[[socket.socket, list[bytes]], bool]


def greet(conn: socket.socket, args: list[bytes]) -> bool | None:
    """The usual first words of a connection; None if the command is none of them."""
    if args[0] == b"CLIENT":
        conn.sendall(b"+OK\r\n")
    elif args[:2] == [b"GET", b"{skv-node}:incarnation"]:
        conn.sendall(b"$8\r\nscripted\r\n")
    else:
        return None
    return True


class ScriptedServer:
    """Accepts on a unix socket; each command goes to `answer` after the usual greeting.

    answer None: accepts, and then neither reads nor writes. Use as a context manager.
    """

    def __init__(self, answer: Answer | None, tls: ssl.SSLContext | None = None) -> None:
        self._answer, self._tls = answer, tls
        self._folder = Path(tempfile.mkdtemp(prefix="skv-"))
        self.accepted = 0
        self.ended = threading.Event()  # when the test lets go of everything
        self._conns: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX if tls is None else socket.AF_INET)
        if tls is None:
            self._listener.bind(str(self._folder / "s"))
        else:
            self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(16)
        self._threads = [threading.Thread(target=self._accept, daemon=True)]

    @property
    def url(self) -> str:
        if self._tls is None:
            return f"unix://{self._folder / 's'}"
        return f"rediss://127.0.0.1:{self._listener.getsockname()[1]}"

    def _accept(self) -> None:
        while True:
            try:
                conn, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            self._conns.append(conn)
            if self._answer is not None:
                thread = threading.Thread(target=self._serve, args=(conn,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, conn: socket.socket) -> None:
        # An end by the client in mid-sentence is what these tests are about.
        with contextlib.suppress(OSError, EOFError):
            if self._tls is not None:
                conn = self._tls.wrap_socket(conn, server_side=True)
                self._conns.append(conn)
            stream = conn.makefile("rb")
            going = True
            while going:
                args = read_command(stream)
                greeted = greet(conn, args)
                assert self._answer is not None
                going = self._answer(conn, args) if greeted is None else greeted
        with contextlib.suppress(OSError):
            conn.shutdown(socket.SHUT_RDWR)
        conn.close()

    def __enter__(self) -> ScriptedServer:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        for sock in (self._listener, *self._conns):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join(JOIN_S)
            assert not thread.is_alive()
        shutil.rmtree(self._folder, ignore_errors=True)


def read_command(stream: BinaryIO) -> list[bytes]:
    """One request. Raises EOFError at the end of the stream."""
    line = stream.readline()
    if not line:
        raise EOFError
    args = []
    for _ in range(int(line[1:])):
        size = int(stream.readline()[1:])
        args.append(stream.read(size))
        stream.read(2)
    return args
