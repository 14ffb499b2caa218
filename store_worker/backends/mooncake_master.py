"""What Mooncake's master says over HTTP: which segments there are, and are their owners alive.

Every question opens a connection of its own. Any thread.
"""

from __future__ import annotations

import hashlib
import http.client
import socket
import threading
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import quote, urlsplit

import msgspec

from connector.clock import Clock
from connector.errors import StoreUnavailable
from store_worker.backends.mooncake_url import MooncakeUrl

HTTP_S = 1.0
OWNER_S = 0.3
ANSWER_BYTES_MAX = 16 << 20
OWNERS_MAX = 4096


class Segment(NamedTuple):
    """Memory that some process has lent. incarnation: 8 bytes, new whenever it is mounted anew."""

    name: str
    incarnation: bytes
    size: int
    used: int


class _Item(msgspec.Struct):
    segment_name: str
    segment_id: str
    size_bytes: int = 0
    allocator_used_bytes: int = 0
    status: str = "OK"


class _Detail(msgspec.Struct):
    segments: list[_Item] = []


class _Peer(msgspec.Struct):
    tcp_data_host: str = ""
    tcp_data_port: int = 0


def segments(url: MooncakeUrl, timeout_s: float = HTTP_S) -> dict[str, Segment]:
    """All mounted segments by name. Raises StoreUnavailable if the master does not say."""
    body = fetch(f"{url.admin}/get_segments_detail", timeout_s)
    try:
        detail = msgspec.json.decode(body, type=_Detail)
    except msgspec.DecodeError as error:
        raise StoreUnavailable(f"{url.admin} is not Mooncake's admin port: {error}") from error
    found: dict[str, Segment] = {}
    for item in detail.segments:
        if item.status == "OK":
            incarnation = hashlib.sha256(item.segment_id.encode()).digest()[:8]
            found[item.segment_name] = Segment(
                item.segment_name, incarnation, item.size_bytes, item.allocator_used_bytes
            )
    return found


def owner_address(url: MooncakeUrl, segment: str) -> tuple[str, int] | None:
    """Where a segment's owner accepts transfers; None where this can't be learnt."""
    if url.protocol != "tcp" or not url.metadata.startswith("http://"):
        return None
    try:
        body = fetch(f"{url.metadata}?key={quote(f'mooncake/ram/{segment}', safe='')}", HTTP_S)
        peer = msgspec.json.decode(body, type=_Peer)
    except (StoreUnavailable, msgspec.DecodeError):
        return None
    host = peer.tcp_data_host or segment.rpartition(":")[0]
    return (host, peer.tcp_data_port) if peer.tcp_data_port else None


def owner_answers(address: tuple[str, int], timeout_s: float = OWNER_S) -> bool:
    """The master needs `client_ttl` (10 s) to notice that an owner was killed; this does not."""
    try:
        with socket.create_connection(address, timeout=timeout_s):
            return True
    except OSError:
        return False


class Cluster:
    """The segments as they were seen last, for all threads of a process."""

    def __init__(self, url: MooncakeUrl, clock: Clock) -> None:
        self._url, self._clock = url, clock
        self._lock = threading.Lock()
        self._segments: Mapping[str, Segment] = {}  # replaced whole
        self._seen_at = -1e9
        self._owners: dict[bytes, tuple[str, int] | None] = {}  # by incarnation

    def segments(self, timeout_s: float = HTTP_S, age_s: float = 0.0) -> Mapping[str, Segment]:
        """As they were at most `age_s` ago. Raises StoreUnavailable."""
        with self._lock:
            if self._clock.now() - self._seen_at < age_s:
                return self._segments
        found = segments(self._url, timeout_s)
        with self._lock:
            self._segments, self._seen_at = found, self._clock.now()
        return found

    def last_seen(self) -> Mapping[str, Segment]:
        """Asks nobody."""
        with self._lock:
            return self._segments

    def segment(self, name: str, timeout_s: float) -> Segment:
        """A mounted segment, as seen last. Raises StoreUnavailable if it is not there."""
        found = self.last_seen().get(name) or self.segments(timeout_s).get(name)
        if found is None:
            raise StoreUnavailable(f"Mooncake segment {name} is not mounted")
        return found

    def owner_answers(self, segment: Segment) -> bool:
        """False if the process that lent it is known to be gone."""
        with self._lock:
            known = segment.incarnation in self._owners
            address = self._owners.get(segment.incarnation)
        if not known:
            address = owner_address(self._url, segment.name)
            with self._lock:
                if len(self._owners) >= OWNERS_MAX:
                    self._owners.clear()
                self._owners[segment.incarnation] = address
        return address is None or owner_answers(address)


def fetch(url: str, timeout_s: float, good: tuple[int, ...] = (200,)) -> bytes:
    """The body of an answer with one of these states. Raises StoreUnavailable."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=max(0.01, timeout_s))
    try:
        connection.request("GET", f"{parts.path}?{parts.query}" if parts.query else parts.path)
        answer = connection.getresponse()
        body = answer.read(ANSWER_BYTES_MAX)
    except (OSError, http.client.HTTPException) as error:
        raise StoreUnavailable(f"Mooncake's {parts.netloc} does not answer: {error}") from error
    finally:
        connection.close()
    if answer.status not in good:
        raise StoreUnavailable(f"Mooncake's {parts.netloc} answers {answer.status} to {parts.path}")
    return body
