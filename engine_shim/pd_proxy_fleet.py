"""The proxy's engines: which are up, which one a session goes to. Event-loop thread only."""

from __future__ import annotations

import asyncio
import enum
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import httpx
import msgspec

HEALTH_TIMEOUT_S = 2.0


class Role(enum.StrEnum):
    """What an engine does for the proxy."""

    PREFILL = "prefill"
    DECODE = "decode"


class Limits(msgspec.Struct, frozen=True):
    """in_flight_max: requests at one engine. spare: how many more than twice the least loaded
    engine's requests an engine may have before its sessions go elsewhere. sessions_max: sessions
    whose engine is remembered."""

    in_flight_max: int = 256
    spare: int = 4
    sessions_max: int = 65_536


@dataclass
class Engine:
    """One engine. name: prefill-0, decode-1, ...; what clients and metrics see of it."""

    name: str
    url: str
    role: Role
    healthy: bool = True
    in_flight: int = 0
    namespace: str | None = None


def engines_of(role: Role, urls: Sequence[str]) -> list[Engine]:
    """Engines in the order of their URLs."""
    return [Engine(f"{role}-{i}", url.rstrip("/"), role) for i, url in enumerate(urls)]


def choose(
    engines: Sequence[Engine], preferred: str | None, tried: Collection[str], limits: Limits
) -> Engine | None:
    """The engine to take, or None if each was tried or is full.

    preferred: the name of the session's last engine: taken if it is up and not over-loaded, else
    the least loaded one. With none up any that was not tried, as what is known may be old.
    """
    left = [e for e in engines if e.name not in tried and e.in_flight < limits.in_flight_max]
    usable = [e for e in left if e.healthy] or left
    if not usable:
        return None
    least = min(usable, key=lambda engine: engine.in_flight)
    kept = next((engine for engine in usable if engine.name == preferred), None)
    if kept is not None and kept.in_flight <= 2 * least.in_flight + limits.spare:
        return kept
    return least


@dataclass
class Affinity:
    """Session -> name of the engine that last had it; the least recent are forgotten."""

    sessions_max: int
    _last: OrderedDict[str, str] = field(default_factory=OrderedDict)

    def get(self, session_id: str | None) -> str | None:
        """The session's engine."""
        return self._last.get(session_id) if session_id is not None else None

    def put(self, session_id: str | None, name: str) -> None:
        """The session was served there."""
        if session_id is None:
            return
        self._last[session_id] = name
        self._last.move_to_end(session_id)
        while len(self._last) > self.sessions_max:
            self._last.popitem(last=False)

    def drop(self, session_id: str) -> None:
        """The session is over."""
        self._last.pop(session_id, None)


class Fleet:
    """All engines and where sessions are."""

    def __init__(
        self, prefill: Sequence[str], decode: Sequence[str], limits: Limits | None = None
    ) -> None:
        self.limits = limits or Limits()
        self.engines = {
            Role.PREFILL: engines_of(Role.PREFILL, prefill),
            Role.DECODE: engines_of(Role.DECODE, decode),
        }
        self.affinity = {role: Affinity(self.limits.sessions_max) for role in Role}

    @property
    def all(self) -> list[Engine]:
        """Every engine, prefill first."""
        return [engine for role in Role for engine in self.engines[role]]

    def choose(
        self, role: Role, session_id: str | None, tried: Collection[str] = ()
    ) -> Engine | None:
        """See `choose`."""
        preferred = self.affinity[role].get(session_id)
        return choose(self.engines[role], preferred, tried, self.limits)

    async def check_health(self, http: httpx.AsyncClient) -> None:
        """Ask every engine once."""
        await asyncio.gather(*(self._check(engine, http) for engine in self.all))

    async def _check(self, engine: Engine, http: httpx.AsyncClient) -> None:
        try:
            reply = await http.get(f"{engine.url}/health", timeout=HEALTH_TIMEOUT_S)
            engine.healthy = reply.status_code == 200
        except httpx.HTTPError:
            engine.healthy = False

    async def watch(self, http: httpx.AsyncClient, interval_s: float) -> None:
        """Ask again and again, until cancelled."""
        while True:
            await self.check_health(http)
            await asyncio.sleep(interval_s)
