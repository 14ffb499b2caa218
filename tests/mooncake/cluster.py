"""A real Mooncake cluster on the loopback address, started here and stopped for sure."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from connector.clock import SystemClock
from connector.config import Config, parse_config
from connector.errors import StoreUnavailable
from connector.ids import NodeId
from store_worker.backends.mooncake import MooncakeNode, open_mooncake
from store_worker.backends.mooncake_master import fetch, segments
from store_worker.backends.mooncake_url import parse_mooncake_url
from tests.servers import free_port
from tests.waiting import eventually

START_DEADLINE_S = 30.0
STOP_DEADLINE_S = 15.0
LEASE_MS = 1000
CLIENT_TTL_S = 3
"""Shorter than the master's defaults (10 s each), so that the tests are."""

# A test run that is killed takes its servers along: a child asks Linux for this signal.
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)

ROOT = Path(__file__).resolve().parents[2]


def missing() -> str:
    """Why these tests can't run here; empty if they can."""
    try:
        import mooncake.store  # noqa: F401
    except ImportError as error:
        return f"Mooncake's client library is not there ({error})"
    return ""


def master_binary() -> Path:
    import mooncake

    return Path(mooncake.__path__[0]) / "mooncake_master"


class Owner:
    """A process with one segment. name: `host:port`, the segment's and so the node's."""

    def __init__(self, cluster: MooncakeCluster, size: int, host: str = "127.0.0.1") -> None:
        self._cluster = cluster
        self.size, self.host = size, host
        self._log = cluster.folder / f"owner-{len(cluster.owners)}"
        self._process: subprocess.Popen[str] | None = None
        self.name = NodeId("")

    def start(self) -> Owner:
        """Or start again under the same name; returns when the master lists the segment.

        After a crash the old name is refused; the attempt that fails clears it away, so that the
        next one succeeds.
        """
        eventually(self._try_start, START_DEADLINE_S, "the owner to start", again_s=0.5)
        listed = self._cluster.listed
        eventually(lambda: self.name in (listed() or ()), START_DEADLINE_S, "its segment")
        return self

    def _try_start(self) -> bool:
        c = self._cluster
        command = [sys.executable, "-m", "tests.mooncake.owner", "--bytes", str(self.size)]
        command += ["--host", self.name or self.host, "--metadata", c.metadata]
        command += ["--master", f"127.0.0.1:{c.port}"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
                preexec_fn=die_with_parent,
            )
        assert self._process.stdout is not None
        said = ""
        while not said.startswith(("UP ", "FAILED")):
            said = self._process.stdout.readline()
            assert said, f"the owner ended:\n{self.log()}"
        if not said.startswith("UP "):
            self._process.wait(STOP_DEADLINE_S)
            self._process = None
            return False
        self.name = NodeId(said.split()[1])
        return True

    @property
    def process(self) -> subprocess.Popen[str]:
        assert self._process is not None, "the owner is not running"
        return self._process

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def leave(self) -> None:
        """Go in good order: the segment is unmounted."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(STOP_DEADLINE_S)
        self._process = None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(STOP_DEADLINE_S)
        self._process = None

    def pause(self) -> None:
        """Stop answering without closing any connection."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def stop(self) -> None:
        if self._process is not None:
            self.kill()


class MooncakeCluster:
    """A master and `owners`; a context manager.

    lease_ms, client_ttl_s: of the master. A machine that stands still for longer loses reads, or
    segments.
    """

    def __init__(
        self,
        sizes: tuple[int, ...] = (256 << 20, 256 << 20),
        lease_ms: int = LEASE_MS,
        client_ttl_s: int = CLIENT_TTL_S,
    ) -> None:
        self._lease_ms, self._client_ttl_s = lease_ms, client_ttl_s
        self.folder = Path(tempfile.mkdtemp(prefix="skv-moon-"))
        self.port, self.metadata_port, self.admin_port = (free_port() for _ in range(3))
        self.metadata = f"http://127.0.0.1:{self.metadata_port}/metadata"
        self.clock = SystemClock()
        self._sizes = sizes
        self._master: subprocess.Popen[bytes] | None = None
        self.owners: list[Owner] = []

    @property
    def url(self) -> str:
        return (
            f"mooncake://127.0.0.1:{self.port}?metadata={self.metadata}"
            f"&admin=http://127.0.0.1:{self.admin_port}"
        )

    @property
    def names(self) -> list[NodeId]:
        return [owner.name for owner in self.owners]

    def start_master(self) -> None:
        command = [str(master_binary()), f"--rpc_port={self.port}", "--rpc_address=127.0.0.1"]
        command += ["--enable_http_metadata_server=true", "--http_metadata_server_host=127.0.0.1"]
        command += [f"--http_metadata_server_port={self.metadata_port}"]
        command += [f"--metrics_port={self.admin_port}", "--metrics_host=127.0.0.1"]
        command += [f"--default_kv_lease_ttl={self._lease_ms}"]
        command += [f"--client_ttl={self._client_ttl_s}"]
        command += ["--logtostderr=1"]
        with (self.folder / "master").open("ab") as log:
            self._master = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                preexec_fn=die_with_parent,
            )
        eventually(lambda: self.listed() is not None, START_DEADLINE_S, "the master to answer")

    @property
    def master_pid(self) -> int:
        assert self._master is not None
        return self._master.pid

    def listed(self) -> list[str] | None:
        """The mounted segments, as the master says; None if it does not."""
        try:
            return list(segments(parse_mooncake_url(self.url)))
        except StoreUnavailable:
            return None

    def master_says(self, path: str) -> str:
        """The answer of the master's admin port."""
        return fetch(f"http://127.0.0.1:{self.admin_port}{path}", 5.0).decode()

    def objects(self) -> list[tuple[str, bytes]]:
        """(node, key) of every object, as the master lists them; renews no lease."""
        names = [n for n in self.master_says("/get_all_keys").split() if n.startswith("skv-")]
        pairs = [name[4:].partition("@") for name in names]
        return [(node, bytes.fromhex(key)) for key, _, node in pairs]

    def used(self, name: NodeId) -> int:
        """Bytes of a segment that hold objects."""
        return segments(parse_mooncake_url(self.url))[name].used

    def add_owner(self, size: int) -> Owner:
        owner = Owner(self, size)
        self.owners.append(owner)
        return owner.start()

    def config(self, url: str = "", **keys: object) -> Config:
        store = {"index": "memory://index", "data": url or self.url}
        return parse_config({"store": store, "staging_bytes": 64 << 20, **keys})

    def node(self, name: NodeId | None = None, extra: str = "", **keys: object) -> MooncakeNode:
        """A node of the first owner's segment, or of `name`; extra: more of the URL."""
        url = self.url + extra
        return open_mooncake(url, self.config(url, **keys), self.clock, name or self.names[0])

    def kill_master(self) -> None:
        assert self._master is not None
        self._master.kill()
        self._master.wait(STOP_DEADLINE_S)
        self._master = None

    def pause_master(self) -> None:
        os.kill(self.master_pid, signal.SIGSTOP)

    def resume_master(self) -> None:
        os.kill(self.master_pid, signal.SIGCONT)

    def master_log(self) -> str:
        return (self.folder / "master").read_text(errors="replace")

    def soon(self, seconds: float = 20.0) -> float:
        """A deadline that no sound call reaches."""
        return self.clock.now() + seconds

    def __enter__(self) -> MooncakeCluster:
        try:
            self.start_master()
            for size in self._sizes:
                self.add_owner(size)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        for owner in self.owners:
            owner.stop()
        if self._master is not None:
            self.kill_master()
        shutil.rmtree(self.folder, ignore_errors=True)


def die_with_parent() -> None:
    """Runs in the child between fork and exec. Linux ties it to the thread that forked."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
