"""A shim engine with its front ends, or a proxy, as a process of its own, for tests."""

from __future__ import annotations

import contextlib
import ctypes
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from threading import Timer
from typing import Any, Self

import httpx

START_DEADLINE_S = 60.0
STOP_DEADLINE_S = 15.0
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
# A model that takes a second to start and a millisecond per token.
SMALL = '{"num_layers": 2, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}'


class CommandServer:
    """`session-kv COMMAND`, a server on free ports. A context manager.

    url: of the HTTP front end. grpc: host:port, if --grpc-port was among the flags.
    """

    def __init__(self, *arguments: str) -> None:
        self._arguments = arguments
        self._process: subprocess.Popen[str] | None = None
        self._words = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the object
        self.url = self.grpc = ""
        # verify=False: reading the machine's certificates takes longer than a request.
        self.http = httpx.Client(timeout=60, trust_env=False, verify=False)

    def launch(self) -> Self:
        """Begin to start; `ready` waits for it."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "engine_shim.cli", *self._arguments, "--json"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._words,
            text=True,
            preexec_fn=_die_with_parent,
        )
        return self

    def ready(self) -> Self:
        """Returns when it serves."""
        assert self._process is not None and self._process.stdout is not None
        late = Timer(START_DEADLINE_S, self._process.kill)
        late.start()
        try:
            for line in self._process.stdout:
                if line.startswith("{"):
                    self.url, *others = json.loads(line)["serving_on"]
                    self.grpc = "".join(others).removeprefix("grpc://")
                    return self
        finally:
            late.cancel()
        self.stop()
        raise RuntimeError(f"it ended at its start:\n{self.log()}")

    def start(self) -> Self:
        """Returns when it serves."""
        return self.launch().ready()

    def log(self) -> str:
        """What it wrote to standard error."""
        self._words.seek(0)
        return self._words.read()

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._process is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        assert self._process is not None
        return self._process.poll()

    def post(self, path: str, body: Any, **headers: str) -> Any:
        """JSON of a good reply."""
        reply = self.http.post(self.url + path, json=body, headers=headers)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def metrics(self) -> str:
        """The metrics page."""
        return self.http.get(self.url + "/metrics").text

    def end(self) -> None:
        """SIGTERM; `stop` waits for it."""
        self.http.close()
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def stop(self) -> int:
        """SIGTERM, unless it has ended; the exit code."""
        self.end()
        if self._process is None:
            return 0
        try:
            return self._process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise AssertionError(f"it does not stop:\n{self.log()}") from None

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(STOP_DEADLINE_S)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


@contextlib.contextmanager
def together(*servers: CommandServer) -> Iterator[None]:
    """All of them at once: they start, and end, side by side."""
    try:
        for server in servers:
            server.launch()
        for server in servers:
            server.ready()
        yield
    finally:
        for server in servers:
            server.end()
        for server in servers:
            server.stop()


class ShimServer(CommandServer):
    """`session-kv serve`, with a small model."""

    def __init__(self, *flags: str, model: str = SMALL) -> None:
        super().__init__("serve", "--port", "0", "--model", model, *flags)


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
