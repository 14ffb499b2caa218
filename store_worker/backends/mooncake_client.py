"""One process's client of a Mooncake cluster, shared by all its threads and nodes.

It holds the current `Life` (the library's client with its threads and memory) and one thread,
`mooncake-janitor`, that makes a life, replaces it when it is broken, keeps the list of segments
fresh and removes what could not be removed at once. Nobody else waits for any of that.

`acquire` and `release` share clients by URL. All methods may be called from any thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from connector.clock import Clock
from connector.errors import StoreError, StoreTimeout, StoreUnavailable
from connector.stats import Stats
from store_worker.backends.mooncake_calls import NO_USE, Asked, Call, Life, Use
from store_worker.backends.mooncake_codes import Meaning, code_name, meaning
from store_worker.backends.mooncake_janitor import Janitor
from store_worker.backends.mooncake_library import (
    Library,
    OpenLibrary,
    address_of,
    open_library,
    register_memory,
)
from store_worker.backends.mooncake_master import Cluster
from store_worker.backends.mooncake_state import Gate, Removals
from store_worker.backends.mooncake_url import MooncakeUrl
from store_worker.executor import Loop

logger = logging.getLogger(__name__)

FAILURES_MAX = 6
"""This many failures in a row with a segment that the master lists: the client may be to blame."""
REGISTER_S = 30.0
STAGING_BYTES_MIN = 32 << 20
MASTER = "master"

T = TypeVar("T")


class MooncakeClient:
    """See the module."""

    def __init__(
        self, url: MooncakeUrl, staging_bytes: int, clock: Clock,
        open_: OpenLibrary = open_library,
    ) -> None:
        self.url, self._clock, self._open = url, clock, open_
        self._staging_bytes = max(url.buffer_bytes or staging_bytes, STAGING_BYTES_MIN)
        self._changed = threading.Condition()  # also the lock of what follows
        self._life: Life | None = None
        self._away = ""  # why the last attempt to make a life failed
        self._stopping = False
        self._lends = False
        self._memory: dict[int, memoryview] = {}  # registered caller's memory, by address
        self._gates: dict[str, Gate] = {}  # one per segment ever used, and the master's
        self._stats = Stats()
        self.cluster = Cluster(url, clock)
        self.removals = Removals(clock)
        self._janitor = Janitor(self)
        self._loop = Loop("mooncake-janitor", self._janitor.run)

    # ---- for nodes -----------------------------------------------------------------------------

    def life(self, deadline: float) -> Life:
        """The current life. Raises StoreUnavailable if there is none and the last attempt to make
        one failed, StoreTimeout if none was made by the deadline."""
        with self._changed:
            while self._life is None:
                if self._stopping or self._away:
                    raise StoreUnavailable(self._away or "the Mooncake client is closed")
                left_s = deadline - self._clock.now()
                if left_s <= 0:
                    raise StoreTimeout("no Mooncake client within the deadline")
                self._changed.wait(left_s)
            return self._life

    def ask(
        self, work: Callable[[Library, Asked], T], deadline: float, life: Life | None = None,
        use: Use = NO_USE,
    ) -> Call[T]:
        """Begin a call. Raises StoreError if it can't be begun; what it would use is given back."""
        life = life or self.life(deadline)
        call = Call(work, self._clock, deadline, use)
        if not life.submit(call):
            call.release()
            raise StoreUnavailable("too many calls to Mooncake are under way")
        return call

    def answer(self, work: Callable[[Library, Asked], T], deadline: float) -> T:
        """The result of a small call. Raises StoreError."""
        gate = self.gate(MASTER)
        call = self.ask(work, gate.enter(deadline))
        if not call.wait():
            gate.failed("no answer")
            raise StoreTimeout("Mooncake's master did not answer within the deadline")
        gate.succeeded()
        return call.result()

    def gate(self, segment: str) -> Gate:
        """Of a segment; of the master: MASTER; of any segment: ""."""
        with self._changed:
            if segment not in self._gates:
                name = "Mooncake's master" if segment == MASTER else f"Mooncake segment {segment}"
                self._gates[segment] = Gate(name, self._clock, closes=bool(segment))
            return self._gates[segment]

    def forget_gates(self) -> None:
        """Of segments that are no more."""
        names = (MASTER, "", *self.cluster.last_seen())
        with self._changed:
            self._gates = {name: gate for name, gate in self._gates.items() if name in names}

    def judge(self, segment: str, codes: Sequence[int]) -> None:
        """What the numbers of one bulk call say about the segment and the master."""
        found = {meaning(code) for code in codes}
        for code in codes:
            if code < 0 and meaning(code) is not Meaning.GONE:
                self.count("server_errors", kind=code_name(code))
        if Meaning.FULL in found:
            self.count("store_full")
        if Meaning.MASTER in found:
            self.gate(MASTER).failed("it does not answer")
        elif Meaning.SEGMENT in found and Meaning.DONE not in found:
            self.gate(segment).failed("transfers fail")
        elif Meaning.DONE in found:
            self.gate(segment).succeeded()
            self.gate(MASTER).succeeded()

    def count(self, name: str, value: int = 1, **label: str) -> None:
        with self._changed:
            self._stats.add(name, value, **label)

    def drain_counters(self) -> dict[str, int]:
        """What happened in this process since the last call, whoever asks first."""
        with self._changed:
            return {name: int(value) for name, value in self._stats.drain().items()}

    # ---- memory --------------------------------------------------------------------------------

    def register(self, memory: memoryview) -> None:
        """Make the caller's memory (a cache) known to the library, for this life and later ones.
        It must stay where it is until the client is released. Again: nothing happens. May take
        seconds where memory is pinned for RDMA. Raises StoreTimeout after 30 s."""
        with self._changed:
            if self._memory.get(address_of(memory)) is not None:
                return
            self._memory[address_of(memory)] = memory
        self._tell(lambda library: self._register(library, memory))

    def lend(self) -> None:
        """Lend `segment_bytes` to the cluster, in this life and later ones."""
        with self._changed:
            lends, self._lends = self._lends, True
        if not lends:
            self._tell(self._mount)

    def _tell(self, work: Callable[[Library], None]) -> None:
        """To the current life, if there is one: the next will know by itself."""
        life = self.current()
        if life is not None:
            deadline = self._clock.now() + REGISTER_S

            def tell(library: Library, _: Asked) -> bool:
                work(library)
                return True

            if not self.ask(tell, deadline, life).wait():
                raise StoreTimeout("Mooncake's client did not answer")

    def in_place(self, part: memoryview) -> bool:
        """May the library read this memory? TCP may read any, RDMA what is registered."""
        if self.url.protocol == "tcp":
            return True
        address = address_of(part)
        with self._changed:
            return any(
                start <= address and address + part.nbytes <= start + memory.nbytes
                for start, memory in self._memory.items()
            )

    def _register(self, library: Library, memory: memoryview) -> None:
        if not register_memory(library, memory):
            with self._changed:
                self._memory.pop(address_of(memory), None)

    def _mount(self, library: Library) -> None:
        if self.url.segment_bytes:
            answer = library.allocate_and_mount_segment(self.url.segment_bytes, self.url.protocol)
            if answer.get("ret") != 0:
                logger.error("Mooncake: a segment could not be mounted: %s", answer)

    # ---- for the janitor -----------------------------------------------------------------------

    def make_life(self) -> None:
        """May take seconds. Raises nothing."""
        try:
            life = self._new_life(self._open(self.url))
        except Exception as error:
            if not isinstance(error, StoreError):
                logger.exception("Mooncake: no client")
            with self._changed:
                self._away = str(error) or type(error).__name__
                self._changed.notify_all()
            self.count("connects_failed")
            return
        with self._changed:
            self._life, self._away = life, ""
            self._stats.add("connects")
            self._changed.notify_all()

    def _new_life(self, library: Library) -> Life:
        life = Life(library, self._staging_bytes, self._clock)
        try:
            register_memory(library, life.arena.view)
            with self._changed:
                memory, lends = list(self._memory.values()), self._lends
            for part in memory:
                self._register(library, part)
            if lends:
                self._mount(library)
        except BaseException:
            life.retire()
            life.stop_threads()
            raise
        return life

    def end_life(self) -> Life | None:
        """Take the current life out of use."""
        with self._changed:
            life, self._life = self._life, None
            if life is not None:
                for gate in self._gates.values():
                    gate.succeeded()
        if life is not None:
            life.retire()
        return life

    def outdated(self, life: Life) -> bool:
        """A segment has been mounted anew under its old name: the library never looks up again
        where a name leads."""
        for name, segment in self.cluster.last_seen().items():
            if life.incarnations.setdefault(name, segment.incarnation) != segment.incarnation:
                return True
        return False

    def blamed(self) -> bool:
        """Transfers fail again and again although the master lists the segment."""
        segments = self.cluster.last_seen()
        with self._changed:
            gates = dict(self._gates)
        return any(
            gate.failures >= FAILURES_MAX
            for name, gate in gates.items()
            if name == MASTER or name in segments
        )

    def now(self) -> float:
        """Clock seconds."""
        return self._clock.now()

    @property
    def lending(self) -> bool:
        """Does this process lend memory to the cluster?"""
        with self._changed:
            return self._lends and self.url.segment_bytes > 0

    def current(self) -> Life | None:
        with self._changed:
            return self._life

    def pause(self, seconds: float) -> bool:
        """Of the janitor; True when the client is closed."""
        with self._changed:
            if not self._stopping:
                self._changed.wait(seconds)
            return self._stopping

    def close(self) -> None:
        """Nobody uses it any more. What is under way ends in the background."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def closed(self, timeout_s: float) -> bool:
        """Wait until everything has ended."""
        return self._loop.join(timeout_s)


# ---- one client per cluster and process ----------------------------------------------------------

_clients: dict[MooncakeUrl, tuple[MooncakeClient, int]] = {}
_clients_lock = threading.Lock()


def acquire(url: MooncakeUrl, staging_bytes: int, clock: Clock) -> MooncakeClient:
    """The process's client of this cluster, made by the first who asks (which takes no time)."""
    with _clients_lock:
        client, users = _clients.get(url) or (MooncakeClient(url, staging_bytes, clock), 0)
        _clients[url] = (client, users + 1)
        return client


def release(client: MooncakeClient) -> None:
    """Once per `acquire`; the last one closes it."""
    with _clients_lock:
        held, users = _clients[client.url]
        assert held is client
        if users > 1:
            _clients[client.url] = (client, users - 1)
            return
        del _clients[client.url]
    client.close()
