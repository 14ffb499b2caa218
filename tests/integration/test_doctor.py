"""`session-kv doctor` against real servers."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

import pytest
import redis

from store_worker import embedded
from store_worker.cli.main import main
from tests.servers import Server, free_port, server_binary
from tests.waiting import eventually


def doctor(capsys: pytest.CaptureFixture[str], store: object) -> tuple[int, dict[str, dict]]:
    """Exit code, and the rows by `check` (or `role:check`, where there are several servers)."""
    text = store if isinstance(store, str) else json.dumps(store)
    code = main(["doctor", "--store", text, "--json"])
    answer = json.loads(capsys.readouterr().out)
    rows = {row["check"]: row for row in answer["checks"]}
    rows |= {f"{row['role']}:{row['check']}": row for row in answer["checks"]}
    assert answer["ok"] == (code == 0)
    assert answer["ok"] == (not any(r["status"] == "FAIL" for r in answer["checks"]))
    return code, rows


def test_a_sound_server(clean_redis: Server, capsys: pytest.CaptureFixture[str]) -> None:
    code, rows = doctor(capsys, clean_redis.tcp_url)
    assert code == 0
    assert {row["status"] for row in rows.values()} == {"PASS"}
    assert rows["version"]["role"] == "index+data"


def test_a_table_for_people(clean_redis: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--store", clean_redis.url]) == 0
    text = capsys.readouterr().out
    assert "PASS" in text and "reachable" in text and "FAIL" not in text


@pytest.mark.parametrize(
    ("setting", "value", "check", "status"),
    [
        ("maxmemory", "0", "memory limit", "WARN"),
        ("maxmemory-policy", "allkeys-lru", "eviction policy", "FAIL"),
        ("save", "3600 1", "persistence", "WARN"),
        ("appendonly", "yes", "persistence", "WARN"),
    ],
)
def test_a_bad_setting_is_seen(
    setting: str, value: str, check: str, status: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Server() as server, server.client() as client:
        client.config_set(setting, value)
        code, rows = doctor(capsys, server.url)
        assert rows[check]["status"] == status and rows[check]["remedy"]
        assert code == (status == "FAIL")


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    code, rows = doctor(capsys, f"redis://127.0.0.1:{free_port()}")
    assert code == 1
    assert rows["reachable"]["status"] == "FAIL" and rows["reachable"]["remedy"]


def test_a_server_that_does_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    with Server(tcp=True) as server:
        server.pause()
        code, rows = doctor(capsys, server.tcp_url)
        server.resume()
    assert code == 1 and rows["reachable"]["status"] == "FAIL"


def test_a_missing_and_a_wrong_password(capsys: pytest.CaptureFixture[str]) -> None:
    with Server(tcp=True) as server, server.client() as client:
        client.config_set("requirepass", "secret-word")
        code, rows = doctor(capsys, server.tcp_url)
        assert code == 1 and rows["reachable"]["status"] == "FAIL"
        good = server.tcp_url.replace("redis://", "redis://:secret-word@")
        assert main(["doctor", "--store", good]) == 0
        shown = capsys.readouterr().out
        assert "secret-word" not in shown


def test_a_user_without_rights(capsys: pytest.CaptureFixture[str]) -> None:
    with Server(tcp=True) as server, server.client() as client:
        client.acl_setuser(
            "reader",
            enabled=True,
            passwords=["+pw"],
            keys=["*"],
            commands=["+@read", "+@connection", "+info", "+time"],
        )
        code, rows = doctor(capsys, server.tcp_url.replace("redis://", "redis://reader:pw@"))
    assert code == 1
    assert rows["writable"]["status"] == "FAIL"
    assert rows["index scripts"]["status"] == "FAIL"
    assert rows["persistence"]["status"] == "WARN"


def test_a_replica_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with Server(tcp=True) as primary, Server(tcp=True) as replica:
        with replica.client() as client:
            client.replicaof("127.0.0.1", primary.port)
        code, rows = doctor(capsys, replica.tcp_url)
    assert code == 1
    assert rows["deployment"]["status"] == "FAIL" and rows["writable"]["status"] == "FAIL"


def test_index_and_data_apart(capsys: pytest.CaptureFixture[str]) -> None:
    with Server() as index, Server() as data:
        with data.client() as client:
            client.config_set("maxmemory-policy", "allkeys-lru")
        code, rows = doctor(capsys, {"index": index.url, "data": [data.url]})
    assert code == 0
    assert rows["index:eviction policy"]["status"] == "PASS"
    assert rows["data:eviction policy"]["status"] == "WARN"
    assert "data:index scripts" not in rows and rows["index:index scripts"]["status"] == "PASS"


def test_one_dead_data_node_fails_the_whole(capsys: pytest.CaptureFixture[str]) -> None:
    with Server() as index:
        dead = f"redis://127.0.0.1:{free_port()}"
        code, rows = doctor(capsys, {"index": index.url, "data": [index.url, dead]})
    assert code == 1
    assert rows["index+data:reachable"]["status"] == "PASS"
    assert rows["data:reachable"]["status"] == "FAIL"


def test_the_embedded_store(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with tempfile.TemporaryDirectory(prefix="skv-") as folder:
        monkeypatch.setattr(embedded, "default_directory", lambda: Path(folder) / "e")
        code, rows = doctor(capsys, "embedded")
    assert code == 0
    assert {row["status"] for row in rows.values()} == {"PASS"}
    assert {row["role"] for row in rows.values()} == {"index", "data"}


def test_stores_that_are_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    code, rows = doctor(capsys, "memory://")
    assert code == 0 and rows["reachable"]["status"] == "WARN"


def test_a_mooncake_master_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with Server() as index:
        data = f"mooncake://127.0.0.1:{free_port()}"
        code, rows = doctor(capsys, {"index": index.url, "data": data})
    assert code == 1 and rows["data:reachable"]["status"] == "FAIL"


def test_the_probe_leaves_nothing(clean_redis: Server, capsys: pytest.CaptureFixture[str]) -> None:
    doctor(capsys, clean_redis.url)
    with redis.Redis.from_url(clean_redis.url) as client:
        left = [key for key in client.scan_iter() if b"doctor" in key or b"probe" in key]
    assert not left


def test_an_index_behind_sentinel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    with Server(tcp=True) as master:
        config = tmp_path / "sentinel.conf"
        config.write_text(
            f"port {port}\nbind 127.0.0.1\ndir {tmp_path}\n"
            f"sentinel monitor skv 127.0.0.1 {master.port} 1\n"
        )
        watcher = subprocess.Popen(
            [server_binary(), str(config), "--sentinel"], stdout=subprocess.DEVNULL
        )
        store = {"index": f"redis+sentinel://127.0.0.1:{port}/skv", "data": master.tcp_url}
        try:
            eventually(lambda: doctor(capsys, store)[0] == 0, 30, "the master to be found")
            code, rows = doctor(capsys, store)
            assert code == 0 and rows["index:index scripts"]["status"] == "PASS"
            other = {**store, "index": f"redis+sentinel://127.0.0.1:{port}/other"}
            code, rows = doctor(capsys, other)
            assert code == 1 and rows["index:reachable"]["status"] == "FAIL"
        finally:
            watcher.kill()
            watcher.wait()
