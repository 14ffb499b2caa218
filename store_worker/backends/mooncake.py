"""A segment of a Mooncake cluster as a data node.

A `mooncake://` URL names a whole cluster; its nodes are the segments that processes have lent to
it, by their names (`host:port`). New objects go to the node's segment as long as there is room,
else to any, and are found by the node wherever they lie: its name is part of their keys. The name
`mooncake:HOST:PORT` (of the master) is the cluster without placement.

What differs from other data nodes: Mooncake evicts by itself (`capacity` is 0 and objects have no
expiry: `ttl_ms` is ignored), and an object that was read or asked for a moment ago can't be removed
before its lease is over: `delete` then removes it later, and this process treats it as gone.

Thread: as in `base`. The library's calls run on other threads, so that none outlives a deadline.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from connector.clock import Clock
from connector.config import Config
from connector.errors import StoreTimeout, StoreUnavailable
from connector.ids import NodeId
from connector.meta import BlockOutcome
from store_worker.backends import mooncake_client as clients
from store_worker.backends import mooncake_ops as ops
from store_worker.backends.base import NO_HINTS, GetItem, Landed, PutHints, PutItem
from store_worker.backends.mooncake_bulk import Mover, get_all, put_all, text_key
from store_worker.backends.mooncake_calls import Call, Use
from store_worker.backends.mooncake_client import MASTER, MooncakeClient
from store_worker.backends.mooncake_codes import Meaning, code_name, meaning
from store_worker.backends.mooncake_library import Library, load, replicate_config
from store_worker.backends.mooncake_url import MooncakeUrl, parse_mooncake_url

KEYS_PER_CALL = 4096
REMOVALS_PER_CALL = 512
LIST_AGE_S = 0.25
UNPLACED = "mooncake:"
KEY_CHARS = len(text_key(bytes(63), "255.255.255.255:65535"))

T = TypeVar("T")


def open_mooncake(url: str, config: Config, clock: Clock, name: NodeId) -> MooncakeNode:
    """A node of a cluster; name: a segment's, or `mooncake:HOST:PORT`. Connects to nothing yet.

    Raises ConfigError for a URL that can't be one, UnsupportedError without the library.
    """
    parsed = parse_mooncake_url(url)
    load()
    return MooncakeNode(parsed, config, clock, "" if name.startswith(UNPLACED) else name)


class MooncakeNode:
    """See the module, `base.DataNode` and `base.HintedNode`."""

    def __init__(self, url: MooncakeUrl, config: Config, clock: Clock, segment: str) -> None:
        """segment: "" for no placement."""
        self._url, self._config, self._clock = url, config, clock
        self.segment = segment
        self._lock = threading.Lock()  # of what follows
        self._held: MooncakeClient | None = None
        self._calls: list[Call] = []  # of the operation under way

    # ---- bulk ----------------------------------------------------------------------------------

    def put(self, items: Sequence[PutItem], ttl_ms: int, deadline: float) -> list[BlockOutcome]:
        return self.put_hinted(items, NO_HINTS, deadline)

    def put_hinted(
        self, items: Sequence[PutItem], hints: PutHints, deadline: float
    ) -> list[BlockOutcome]:
        return self._move(items, deadline, lambda mover: put_all(mover, items, hints))

    def get(
        self, items: Sequence[GetItem], deadline: float, landed: Landed | None = None
    ) -> list[BlockOutcome]:
        return self._move(items, deadline, lambda mover: get_all(mover, items, landed))

    def _move(
        self,
        items: Sequence[PutItem] | Sequence[GetItem],
        deadline: float,
        run: Callable[[Mover], list[BlockOutcome]],
    ) -> list[BlockOutcome]:
        if not items:
            return []
        try:
            self._check(deadline)
            client = self._client()
            return run(Mover(client, self.segment, self._clock, deadline, self._watch))
        except StoreTimeout:
            return [BlockOutcome.TIMED_OUT] * len(items)
        finally:
            with self._lock:
                self._calls = []

    def _watch(self, call: Call) -> None:
        with self._lock:
            closed = self._held is None
            self._calls = [*(one for one in self._calls if not one.ended), call]
        if closed:
            call.abandon()

    @property
    def busy(self) -> bool:
        """Is a call of a put or a get under way? Any thread."""
        with self._lock:
            return any(not call.ended for call in self._calls)

    # ---- the rest ------------------------------------------------------------------------------

    def delete(self, keys: Sequence[bytes], deadline: float) -> int:
        client, removed = self._checked_client(deadline), 0
        for names in self._names(keys, REMOVALS_PER_CALL):
            known = client.removals.held(names)
            asked = [name for name in names if name not in known]
            codes = self._ask(partial(ops.remove, keys=asked), deadline)
            self._raise_for(codes, Meaning.MASTER)
            found = [(name, meaning(code)) for name, code in zip(asked, codes, strict=True)]
            leased = [name for name, what in found if what is Meaning.LEASED]
            removed += sum(what is Meaning.DONE for _, what in found)
            removed += client.removals.add(leased)
            client.count("mooncake_removals_delayed", len(leased))
        return removed

    def exists(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """Also protects what is there from eviction for the length of Mooncake's lease (10 s)."""
        client = self._checked_client(deadline)
        there: list[bool] = []
        for names in self._names(keys, KEYS_PER_CALL):
            gone = client.removals.held(names)
            codes = self._ask(partial(ops.exist, keys=names), deadline)
            self._raise_for(codes, Meaning.MASTER)
            pairs = zip(names, codes, strict=True)
            there += [code == 1 and name not in gone for name, code in pairs]
        return there

    def persist(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """There is no expiry to take off."""
        return self.exists(keys, deadline)

    def pin(self, keys: Sequence[bytes], ttl_ms: int, deadline: float) -> int:
        """Protect stored objects from eviction for `ttl_ms` (at most a day). Mooncake pins only
        what it writes, so each is read and written again. Returns how many were."""
        client, pinned = self._checked_client(deadline), 0
        life = client.life(deadline)
        config = replicate_config("", (), ttl_ms)
        for names in self._names(keys, KEYS_PER_CALL):
            sizes = self._ask(partial(ops.sizes_of, keys=names), deadline)
            for name, size in sizes.items():
                extent = life.arena.take(size, deadline)
                if extent is None:
                    raise StoreTimeout("no staging memory within the deadline")
                shape = ops.Shape([extent.address], [size], size)
                work = partial(ops.pin_object, key=name, shape=shape, config=config)
                call = client.ask(work, deadline, life, Use((extent,)))
                if not call.wait():
                    raise StoreTimeout("Mooncake did not pin within the deadline")
                call.release()
                pinned += call.result() == 0
        client.count("mooncake_pinned", pinned)
        return pinned

    def where(self, keys: Sequence[bytes], deadline: float) -> dict[bytes, list[str]]:
        """The segments that hold each of the node's objects, by the master's own account."""
        self._check(deadline)
        names = {text_key(key, self.segment): key for key in keys}
        held = self._ask(partial(ops.segments_of, keys=list(names)), deadline)
        return {names[name]: segments for name, segments in held.items() if segments}

    def register(self, memory: memoryview) -> None:
        """Memory from which puts are to be sent as it lies (a host cache); needed for RDMA. It must
        stay until the node is closed."""
        self._client().register(memory)

    # ---- what it is ----------------------------------------------------------------------------

    def ready(self, deadline: float) -> bytes:
        client = self._checked_client(deadline)
        client.gate(MASTER).check()
        client.gate(self.segment).check()
        client.life(deadline)
        if not self.segment:
            return self._cluster_incarnation()
        left_s = deadline - self._clock.now()
        return client.cluster.segment(self.segment, min(left_s, 1.0)).incarnation

    def incarnation(self, deadline: float) -> bytes:
        """Changes when the segment is mounted anew. Raises StoreUnavailable if it is not mounted,
        if its owner is gone, or if transfers with it fail."""
        client = self._checked_client(deadline)
        left_s = deadline - self._clock.now()
        listed = client.cluster.segments(min(left_s, 1.0), LIST_AGE_S)
        if not self.segment:
            return self._cluster_incarnation()
        segment = listed.get(self.segment)
        if segment is None:
            raise StoreUnavailable(f"Mooncake segment {self.segment} is not mounted")
        if not client.cluster.owner_answers(segment):
            raise StoreUnavailable(f"the owner of Mooncake segment {self.segment} is gone")
        client.gate(self.segment).check()
        return segment.incarnation

    def _cluster_incarnation(self) -> bytes:
        """A cluster does not say when it has lost its data."""
        return hashlib.sha256(self._url.master.encode()).digest()[:8]

    def charge(self, object_bytes: int, deadline: float) -> int:
        """The allocator rounds nothing up; the master keeps the key."""
        self._check(deadline)
        return object_bytes + KEY_CHARS

    def capacity(self, deadline: float) -> int:
        self._check(deadline)
        return self._config.capacity_bytes

    def drain_counters(self) -> dict[str, int]:
        """Of the whole process: whoever asks first has them."""
        with self._lock:
            client = self._held
        return client.drain_counters() if client is not None else {}

    def close(self) -> None:
        with self._lock:
            client, self._held = self._held, None
            calls, self._calls = self._calls, []
        for call in calls:
            call.abandon()
        if client is not None:
            clients.release(client)

    # ---- helpers -------------------------------------------------------------------------------

    def _check(self, deadline: float) -> None:
        if self._clock.now() >= deadline:
            raise StoreTimeout("the deadline has passed")

    def _client(self) -> MooncakeClient:
        with self._lock:
            if self._held is None:
                staging = self._config.staging_bytes
                self._held = clients.acquire(self._url, staging, self._clock)
            return self._held

    def _checked_client(self, deadline: float) -> MooncakeClient:
        self._check(deadline)
        return self._client()

    def _ask(self, work: Callable[[Library], T], deadline: float) -> T:
        """The answer of a small call."""
        self._check(deadline)
        return self._client().answer(lambda library, _: work(library), deadline)

    def _raise_for(self, codes: Sequence[int], what: Meaning) -> None:
        """Nothing can be said when the master was not reached."""
        bad = [code for code in codes if meaning(code) is what]
        if bad:
            self._client().gate(MASTER).failed(code_name(bad[0]))
            raise StoreUnavailable(f"Mooncake's master: {code_name(bad[0])}")

    def _names(self, keys: Sequence[bytes], most: int) -> list[list[str]]:
        names = [text_key(key, self.segment) for key in keys]
        return [names[at : at + most] for at in range(0, len(names), most)]


def segment_names(url: str, config: Config, clock: Clock) -> Mapping[NodeId, int]:
    """The nodes of a cluster: every mounted segment with its bytes. Raises StoreUnavailable.

    For the one who tells the index which nodes there are; opens one HTTP connection.
    """
    from store_worker.backends.mooncake_master import segments

    found = segments(parse_mooncake_url(url), config.connect_timeout_s)
    return {NodeId(name): segment.size for name, segment in found.items()}


class Membership:
    """What a worker holds from its start to its end: the process's client is made at once, in the
    background, and lends `segment_bytes` to the cluster. `close` once."""

    def __init__(self, url: str, config: Config, clock: Clock) -> None:
        load()
        self._client = clients.acquire(parse_mooncake_url(url), config.staging_bytes, clock)
        self._client.lend()

    def register(self, memory: memoryview) -> None:
        """See `MooncakeNode.register`."""
        self._client.register(memory)

    def close(self) -> None:
        clients.release(self._client)
