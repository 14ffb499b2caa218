"""`session-kv doctor --store URL`: can this store serve, and what should be changed on it?

One row per check and server. Exit code 0 if nothing failed (warnings are not failures), else 1.
The only things it leaves on a server are the cached index scripts.
"""

from __future__ import annotations

import argparse
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from store_worker.cli.options import (
    add_json,
    add_store,
    config_of,
    resolved_store,
)

if TYPE_CHECKING:
    from connector.clock import Clock
    from connector.config import Config, StoreConfig
    from store_worker.cli.checks import Facts, Finding, Role, Row

PINGS = 50
PROBE_NAME = b"doctor"
PROBE_TTL_MS = 5_000
MOONCAKE_PORT = 50051


def add_parser(subparsers: Any) -> None:
    """Adds `doctor`."""
    parser = subparsers.add_parser(
        "doctor",
        help="check a store: reachable, version, latency, limits, persistence, clock, scripts",
        description="Checks every server of a store; exit code 1 if a check failed.",
    )
    add_store(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Check, print, and return 1 if a row says FAIL."""
    from store_worker.cli.checks import Status
    from store_worker.cli.output import emit_json, table

    config = config_of(args)
    with resolved_store(config) as store:
        rows = list(diagnose(store, config))
    failed = any(row.status is Status.FAIL for row in rows)
    if args.json:
        import msgspec

        emit_json({"ok": not failed, "checks": [msgspec.to_builtins(row) for row in rows]})
    else:
        for server in dict.fromkeys((row.server, row.role) for row in rows):
            cells = [
                (row.check, row.status, row.detail, row.remedy)
                for row in rows
                if (row.server, row.role) == server
            ]
            table(f"{server[0]} ({server[1]})", ("check", "status", "detail", "remedy"), cells)
    return int(failed)


def diagnose(store: StoreConfig, config: Config) -> Iterator[Row]:
    """All rows, the index first; a server that is both is asked once."""
    from store_worker.cli.checks import Role, Row

    servers = {store.index: Role.INDEX}
    for url in store.data:
        servers[url] = Role.BOTH if url == store.index else Role.DATA
    for url, role in servers.items():
        for finding in diagnose_server(url, role, config):
            yield Row(
                server=shown(url),
                role=role,
                check=finding.check,
                status=finding.status,
                detail=finding.detail,
                remedy=finding.remedy,
            )


def shown(url: str) -> str:
    """The URL without its password."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    return url.replace(f":{parts.password}@", ":***@", 1)


def diagnose_server(url: str, role: Role, config: Config) -> Iterator[Finding]:
    from store_worker.cli.checks import Finding, Status, judge

    scheme = urlsplit(url).scheme
    if scheme == "memory":
        remedy = "for tests: nothing is shared with another process"
        yield Finding("reachable", Status.WARN, "inside one process only", remedy)
    elif scheme == "mooncake":
        yield from diagnose_mooncake(url, config)
    else:
        try:
            facts = ask(url, role, config)
        except OSError as error:
            yield unreachable(error)
            return
        yield from judge(role, facts)


def unreachable(error: Exception) -> Finding:
    from store_worker.cli.checks import Finding, Status

    text = str(error) or type(error).__name__
    remedy = "is the server running, and the address, port, password and TLS setting right?"
    return Finding("reachable", Status.FAIL, text, remedy)


def ask(url: str, role: Role, config: Config, clock: Clock | None = None) -> Facts:
    """The facts of a Redis or Valkey server, or of the master that Sentinels name. Raises OSError
    if it can't be asked."""
    import redis

    from connector.clock import SystemClock
    from store_worker.cli.checks import Facts
    from store_worker.index import options_of
    from store_worker.index.redis import connect

    clock = clock or SystemClock()
    client = connect(url, options_of(config))
    try:
        with client:
            latency_ms = measure(client, clock)
            return Facts(
                info=client.info("everything"),
                save=snapshots(client),
                latency_ms=latency_ms,
                skew_ms=skew(client, clock),
                write_error=write_error(client, role),
                script_error=script_error(url, config) if role.has_index else None,
            )
    except redis.RedisError as error:
        raise OSError(str(error)) from error


def measure(client: Any, clock: Clock) -> tuple[float, ...]:
    """Round trips in milliseconds, sorted; the first, which connects, does not count."""
    client.ping()
    taken = []
    for _ in range(PINGS):
        began = clock.now()
        client.ping()
        taken.append((clock.now() - began) * 1000)
    return tuple(sorted(taken))


def skew(client: Any, clock: Clock) -> float:
    """Server's clock minus ours in milliseconds, taken at the middle of the round trip."""
    before = clock.wall_ms()
    seconds, microseconds = client.time()
    after = clock.wall_ms()
    return seconds * 1000 + microseconds / 1000 - (before + after) / 2


def snapshots(client: Any) -> str | None:
    import redis

    try:
        return str(client.config_get("save").get("save", ""))
    except redis.ResponseError:
        return None


def write_error(client: Any, role: Role) -> str:
    """Empty if keys with the store's prefixes can be written and deleted (ACLs may name those)."""
    import redis

    from store_worker.keys import OBJECT_PREFIX

    prefixes = [b"{skv}:"] * role.has_index + [OBJECT_PREFIX] * role.has_data
    try:
        for prefix in prefixes:
            client.set(prefix + PROBE_NAME, b"1", px=PROBE_TTL_MS)
            client.delete(prefix + PROBE_NAME)
    except redis.ResponseError as error:
        return str(error)
    return ""


def script_error(url: str, config: Config) -> str:
    """Empty if the index's own scripts load and run there."""
    import redis

    from connector.errors import StoreError
    from store_worker.index import open_index

    try:
        open_index(url, config).nodes()
    except (StoreError, redis.RedisError) as error:
        return str(error)
    return ""


def diagnose_mooncake(url: str, config: Config) -> Iterator[Finding]:
    """Its master answers on its port, and this installation can use it."""
    from connector.errors import SessionKVError
    from store_worker.backends.factory import open_node
    from store_worker.cli.checks import Finding, Status

    parts = urlsplit(url)
    try:
        address = (parts.hostname or "", parts.port or MOONCAKE_PORT)
        socket.create_connection(address, config.connect_timeout_s).close()
    except OSError as error:
        yield unreachable(error)
    else:
        yield Finding("reachable", Status.PASS, "its master accepts connections")
    try:
        open_node(url, config).close()
    except SessionKVError as error:
        remedy = "pip install 'session-kv-connector[mooncake]', or use a redis:// data node"
        yield Finding("back end", Status.FAIL, str(error), remedy)
    else:
        yield Finding("back end", Status.PASS, "can be used")
