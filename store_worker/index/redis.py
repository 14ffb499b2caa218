"""The session index in a Redis or Valkey server: one script, one round trip, per operation.

Keys are described in `snapshot`. Times and sizes are computed here, decisions there. A call that
finds the script unknown (a restarted server) loads it and calls again. A broken connection is tried
once more: every operation may be repeated. Thread: one caller at a time per instance.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel

from connector.config import SENTINEL, sentinel_parts
from connector.errors import StoreError, StoreTimeout, StoreUnavailable, UnsupportedError
from connector.ids import BlockHash, Generation, GrantId, Namespace, NodeId, SessionKey
from connector.indexmsg import (
    Acquired,
    Closed,
    CommitRequest,
    Committed,
    CopyStep,
    Declined,
    Granted,
    IndexIdentity,
    NodeState,
    PrepareRequest,
    Recalled,
    SessionState,
    Victim,
)
from store_worker.index import replies
from store_worker.index.integrity import check
from store_worker.index.limits import FORMAT, NEVER_MS, PIN_TTL_MAX_S
from store_worker.index.options import IndexOptions
from store_worker.index.records import State
from store_worker.index.requests import check_candidates, check_hashes, check_prepare
from store_worker.index.scripts import script
from store_worker.index.snapshot import read_state
from store_worker.policy import Ended, ScoreTable, Turn

Arg = bytes | str | int | float


def connect(url: str, options: IndexOptions) -> redis.Redis:
    """A client of the server, or of the master that Sentinels name. Connects when first asked."""
    limits: dict[str, Any] = {
        "socket_timeout": options.timeout_s,
        "socket_connect_timeout": options.connect_timeout_s,
        "retry": Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
        "health_check_interval": 0,
    }
    if not url.startswith(f"{SENTINEL}://"):
        return redis.Redis.from_url(url, **limits)
    parts = sentinel_parts(url)
    sentinel = Sentinel(
        parts.hosts,
        sentinel_kwargs={
            "socket_timeout": options.timeout_s,
            "socket_connect_timeout": options.connect_timeout_s,
        },
        db=parts.database,
        username=parts.username,
        password=parts.password,
        **limits,
    )
    return sentinel.master_for(parts.service)


class RedisIndex:
    """See `SessionIndex`. url: `redis://`, `rediss://` or `unix://`, as redis-py takes it (user,
    password, database, TLS options)."""

    def __init__(
        self, url: str, options: IndexOptions | None = None, client: redis.Redis | None = None
    ) -> None:
        self._options = options or IndexOptions()
        self._client = client or connect(url, self._options)

    def close_connections(self) -> None:
        """Drop the connections; the next call makes new ones. From any thread."""
        self._client.connection_pool.disconnect()

    def _call(self, name: str, now_ms: int, *args: Arg) -> list[bytes]:
        """Run one script. Raises StoreUnavailable or StoreTimeout."""
        code = script(name)
        try:
            try:
                return self._client.execute_command("EVALSHA", code.sha, 0, now_ms, *args)
            except redis.exceptions.NoScriptError:
                self._client.script_load(code.text)
                return self._client.execute_command("EVALSHA", code.sha, 0, now_ms, *args)
        except redis.RedisError as error:
            raise failure(name, error) from error

    # -- the index itself and its nodes ------------------------------------------------------

    def identity(self) -> IndexIdentity:
        """See SessionIndex. Raises UnsupportedError if the data is of another format."""
        got = self._call("identity", 0, os.urandom(8), os.urandom(32), FORMAT)
        if int(got[2]) != FORMAT:
            raise UnsupportedError(
                f"the index holds format {int(got[2])}, this version speaks {FORMAT};"
                " run one version against it, or empty the index"
            )
        return IndexIdentity(bytes(got[0]), bytes(got[1]))

    def register_node(
        self, node: NodeId, incarnation: bytes, capacity_bytes: int, now_ms: int = 0
    ) -> None:
        """See SessionIndex."""
        self._call("register", now_ms, node, incarnation, capacity_bytes)

    def set_charge(self, node: NodeId, object_bytes: int, charged_bytes: int) -> None:
        """See SessionIndex."""
        self._call("setnode", 0, node, "charge", object_bytes, charged_bytes)

    def node_down(self, node: NodeId, now_ms: int = 0) -> None:
        """See SessionIndex."""
        self._call("down", now_ms, node)

    def drain(self, node: NodeId, on: bool = True) -> None:
        """See SessionIndex."""
        self._call("setnode", 0, node, "drain", int(on))

    # -- lookup ------------------------------------------------------------------------------

    def recall(self, namespace: Namespace, session: SessionKey, now_ms: int = 0) -> Recalled:
        """See SessionIndex."""
        generation, home, packed = self._call("recall", now_ms, namespace, session)
        found = replies.boundaries(packed)
        return Recalled(Generation(int(generation)), replies.node_or_none(home), found)

    def probe(self, namespace: Namespace, hashes: Sequence[BlockHash]) -> tuple[bool, ...]:
        """See SessionIndex."""
        check_hashes(hashes)
        if not hashes:
            return ()
        digits = bytes(self._call("probe", 0, namespace, *hashes))  # type: ignore[arg-type]
        return tuple(digit == 0x31 for digit in digits)

    def acquire(
        self,
        namespace: Namespace,
        candidates: Sequence[tuple[BlockHash, int]],
        lease_s: float,
        session: SessionKey,
        now_ms: int = 0,
    ) -> Acquired:
        """See SessionIndex."""
        check_candidates(candidates)
        if not candidates:
            return Acquired(0)
        lease_ms, engine = round(lease_s * 1000), self._options.engine
        blocks = [block for block, _ in candidates]
        got = self._call("acquire", now_ms, namespace, lease_ms, session, engine, *blocks)
        return replies.acquired(got)

    # -- saves -------------------------------------------------------------------------------

    def prepare(self, request: PrepareRequest, now_ms: int = 0) -> Granted | Declined:
        """See SessionIndex."""
        check_prepare(request)
        options = self._options
        got = self._call(
            "prepare", now_ms, request.namespace, request.session, request.generation,
            request.parent, request.start, request.object_bytes, request.ranks,
            round(request.grant_s * 1000), request.new_tokens, int(request.must),
            repr(options.high_water), options.tenant, options.sessions_max, options.engine,
            len(request.nodes), *request.nodes, *request.hashes,
        )  # fmt: skip
        return replies.prepared(got)

    def commit(self, request: CommitRequest, now_ms: int = 0) -> Committed:
        """See SessionIndex."""
        options, turn = self._options, request.turn_end
        args: list[Arg] = [
            request.namespace, request.session, request.generation, request.grant, request.saved,
            request.parent, request.beyond, options.engine, options.tenant,
            options.pinned_bytes_max,
        ]  # fmt: skip
        if turn is None:
            args += [0, 0]
        else:
            args += [1, turn.new_tokens]
            for boundary in turn.boundaries:
                args += [boundary.depth, boundary.hash]
        return replies.committed(self._call("commit", now_ms, *args))

    def copied(self, steps: Sequence[CopyStep], now_ms: int = 0) -> tuple[Victim, ...]:
        """See SessionIndex."""
        args = [arg for s in steps for arg in (s.namespace, s.hash, s.node)]
        return replies.victims(self._call("copied", now_ms, *args)) if args else ()

    def moves(
        self, node: NodeId, now_ms: int = 0
    ) -> tuple[tuple[CopyStep, ...], tuple[Victim, ...]]:
        """See SessionIndex."""
        return replies.moves(self._call("moves", now_ms, node))

    def abort(self, grant: GrantId, now_ms: int = 0) -> tuple[Victim, ...]:
        """See SessionIndex."""
        return replies.victims(self._call("abort", now_ms, grant))

    def freed(self, victims: Sequence[Victim], now_ms: int = 0) -> None:
        """See SessionIndex."""
        args = [arg for v in victims for arg in (v.namespace, v.hash, v.node)]
        for i in range(0, len(args), 3 * FREED_PER_CALL):
            self._call("freed", now_ms, *args[i : i + 3 * FREED_PER_CALL])

    def dying(self, node: NodeId, now_ms: int = 0) -> tuple[Victim, ...]:
        """See SessionIndex."""
        return replies.victims(self._call("dying", now_ms, node))

    def close(self, session: SessionKey, now_ms: int = 0, resume: bool = False) -> Closed:
        """See SessionIndex."""
        if not session:
            return Closed()
        got = self._call("close", now_ms, session, int(resume))
        return Closed(int(got[0]), replies.victims(got[2:]), bool(int(got[1])))

    def forget(
        self, namespace: Namespace, hashes: Sequence[BlockHash], node: NodeId, now_ms: int = 0
    ) -> tuple[Victim, ...]:
        """See SessionIndex."""
        check_hashes(hashes)
        if not hashes:
            return ()
        return replies.victims(self._call("forget", now_ms, namespace, node, *hashes))

    # -- hints and hand-offs -----------------------------------------------------------------

    def retain(self, session: SessionKey, priority: int, ttl_s: float, now_ms: int = 0) -> None:
        """See SessionIndex."""
        if session:
            ttl_ms = max(0, round(min(ttl_s, NEVER_MS / 2000) * 1000))
            self._call("retain", now_ms, session, priority, ttl_ms, self._options.tenant)

    def pin(self, session: SessionKey, ttl_s: float, now_ms: int = 0) -> float:
        """See SessionIndex."""
        limit = self._options.pinned_bytes_max
        if not session or ttl_s <= 0 or not limit:
            return 0.0
        ttl_s = min(ttl_s, PIN_TTL_MAX_S)
        args = session, round(ttl_s * 1000), self._options.tenant, limit
        return ttl_s if int(self._call("pin", now_ms, *args)[0]) else 0.0

    def awaited(self, namespace: Namespace, tip: BlockHash, now_ms: int = 0) -> bool:
        """See SessionIndex."""
        return bool(self._call("awaited", now_ms, namespace, tip))

    def abandon(self, namespace: Namespace, tip: BlockHash, now_ms: int = 0) -> None:
        """See SessionIndex."""
        self._call("abandon", now_ms, namespace, tip)

    # -- inspection --------------------------------------------------------------------------

    def describe(self, namespace: Namespace, text: str, tokens_per_block: int) -> None:
        """See SessionIndex."""
        try:
            self._client.hsetnx("{skv}:ds", namespace, f"{tokens_per_block} {text}")  # type: ignore[arg-type]
        except redis.RedisError as error:
            raise failure("describe", error) from error

    def namespaces(self) -> Mapping[Namespace, tuple[str, int, int]]:
        """See SessionIndex."""
        return replies.namespaces(self._call("namespaces", 0))

    def nodes(self) -> tuple[NodeState, ...]:
        """See SessionIndex."""
        return replies.nodes(self._call("nodes", 0))  # type: ignore[arg-type]

    def sessions(self, cursor: int = 0, count: int = 100) -> tuple[int, tuple[SessionState, ...]]:
        """See SessionIndex."""
        return replies.page(self._call("page", 0, cursor, count))

    def session(self, session: SessionKey) -> SessionState | None:
        """See SessionIndex."""
        _, states = replies.page(self._call("page", 0, -1, session))
        return states[0] if states else None

    def stats(self) -> Mapping[str, int]:
        """See SessionIndex."""
        got = self._call("stats", 0)
        return {got[i].decode(): int(got[i + 1]) for i in range(0, len(got), 2)}

    def lead(self, owner: str, ttl_s: float, now_ms: int = 0) -> bool:
        """See SessionIndex."""
        return bool(self._call("lead", now_ms, owner, round(ttl_s * 1000)))

    def set_scores(self, table: ScoreTable) -> None:
        """See SessionIndex."""
        scores = "".join(f"{score:.17e}".rjust(25) for row in table.scores for score in row)
        parts = [" ".join(map(str, p)) for p in (table.times_min, table.tokens_min, table.edges_ms)]
        args: list[Arg] = [table.num_classes, *parts, table.version, table.serial, scores]
        classes = int(self._call("scores", 0, *args))  # type: ignore[call-overload]
        if classes:
            raise ValueError(
                f"a table of {table.num_classes} classes can't follow one of {classes}"
                " while blocks are listed; start with an empty index"
            )

    def turns(self, after: int = 0, count: int = 1000) -> tuple[int, tuple[Turn | Ended, ...]]:
        """See SessionIndex."""
        got = self._call("turns", 0, after, count)
        events = tuple(replies.event(text) for text in got[1:])
        return int(got[0]) + len(events), events

    def snapshot(self) -> State:
        """See SessionIndex."""
        try:
            return read_state(self._client)
        except redis.RedisError as error:
            raise failure("snapshot", error) from error

    def check_integrity(self) -> list[str]:
        """See SessionIndex. Reads everything: slow, for tests and `verify`."""
        try:
            return check(read_state(self._client))
        except redis.RedisError as error:
            raise failure("check_integrity", error) from error


FREED_PER_CALL = 512


def failure(what: str, error: redis.RedisError) -> StoreError:
    """Our name for a failure of the server or of the way to it."""
    if isinstance(error, redis.TimeoutError):
        return StoreTimeout(f"index, {what}: {error}")
    return StoreUnavailable(f"index, {what}: {error}")
