"""An engine in a process of our own, as its parent sees it.

The process gets its config on stdin, and ends when stdin is closed: so it never outlives its
parent, whatever happens to that. Owned by one asyncio event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from engine_shim.config import EngineConfig

STOP_TIMEOUT_S = 15.0
LAST_LINES = 20
LINE_BYTES_MAX = 1 << 20


class EngineProcess:
    """See the module."""

    def __init__(self, process: asyncio.subprocess.Process, folder: str) -> None:
        """Use `start`."""
        self._process = process
        self._folder = folder
        self._last = deque[str](maxlen=LAST_LINES)
        self._listeners: list[Callable[[str], None]] = []
        self._words: str | None = None
        self.address = address_in(folder)
        self.ended: asyncio.Task[str] = asyncio.ensure_future(self._run())
        """Done when the process has ended, with its last words."""

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @classmethod
    async def start(cls, config: EngineConfig) -> EngineProcess:
        """Start it; it is not ready yet when this returns."""
        # Short on purpose: a socket's path may have 107 bytes.
        folder = tempfile.mkdtemp(prefix="skv-")
        environment = dict(os.environ)
        if config.cpu_threads:
            environment.setdefault("OMP_NUM_THREADS", str(config.cpu_threads))
        here = str(Path(__file__).resolve().parent.parent)
        paths = [here, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "engine_shim.engine_proc",
            address_in(folder),
            stdin=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
            limit=LINE_BYTES_MAX,
            process_group=0,  # a terminal's interrupt is for the front end alone
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(config) + b"\n")
        with contextlib.suppress(ConnectionError):
            await process.stdin.drain()
        return cls(process, folder)

    def on_end(self, listener: Callable[[str], None]) -> None:
        """Call this, once, with the last words, when the process has ended."""
        if self._words is not None:
            listener(self._words)
        self._listeners.append(listener)

    async def _run(self) -> str:
        """Pass its stderr on to ours, line by line, until it ends."""
        assert self._process.stderr is not None
        with contextlib.suppress(ValueError):
            async for line in self._process.stderr:
                text = line.decode("utf-8", "replace")
                self._last.append(text)
                sys.stderr.write(text)
        code = await self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
        words = f"exit code {code}; {''.join(self._last).strip() or 'it said nothing'}"
        self._words = f"the engine process ended: {words}"
        for listener in self._listeners:
            listener(self._words)
        return words

    async def stop(self) -> None:
        """Close its stdin, and kill it if it has not ended after STOP_TIMEOUT_S."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        done, _ = await asyncio.wait([self.ended], timeout=STOP_TIMEOUT_S)
        if not done:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self.ended


def address_in(folder: str) -> str:
    """Address of the engine whose folder that is."""
    return f"ipc://{folder}/engine.sock"
