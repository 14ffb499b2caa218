"""What doctor thinks of a server: every status of every row, from facts alone."""

from __future__ import annotations

import pytest

from store_worker.cli.checks import Facts, Finding, Role, Status, judge

GIB = 1 << 30
HEALTHY = {
    "redis_version": "7.2.4",
    "role": "master",
    "cluster_enabled": 0,
    "maxmemory": GIB,
    "used_memory": GIB // 4,
    "maxmemory_policy": "noeviction",
    "aof_enabled": 0,
    "rdb_last_bgsave_status": "ok",
}


def facts(changes: dict[str, object]) -> Facts:
    """A healthy server but for the named fields of Facts, or else of its INFO."""
    own = {k: v for k, v in changes.items() if k in Facts.__struct_fields__}
    info = HEALTHY | {k: v for k, v in changes.items() if k not in own}
    given = {"save": "", "latency_ms": (0.1, 0.2, 0.3), "skew_ms": 1.0, "script_error": ""}
    return Facts(info=info, **(given | own))  # type: ignore[arg-type]


def row(check: str, changes: dict[str, object], role: Role = Role.BOTH) -> Finding:
    (found,) = [f for f in judge(role, facts(changes)) if f.check == check]
    return found


@pytest.mark.parametrize("role", list(Role))
def test_a_healthy_server_passes_everything(role: Role) -> None:
    found = list(judge(role, facts({})))
    assert {f.status for f in found} == {Status.PASS}
    assert not any(f.remedy for f in found)
    assert len({f.check for f in found}) == len(found) == 10


CASES = [
    ("version", Status.FAIL, {"redis_version": "5.0.14"}),
    ("version", Status.WARN, {"redis_version": "6.2.6"}),
    ("version", Status.PASS, {"redis_version": "7.2.4", "valkey_version": "9.1.2"}),
    ("version", Status.FAIL, {"redis_version": "unknown"}),
    ("deployment", Status.FAIL, {"cluster_enabled": 1}),
    ("deployment", Status.FAIL, {"role": "slave"}),
    ("latency", Status.WARN, {"latency_ms": (1.0, 2.5, 3.0)}),
    ("latency", Status.FAIL, {"latency_ms": (1.0, 80.0, 90.0)}),
    ("latency", Status.PASS, {"latency_ms": (1.0, 1.5, 90.0)}),
    ("memory limit", Status.WARN, {"maxmemory": 0}),
    ("memory limit", Status.WARN, {"used_memory": GIB * 0.99}),
    ("persistence", Status.FAIL, {"rdb_last_bgsave_status": "err"}),
    ("clock skew", Status.WARN, {"skew_ms": -2500.0}),
    ("clock skew", Status.FAIL, {"skew_ms": 3.6e6}),
    ("writable", Status.FAIL, {"write_error": "NOPERM no rights"}),
    ("index scripts", Status.FAIL, {"script_error": "unknown command EVALSHA"}),
]


@pytest.mark.parametrize(("check", "status", "changes"), CASES)
def test_status(check: str, status: Status, changes: dict[str, object]) -> None:
    found = row(check, changes)
    assert found.status is status
    assert bool(found.remedy) == (status is not Status.PASS)


@pytest.mark.parametrize(
    ("role", "status"),
    [(Role.INDEX, Status.FAIL), (Role.BOTH, Status.FAIL), (Role.DATA, Status.WARN)],
)
def test_eviction_breaks_an_index_and_only_hurts_data(role: Role, status: Status) -> None:
    found = row("eviction policy", {"maxmemory_policy": "allkeys-lru"}, role)
    assert found.status is status and "noeviction" in found.remedy


@pytest.mark.parametrize(
    ("role", "changes", "status"),
    [
        (Role.DATA, {"save": "3600 1"}, Status.WARN),
        (Role.BOTH, {"save": "3600 1"}, Status.WARN),
        (Role.INDEX, {"save": "3600 1"}, Status.PASS),
        (Role.DATA, {"aof_enabled": 1}, Status.WARN),
        (Role.INDEX, {"aof_enabled": 1}, Status.PASS),
        (Role.DATA, {"save": None}, Status.WARN),
        (Role.INDEX, {"save": None}, Status.PASS),
    ],
)
def test_persistence_matters_where_the_data_is(
    role: Role, changes: dict[str, object], status: Status
) -> None:
    assert row("persistence", changes, role).status is status


def test_scripts_are_not_asked_of_a_data_node() -> None:
    found = judge(Role.DATA, facts({"script_error": None}))
    assert "index scripts" not in [f.check for f in found]
