"""What `doctor` thinks of a server: facts in, rows out. Pure, so that every row can be tested."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping

import msgspec

from store_worker.cli.output import count_bytes

VERSION_MIN, VERSION_TESTED = (6, 2), (7, 0)
LATENCY_WARN_MS, LATENCY_FAIL_MS = 2.0, 50.0
SKEW_WARN_MS, SKEW_FAIL_MS = 1_000, 60_000
USED_SHARE_WARN = 0.95


class Status(enum.StrEnum):
    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"


class Role(enum.StrEnum):
    """What a server is for. One server may be both."""

    INDEX = "index"
    DATA = "data"
    BOTH = "index+data"

    @property
    def has_index(self) -> bool:
        return self is not Role.DATA

    @property
    def has_data(self) -> bool:
        return self is not Role.INDEX


class Row(msgspec.Struct, frozen=True):
    """One check of one server. remedy: what to do, empty where nothing needs to be done."""

    server: str
    role: str
    check: str
    status: Status
    detail: str
    remedy: str = ""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen of one server, without judgement.

    info: the fields of INFO. save: `CONFIG GET save`, None if CONFIG is refused. latency_ms: round
    trips of PING, sorted. skew_ms: its clock minus ours. write_error, script_error: empty if a
    write, and the loading of the index's scripts, went well; script_error is None if not tried.
    """

    info: Mapping[str, object]
    save: str | None
    latency_ms: tuple[float, ...]
    skew_ms: float
    write_error: str = ""
    script_error: str | None = None


class Finding(msgspec.Struct, frozen=True):
    """A row without the server it is about."""

    check: str
    status: Status
    detail: str
    remedy: str = ""


def judge(role: Role, facts: Facts) -> Iterator[Finding]:
    """All rows of a server that answers."""
    yield Finding("reachable", Status.PASS, "answers PING")
    yield version(facts)
    yield deployment(facts)
    yield latency(facts)
    yield from memory(role, facts)
    yield from persistence(role, facts)
    yield clock(facts)
    yield write(facts)
    if facts.script_error is not None:
        yield scripts(facts)


def version(facts: Facts) -> Finding:
    name, text = product(facts)
    parts = text.split(".")
    number = tuple(int(p) if p.isdigit() else 0 for p in (*parts, "0")[:2])
    detail = f"{name} {text}"
    if number < VERSION_MIN:
        return Finding("version", Status.FAIL, detail, "use Redis 7 or Valkey 7.2 or newer")
    if number < VERSION_TESTED:
        return Finding("version", Status.WARN, f"{detail} (not tested)", "use Redis 7 or newer")
    return Finding("version", Status.PASS, detail)


def product(facts: Facts) -> tuple[str, str]:
    """Name and version; Valkey also reports the Redis version that it is compatible with."""
    if "valkey_version" in facts.info:
        return "Valkey", str(facts.info["valkey_version"])
    return "Redis", str(facts.info.get("redis_version", "0"))


def deployment(facts: Facts) -> Finding:
    """Not a cluster and not a replica: every key lives here and can be written."""
    if number(facts, "cluster_enabled"):
        remedy = "use a server without cluster mode; add data nodes one by one instead"
        return Finding("deployment", Status.FAIL, "cluster mode is on", remedy)
    if facts.info.get("role") == "slave":
        return Finding("deployment", Status.FAIL, "a replica", "give the URL of its primary")
    return Finding("deployment", Status.PASS, "a primary without cluster mode")


def latency(facts: Facts) -> Finding:
    middle = facts.latency_ms[len(facts.latency_ms) // 2]
    worst = facts.latency_ms[-1]
    detail = f"median {middle:.2f} ms, worst {worst:.2f} ms of {len(facts.latency_ms)}"
    remedy = "put the server nearer to the engines, or look for what keeps it busy (SLOWLOG GET)"
    if middle >= LATENCY_FAIL_MS:
        return Finding("latency", Status.FAIL, detail, remedy)
    if middle >= LATENCY_WARN_MS:
        return Finding("latency", Status.WARN, detail, remedy)
    return Finding("latency", Status.PASS, detail)


def memory(role: Role, facts: Facts) -> Iterator[Finding]:
    limit, used = number(facts, "maxmemory"), number(facts, "used_memory")
    policy = str(facts.info.get("maxmemory_policy", "unknown"))
    if not limit:
        remedy = "CONFIG SET maxmemory, below the machine's memory, or set capacity_bytes"
        yield Finding("memory limit", Status.WARN, "none: it grows until it is killed", remedy)
    elif used > USED_SHARE_WARN * limit:
        detail = f"{count_bytes(used)} of {count_bytes(limit)} in use"
        remedy = "other keys fill it: give the store a server of its own, or raise maxmemory"
        yield Finding("memory limit", Status.WARN, detail, remedy)
    else:
        detail = f"{count_bytes(limit)}, {count_bytes(used)} in use"
        yield Finding("memory limit", Status.PASS, detail)
    if policy == "noeviction":
        yield Finding("eviction policy", Status.PASS, policy)
        return
    # An index that loses single keys contradicts itself; lost data is found out and recomputed.
    status = Status.FAIL if role.has_index else Status.WARN
    why = "the server would remove parts of the index" if role.has_index else "leaves holes"
    remedy = "CONFIG SET maxmemory-policy noeviction"
    yield Finding("eviction policy", status, f"{policy}: {why}", remedy)


def persistence(role: Role, facts: Facts) -> Iterator[Finding]:
    """Snapshots of KV data copy gigabytes at every fork; of an index alone they are harmless."""
    check = "persistence"
    if facts.info.get("rdb_last_bgsave_status") == "err":
        remedy = "free its disk, or CONFIG SET stop-writes-on-bgsave-error no"
        yield Finding(check, Status.FAIL, "the last snapshot failed: writes are refused", remedy)
        return
    append = bool(number(facts, "aof_enabled"))
    if facts.save is None and role.has_data and not append:
        remedy = "allow CONFIG GET, or make sure that snapshots are off"
        yield Finding(check, Status.WARN, "CONFIG GET is refused: snapshots unknown", remedy)
    elif role.has_data and (facts.save or append):
        on = [f"snapshots (save {facts.save})"] * bool(facts.save) + ["append-only file"] * append
        remedy = "CONFIG SET save '' and CONFIG SET appendonly no: a cache needs neither"
        detail = f"{' and '.join(on)}: forks and disk writes stall it"
        yield Finding(check, Status.WARN, detail, remedy)
    else:
        detail = "on, for an index only" if facts.save or append else "off"
        yield Finding(check, Status.PASS, detail)


def clock(facts: Facts) -> Finding:
    detail = f"{facts.skew_ms:+.0f} ms against this machine"
    remedy = "run a time service (chrony, systemd-timesyncd) on both machines"
    if abs(facts.skew_ms) >= SKEW_FAIL_MS:
        return Finding("clock skew", Status.FAIL, detail, remedy)
    if abs(facts.skew_ms) >= SKEW_WARN_MS:
        return Finding("clock skew", Status.WARN, detail, remedy)
    return Finding("clock skew", Status.PASS, detail)


def write(facts: Facts) -> Finding:
    if facts.write_error:
        remedy = "see the server's answer: rights (ACL), memory, or a disk that stops writes"
        return Finding("writable", Status.FAIL, facts.write_error, remedy)
    return Finding("writable", Status.PASS, "a key could be written and deleted")


def scripts(facts: Facts) -> Finding:
    if facts.script_error:
        remedy = "allow EVAL, EVALSHA and SCRIPT LOAD to this user, on Redis 7 or Valkey"
        return Finding("index scripts", Status.FAIL, str(facts.script_error), remedy)
    return Finding("index scripts", Status.PASS, "load and run")


def number(facts: Facts, field: str) -> int:
    value = facts.info.get(field, 0)
    return int(value) if isinstance(value, int | float | str) else 0
