"""Engines and proxies as processes of their own, and what their pages say. asyncio only."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import re
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import IO, Any

import httpx

from connector.clock import Clock, SystemClock
from engine_shim.errors import EngineDead, EngineTimeout

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
QUIET_TIMEOUT_S = 10.0
LOOK_AGAIN_S = 0.01
LAST_WORDS = 2000
ADDRESS = re.compile(r"serving on (?P<url>\S+)")
SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:]+)(?P<labels>\{[^}]*\})? (?P<value>\S+)$")
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


class Process:
    """One `session-kv serve` or `proxy`. url: its address."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, url: str) -> None:
        self.name, self.url = name, url
        self._process = process

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL if that is not enough."""
        if self._process.returncode is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def kill(self) -> None:
        """At once, as a crash would."""
        self._process.kill()
        await self._process.wait()


@contextlib.asynccontextmanager
async def started(name: str, arguments: Sequence[str]) -> AsyncIterator[Process]:
    """`session-kv ARGUMENTS` once it serves; stopped at the end.

    Raises EngineDead, with its last words, or EngineTimeout.
    """
    with tempfile.TemporaryFile("w+b") as words:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "engine_shim.cli", *arguments,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=words,
            preexec_fn=_die_with_parent,
        )  # fmt: skip
        made = Process(name, process, "")
        try:
            made.url = await _address(name, process, words)
            yield made
        finally:
            await made.stop()


async def _address(name: str, process: asyncio.subprocess.Process, words: IO[bytes]) -> str:
    """The URL in the line that says that it serves. Raises EngineDead, EngineTimeout."""
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            found = await _first_address(process)
    except TimeoutError as error:
        raise EngineTimeout(f"{name} did not serve within {START_TIMEOUT_S:g} s") from error
    if found is None:
        words.seek(0)
        said = words.read().decode(errors="replace")[-LAST_WORDS:].strip()
        raise EngineDead(f"{name} ended at its start: {said or 'it said nothing'}")
    return found


async def _first_address(process: asyncio.subprocess.Process) -> str | None:
    assert process.stdout is not None
    while line := await process.stdout.readline():
        if found := ADDRESS.search(line.decode(errors="replace")):
            return found["url"]
    return None


def _die_with_parent() -> None:
    """Runs in the child before its program: when we are killed, it ends, too (Linux)."""
    with contextlib.suppress(AttributeError):
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


async def metrics_of(http: httpx.AsyncClient, url: str) -> dict[str, float]:
    """An engine's metrics, the samples of one name added up."""
    text = (await http.get(f"{url}/metrics")).text
    found: dict[str, float] = {}
    for line in text.splitlines():
        if match := SAMPLE.match(line):
            found[match["name"]] = found.get(match["name"], 0.0) + float(match["value"])
    return found


async def info_of(http: httpx.AsyncClient, url: str) -> dict[str, Any]:
    """An engine's info page."""
    found: dict[str, Any] = (await http.get(f"{url}/session_kv/info")).json()
    return found


async def until_quiet(
    http: httpx.AsyncClient, urls: Sequence[str], clock: Clock | None = None
) -> bool:
    """Until no engine has a transfer open: what was computed is stored. False at the deadline."""
    clock = clock or SystemClock()
    end = clock.now() + QUIET_TIMEOUT_S
    for url in urls:
        while (await metrics_of(http, url)).get("session_kv_open_jobs", 0.0) > 0:
            if clock.now() >= end:
                return False
            await asyncio.sleep(LOOK_AGAIN_S)
    return True


@contextlib.contextmanager
def store_folder() -> Any:
    """A folder for an embedded store of one's own; short, as socket paths are."""
    with tempfile.TemporaryDirectory(prefix="skv-demo-") as folder:
        Path(folder).chmod(0o700)
        yield folder
