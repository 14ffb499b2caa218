"""The embedded store: one pair for all, gone with the last user, however that one ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from connector.errors import ConfigError
from store_worker import embedded
from store_worker.embedded import EmbeddedStore, start_or_join
from tests.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
MEMORY = 64 << 20

# A user in a process of its own: says that it is in, then waits for the end of its input.
USER = """
import sys
from store_worker.embedded import start_or_join
with start_or_join(sys.argv[1], int(sys.argv[2])) as store:
    print("started" if store.started else "joined", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def directory() -> Iterator[Path]:
    """A short path; whatever a failed test leaves running in it is ended."""
    with tempfile.TemporaryDirectory(prefix="skv-") as parent:
        yield Path(parent) / "e"
        for pid in processes(Path(parent)):
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: not processes(Path(parent)), what="leftovers to end")


def processes(directory: Path) -> dict[int, str]:
    """Every live process that names the directory in its command: the supervisor and servers."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            served = "embedded_supervisor.py" in command or "--unixsocket" in command
            title = "unixsocket:" in command  # how a running server shows itself
            if str(directory) in command and (served or title):
                found[int(entry.name)] = command
    return found


def user(directory: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", USER, str(directory), str(MEMORY)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def leave(process: subprocess.Popen[str]) -> None:
    process.communicate(timeout=20)


def client(url: str) -> redis.Redis:
    return redis.Redis.from_url(url, socket_timeout=5)


def test_both_servers_are_limited_and_keep_everything(directory: Path) -> None:
    with start_or_join(directory, MEMORY) as store:
        assert store.started
        for url, memory in ((store.index_url, 64 << 20), (store.data_url, MEMORY)):
            with client(url) as link:
                assert link.config_get("maxmemory*")["maxmemory"] == str(memory)
                assert link.config_get("maxmemory-policy")["maxmemory-policy"] == "noeviction"
                assert link.config_get("save")["save"] == ""
                assert link.config_get("port")["port"] == "0"
        assert client(store.index_url).ping() and store.index_url != store.data_url


def test_gone_after_the_last_close(directory: Path) -> None:
    first = start_or_join(directory, MEMORY)
    second = start_or_join(directory, MEMORY)
    assert first.started and not second.started
    assert len(processes(directory)) == 3
    first.close()
    first.close()
    with client(second.data_url) as link:
        assert link.set("a", "b")
    second.close()
    eventually(lambda: not processes(directory), what="the servers to end")


def test_many_starters_make_one_pair(directory: Path) -> None:
    users = [user(directory) for _ in range(5)]
    words = sorted(said(process) for process in users)
    assert words == ["joined"] * 4 + ["started"]
    assert len(processes(directory)) == 3
    for process in users[1:]:
        leave(process)
    assert len(processes(directory)) == 3
    leave(users[0])
    eventually(lambda: not processes(directory), what="the servers to end")


def test_a_killed_user_leaves_nothing(directory: Path) -> None:
    process = user(directory)
    assert said(process) == "started"
    assert processes(directory)
    process.kill()
    leave(process)
    eventually(lambda: not processes(directory), what="the servers to end")


def test_others_stay_when_the_starter_is_killed(directory: Path) -> None:
    starter, other = user(directory), None
    assert said(starter) == "started"
    other = user(directory)
    assert said(other) == "joined"
    before = set(processes(directory))
    starter.kill()
    leave(starter)
    with start_or_join(directory, MEMORY) as store:
        assert not store.started and set(processes(directory)) == before
    leave(other)
    eventually(lambda: not processes(directory), what="the servers to end")


def pid_of(directory: Path, part: str) -> int:
    return next(pid for pid, command in processes(directory).items() if part in command)


def test_a_dead_server_comes_back_empty(directory: Path) -> None:
    with start_or_join(directory, MEMORY) as store:
        with client(store.data_url) as link:
            link.set("a", "b")
        old = pid_of(directory, embedded.DATA_SOCKET)
        os.kill(old, signal.SIGKILL)
        eventually(lambda: _value(store) is None and _up(store), what="a new data server")
        assert pid_of(directory, embedded.DATA_SOCKET) != old


def _up(store: EmbeddedStore) -> bool:
    try:
        return bool(client(store.data_url).ping())
    except redis.ConnectionError:
        return False


def _value(store: EmbeddedStore) -> object:
    try:
        return client(store.data_url).get("a")
    except redis.ConnectionError:
        return "no answer"


def test_a_killed_supervisor_takes_the_servers_along(directory: Path) -> None:
    with start_or_join(directory, MEMORY):
        os.kill(pid_of(directory, "embedded_supervisor.py"), signal.SIGKILL)
        eventually(lambda: not processes(directory), what="the servers to end")
        with start_or_join(directory, MEMORY) as again:
            assert again.started and _up(again)


def test_leaving_and_coming_in_turn(directory: Path) -> None:
    """A starter never joins a pair that is about to end."""
    for _ in range(6):
        with start_or_join(directory, MEMORY) as store:
            assert client(store.index_url).ping() and client(store.data_url).ping()


def test_another_limit_is_said_and_not_applied(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with start_or_join(directory, MEMORY), start_or_join(directory, 2 * MEMORY) as second:
        assert client(second.data_url).config_get("maxmemory")["maxmemory"] == str(MEMORY)
    assert "is not applied" in caplog.text


def test_a_directory_that_others_can_read_is_refused(directory: Path) -> None:
    directory.mkdir(mode=0o700)
    directory.chmod(0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        start_or_join(directory, MEMORY)


def test_a_link_is_refused(directory: Path) -> None:
    directory.symlink_to("/tmp")
    with pytest.raises(ConfigError, match="directory of this user"):
        start_or_join(directory, MEMORY)


def test_a_path_too_long_for_a_socket_is_refused(directory: Path) -> None:
    with pytest.raises(ConfigError, match="at most 96 bytes"):
        start_or_join(directory / ("x" * 100), MEMORY)


def test_a_server_that_cannot_start_is_reported(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "find_server", lambda: "/bin/false")
    monkeypatch.setattr(embedded, "START_DEADLINE_S", 1.0)
    with pytest.raises(embedded.StoreUnavailable, match="do not answer"):
        start_or_join(directory, MEMORY)
    eventually(lambda: not processes(directory), what="the supervisor to end")


def test_default_directory_is_per_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert embedded.default_directory() == tmp_path / "session-kv"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert embedded.default_directory().name == f"session-kv-{os.getuid()}"
