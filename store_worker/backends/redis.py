"""A Redis or Valkey server as a data node.

redis-py connects (address, TLS, AUTH, SELECT); from then on the socket belongs to `RespLink`, which
sends cache memory as it lies and receives into it.

A deadline or any doubt about the protocol ends the connection before the call returns, so that no
late byte can land in memory that was already reported. Thread: see `base`.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Sequence
from typing import TypeVar

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from connector.clock import Clock
from connector.config import Config
from connector.errors import StoreError, StoreFull, StoreTimeout, StoreUnavailable
from connector.meta import BlockOutcome
from connector.stats import Stats
from store_worker.backends.base import GetItem, Landed, PutItem
from store_worker.backends.breaker import Breaker
from store_worker.backends.resp import Reply, RespError, RespLink, command
from store_worker.keys import HASH_BYTES_MAX, INCARNATION_KEY, PROBE_KEY, object_key

GET_BYTES_IN_FLIGHT = 4 << 20
PUT_BYTES_IN_FLIGHT = 8 << 20
ITEMS_IN_FLIGHT = 64
"""Also the bound that keeps requests small enough to be sent while replies pile up."""

PIPELINE = 512
MIN_BUDGET_S = 0.1
_KEY_BYTES = len(object_key(bytes(8), bytes(16), bytes(32), 0))  # type: ignore[arg-type]
_PROBE_TTL_MS = 10_000

T = TypeVar("T")


def connection_of(url: str, timeout_s: float) -> redis.connection.AbstractConnection:
    """A redis-py connection for a `redis://`, `rediss://` or `unix://` URL, not yet connected.

    Raises ValueError if redis-py can't make sense of the URL.
    """
    pool = redis.ConnectionPool.from_url(
        url,
        protocol=2,
        retry=Retry(NoBackoff(), 0),
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
    )
    connection = pool.make_connection()
    assert isinstance(connection, redis.connection.AbstractConnection)
    return connection


def socket_of(connection: redis.connection.AbstractConnection) -> socket.socket:
    """The socket that redis-py has opened. It has no public name: this is the only place that
    reaches for it, and a test notices when it moves."""
    sock = connection._sock
    if not isinstance(sock, socket.socket):
        raise StoreUnavailable(
            f"redis-py {redis.__version__} keeps its socket elsewhere; install redis>=5.2,<9"
        )
    return sock


class RedisNode:
    """One connection to one server; see `base.DataNode`."""

    def __init__(self, url: str, config: Config, clock: Clock, breaker: Breaker) -> None:
        """Connects only when needed. Raises ConfigError nowhere: `factory` has checked the URL."""
        self._url, self._config, self._clock, self._breaker = url, config, clock, breaker
        self._connection: redis.connection.AbstractConnection | None = None
        self._link: RespLink | None = None
        self._seen = b""
        self._closes = 0
        self._charges: dict[int, int] = {}
        self._stats = Stats()

    # ---- bulk ----------------------------------------------------------------------------------

    def put(self, items: Sequence[PutItem], ttl_ms: int, deadline: float) -> list[BlockOutcome]:
        tail = b"\r\n$2\r\nPX\r\n" + _argument(b"%d" % max(1, ttl_ms))
        sizes = [sum(map(len, item.parts)) for item in items]

        def send(link: RespLink, index: int) -> None:
            head = b"*5\r\n$3\r\nSET\r\n" + _argument(items[index].key)
            link.send([b"%b$%d\r\n" % (head, sizes[index]), *items[index].parts, tail], deadline)

        def receive(link: RespLink, index: int) -> BlockOutcome:
            reply = link.read_reply(deadline)
            if reply == b"OK":
                return BlockOutcome.OK
            self._count_error(reply)
            return BlockOutcome.FAILED

        return self._pipelined(sizes, PUT_BYTES_IN_FLIGHT, send, receive, deadline)

    def get(
        self, items: Sequence[GetItem], deadline: float, landed: Landed | None = None
    ) -> list[BlockOutcome]:
        sizes = [sum(map(len, item.parts)) for item in items]

        def send(link: RespLink, index: int) -> None:
            link.send([b"*2\r\n$3\r\nGET\r\n" + _argument(items[index].key)], deadline)

        def receive(link: RespLink, index: int) -> BlockOutcome:
            reply = link.read_into(items[index].parts, sizes[index], deadline)
            if reply is None:
                return BlockOutcome.MISSING
            if isinstance(reply, RespError):
                self._count_error(reply)
                wrong = reply.kind == "WRONGTYPE"
                return BlockOutcome.CORRUPT if wrong else BlockOutcome.FAILED
            if reply != sizes[index]:
                return BlockOutcome.CORRUPT
            if landed is not None:
                landed(index)
            return BlockOutcome.OK

        return self._pipelined(sizes, GET_BYTES_IN_FLIGHT, send, receive, deadline)

    def _pipelined(
        self,
        sizes: Sequence[int],
        bytes_max: int,
        send: Callable[[RespLink, int], None],
        receive: Callable[[RespLink, int], BlockOutcome],
        deadline: float,
    ) -> list[BlockOutcome]:
        """Keep a bounded number of requests on the way; one outcome per size."""
        if self._clock.now() >= deadline:
            return [BlockOutcome.TIMED_OUT] * len(sizes)
        link = self._open(deadline)
        outcomes: list[BlockOutcome] = []
        sent = in_flight = 0
        broken: StoreUnavailable | None = None
        try:
            while len(outcomes) < len(sizes):
                oldest = len(outcomes)
                while not broken and sent < len(sizes) and (
                    sent == oldest
                    or (in_flight + sizes[sent] <= bytes_max and sent - oldest < ITEMS_IN_FLIGHT)
                ):
                    try:
                        send(link, sent)
                    except StoreUnavailable as error:
                        # What was answered before the end can still be read.
                        broken = error
                        break
                    in_flight += sizes[sent]
                    sent += 1
                if broken and oldest == sent:
                    raise broken
                outcomes.append(receive(link, oldest))
                in_flight -= sizes[oldest]
        except StoreTimeout as error:
            self._drop(error)
            outcomes += [BlockOutcome.TIMED_OUT] * (len(sizes) - len(outcomes))
        except StoreError as error:
            self._drop(error)
            outcomes += [BlockOutcome.FAILED] * (len(sizes) - len(outcomes))
        except BaseException:
            self._drop(None)
            raise
        return outcomes

    # ---- the rest ------------------------------------------------------------------------------

    def delete(self, keys: Sequence[bytes], deadline: float) -> int:
        return sum(self._numbers("UNLINK", keys, deadline))

    def exists(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        return [number == 1 for number in self._numbers("EXISTS", keys, deadline)]

    def persist(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        done = [number == 1 for number in self._numbers("PERSIST", keys, deadline)]
        # 0 means gone, or persisted before.
        rest = [index for index, ok in enumerate(done) if not ok]
        there = self.exists([keys[index] for index in rest], deadline) if rest else []
        for index, ok in zip(rest, there, strict=True):
            done[index] = ok
        return done

    def incarnation(self, deadline: float) -> bytes:
        self._seen = self._guarded(lambda link: _incarnation(link, deadline), deadline)
        return self._seen

    def ready(self, deadline: float) -> bytes:
        self._open(deadline)
        return self._seen

    def charge(self, object_bytes: int, deadline: float) -> int:
        if object_bytes not in self._charges:
            self._charges[object_bytes] = self._measure(object_bytes, deadline)
        return self._charges[object_bytes]

    def _measure(self, object_bytes: int, deadline: float) -> int:
        """By writing one object of that size and asking; an estimate if that is refused."""
        # Keys count too, so the probe's is as long as an object's.
        key = (PROBE_KEY + secrets.token_hex(16).encode()).ljust(_KEY_BYTES, b".")
        [stored] = self.put(
            [PutItem(key, [memoryview(bytes(object_bytes))])], _PROBE_TTL_MS, deadline
        )
        if stored is BlockOutcome.OK:
            asked = [command("MEMORY", "USAGE", key), command("UNLINK", key)]
            used, _ = self._call(asked, deadline)
            if isinstance(used, int):
                return used
        self._stats.add("charges_estimated")
        return object_bytes + object_bytes // 4 + _KEY_BYTES + HASH_BYTES_MAX

    def capacity(self, deadline: float) -> int:
        if self._config.capacity_bytes:
            return self._config.capacity_bytes
        [reply] = self._call([command("INFO", "memory")], deadline)
        if not isinstance(reply, bytes):
            raise StoreUnavailable(f"INFO memory was refused ({reply}); set capacity_bytes")
        info = dict(line.split(":", 1) for line in reply.decode().splitlines() if ":" in line)
        limit = int(info.get("maxmemory", 0))
        if limit and info.get("maxmemory_policy", "").startswith("allkeys"):
            return 0
        if not limit:
            limit = int(info.get("total_system_memory", 0)) // 2
        return int(limit * self._config.capacity_share)

    def drain_counters(self) -> dict[str, int]:
        return {name: int(value) for name, value in self._stats.drain().items()}

    def close(self) -> None:
        self._closes += 1
        link = self._link
        if link is not None:
            link.close()

    def _numbers(self, name: str, keys: Sequence[bytes], deadline: float) -> list[int]:
        """One command per key. Raises StoreUnavailable if any is refused: half an answer to "is
        it deleted?" would be taken for room."""
        replies = self._call([command(name, key) for key in keys], deadline)
        numbers = [reply for reply in replies if isinstance(reply, int)]
        if len(numbers) < len(replies):
            refused = next(reply for reply in replies if not isinstance(reply, int))
            raise StoreUnavailable(f"{_shown(self._url)} refuses {name}: {refused!r}")
        return numbers

    def _call(self, requests: Sequence[bytes], deadline: float) -> list[Reply]:
        """Small requests, pipelined; one reply each, errors among them as values."""
        replies: list[Reply] = []
        for start in range(0, len(requests), PIPELINE):
            some = requests[start : start + PIPELINE]

            def talk(link: RespLink, some: Sequence[bytes] = some) -> list[Reply]:
                link.send([b"".join(some)], deadline)
                return [link.read_reply(deadline) for _ in some]

            replies += self._guarded(talk, deadline)
        for reply in replies:
            if isinstance(reply, RespError):
                self._count_error(reply)
        return replies

    def _guarded(self, talk: Callable[[RespLink], T], deadline: float) -> T:
        link = self._open(deadline)
        try:
            return talk(link)
        except BaseException as error:
            self._drop(error if isinstance(error, StoreError) else None)
            raise

    def _count_error(self, reply: Reply) -> None:
        kind = reply.kind if isinstance(reply, RespError) else "UNEXPECTED"
        if kind == "OOM":
            self._stats.add("store_full")
        known = kind in ("OOM", "LOADING", "READONLY", "MISCONF", "NOPERM", "WRONGTYPE", "NOAUTH")
        self._stats.add("server_errors", kind=kind if known else "other")

    # ---- connection ----------------------------------------------------------------------------

    def _open(self, deadline: float) -> RespLink:
        """The link, made anew if there is none or the server has closed it meanwhile."""
        if self._link is not None and not self._link.idle_ok():
            self._drop(None)
        budget_s = deadline - self._clock.now()
        if budget_s <= 0:
            raise StoreTimeout("the deadline had passed before the call")
        if self._link is not None:
            return self._link
        self._breaker.enter()
        limit_s = min(self._config.connect_timeout_s, budget_s)
        try:
            link = self._dial(limit_s)
        except (OSError, redis.RedisError, StoreError) as error:
            self._stats.add("connects_failed")
            self._drop(None)
            if limit_s >= min(MIN_BUDGET_S, self._config.connect_timeout_s):
                self._breaker.failed(str(error))
            if limit_s < self._config.connect_timeout_s and isinstance(error, StoreTimeout):
                raise
            raise StoreUnavailable(f"can't connect to {_shown(self._url)}: {error}") from error
        self._breaker.succeeded()
        self._stats.add("connects")
        return link

    def _dial(self, limit_s: float) -> RespLink:
        """Connect and exchange a first word: a server that accepts but never answers is away."""
        end, closes = self._clock.now() + limit_s, self._closes
        self._connection = connection_of(self._url, limit_s)
        self._connection.connect()
        self._link = RespLink(socket_of(self._connection), self._clock)
        self._seen = _incarnation(self._link, end)
        if closes != self._closes:
            raise StoreUnavailable("closed while connecting")
        return self._link

    def _drop(self, error: StoreError | None) -> None:
        """End the connection; from here on it can't write anywhere."""
        link, self._link = self._link, None
        connection, self._connection = self._connection, None
        if link is not None:
            link.release()
        if connection is not None:
            connection.disconnect()
        if error is not None:
            self._stats.add("connections_dropped", why=type(error).__name__)


def _argument(data: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(data), data)


def _incarnation(link: RespLink, deadline: float) -> bytes:
    """Read it, or make it if this is the first time. Raises StoreError on any refusal."""
    link.send([command("GET", INCARNATION_KEY)], deadline)
    found = link.read_reply(deadline)
    if found is None:
        mine = secrets.token_bytes(8)
        asked = command("SET", INCARNATION_KEY, mine, "NX") + command("GET", INCARNATION_KEY)
        link.send([asked], deadline)
        made, found = link.read_reply(deadline), link.read_reply(deadline)
        if isinstance(made, RespError) and made.kind == "OOM":
            raise StoreFull(f"the server has no room for its own incarnation: {made}")
        if isinstance(made, RespError):
            raise StoreUnavailable(f"the server refuses writes: {made}")
    if not isinstance(found, bytes):
        raise StoreUnavailable(f"the server refuses reads: {found}")
    return found


def _shown(url: str) -> str:
    """A URL without its credentials."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"
