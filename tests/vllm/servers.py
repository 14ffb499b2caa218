"""vLLM servers for the tests: several started at once, ready by a deadline, gone for sure.

Each server is a process group of its own (API server, engine core, workers), with its log in a
file that is shown when it fails. Thread: any; a server belongs to one test session.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.servers import free_port
from tests.vllm import tiny_model
from tests.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
READY_DEADLINE_S = 240.0
STOP_DEADLINE_S = 20.0
LOG_TAIL_LINES = 60
TOKENS_PER_BLOCK = 32
MODEL_NAME = "tiny"
# A conversation's digest and its jobs are only in the debug log of the store thread.
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "%(levelname)s %(name)s %(message)s"}},
    "handlers": {"out": {"class": "logging.StreamHandler", "formatter": "line"}},
    "loggers": {
        "vllm": {"level": "INFO", "handlers": ["out"], "propagate": False},
        "vllm.session_kv": {"level": "DEBUG", "propagate": True},
        "connector": {"level": "DEBUG", "handlers": ["out"], "propagate": False},
        "store_worker": {"level": "DEBUG", "handlers": ["out"], "propagate": False},
    },
}


# Deadlines for a machine that runs several engines on few cores. A test that times out a lookup or
# a call to the index sets its own; that the printed flag alone is enough is shown without these.
PATIENCE: dict[str, object] = {"lookup_deadline_s": 20.0, "index_timeout_s": 20.0}


def transfer_config(store: object, **extra: object) -> dict[str, object]:
    """The value of `--kv-transfer-config` as the README prints it, with this store."""
    return {
        "kv_connector": "SessionKVConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"store": store, **extra},
    }


@dataclass(frozen=True)
class Spec:
    """What a server is started with. transfer None: no connector. blocks: cache pages."""

    name: str
    transfer: Mapping[str, object] | None = None
    blocks: int = 1024
    flags: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    def command(self, port: int) -> list[str]:
        """The command line; `vllm serve` by its module, since the script wants another wheel."""
        model = tiny_model.ensure()
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(model.folder), "--served-model-name", MODEL_NAME]
        command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
        command += ["--enforce-eager", "--block-size", str(TOKENS_PER_BLOCK), "--seed", "0"]
        command += ["--max-model-len", str(tiny_model.MAX_TOKENS), "--max-num-seqs", "64"]
        command += ["--num-gpu-blocks-override", str(self.blocks)]
        command += ["--enable-prompt-tokens-details", "--trust-request-chat-template"]
        command += ["--disable-uvicorn-access-log", *self.flags]
        if self.transfer is not None:
            command += ["--kv-transfer-config", json.dumps(self.transfer)]
        return command

    def environment(self, folder: Path) -> dict[str, str]:
        """The process environment: offline, unbound threads, the development endpoints on."""
        (folder / "logging.json").write_text(json.dumps(LOGGING))
        return {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "VLLM_LOGGING_CONFIG_PATH": str(folder / "logging.json"),
            "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # Bound threads of several servers would all sit on the same core.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            # Otherwise the first request with logprobs waits for a C++ compiler.
            "TORCHDYNAMO_DISABLE": "1",
            "HF_HUB_OFFLINE": "1",
            **self.env,
        }


class VllmServer:
    """One server. `launch` returns at once, `wait_ready` when it answers."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.port = free_port()
        self.folder = Path(tempfile.mkdtemp(prefix=f"vllm-{spec.name}-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._http = httpx.Client(base_url=self.url, timeout=60)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the API server, which is also the id of the group."""
        assert self._process is not None, f"{self.spec.name} was not launched"
        return self._process.pid

    def launch(self) -> VllmServer:
        """Start it, without waiting."""
        assert self._process is None, f"{self.spec.name} was launched before"
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self.spec.command(self.port),
                cwd=self.folder,
                env=self.spec.environment(self.folder),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # No session of its own: Linux schedules sessions against each other (autogroups),
                # and vLLM's yielding processes were seen to starve the others for seconds.
                process_group=0,
            )
        return self

    def wait_ready(self, deadline_s: float = READY_DEADLINE_S) -> VllmServer:
        """Return once /health answers. Raises AssertionError with the log's end if it doesn't."""
        try:
            eventually(self._healthy, deadline_s, f"server {self.spec.name}", again_s=0.2)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.tail()}") from None
        return self

    def _healthy(self) -> bool:
        code = self.exit_code()
        assert code is None, f"server {self.spec.name} ended with {code}"
        try:
            return self._http.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll() if self._process is not None else None

    def wait_exit(self, deadline_s: float) -> int:
        """Its exit code, once it has ended by itself."""
        assert self._process is not None
        return self._process.wait(deadline_s)

    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def tail(self) -> str:
        """The end of the log, for messages."""
        lines = self.log().splitlines()[-LOG_TAIL_LINES:]
        return "\n".join([f"---- log of {self.spec.name} ----", *lines, "----"])

    def signal(self, which: signal.Signals) -> None:
        """Send a signal to the API server only, as a supervisor would."""
        os.kill(self.pid, which)

    def group(self) -> list[int]:
        """Living processes of the server's group."""
        if self._process is None:
            return []
        self._process.poll()
        return [pid for pid in _process_ids() if _group_of(pid) == self._process.pid]

    def stop(self) -> None:
        """End the whole group and remove its files. May be called twice."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(STOP_DEADLINE_S)
            eventually(lambda: not self.group(), STOP_DEADLINE_S, f"the end of {self.spec.name}")
            self._process = None
        self._http.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- what the server knows of itself ----------------------------------------------------------

    def reset_local_cache(self, external: bool = False) -> bool:
        """Empty the engine's own prefix cache. False while anything holds a block of it."""
        answer = self._http.post(
            "/reset_prefix_cache", params={"reset_external": str(external).lower()}
        )
        answer.raise_for_status()
        return bool(answer.json().get("success", True)) if answer.content else True

    def metrics(self, prefix: str = "vllm:") -> dict[str, float]:
        """Sum over labels of every metric that starts with `prefix`."""
        found: dict[str, float] = {}
        for line in self._http.get("/metrics").text.splitlines():
            if line.startswith(prefix):
                name, _, value = line.partition(" ") if "{" not in line else _labelled(line)
                found[name] = found.get(name, 0.0) + float(value)
        return found

    def metric_lines(self, text: str) -> list[str]:
        """Lines of /metrics that contain `text`."""
        return [x for x in self._http.get("/metrics").text.splitlines() if text in x]

    def troubles(self) -> str:
        """What the connector declined, missed or lost so far, for messages."""
        words = ("declined", "late", "unavailable", "failed", "full", "forgotten", "invalid")
        lines = [x for x in self.metric_lines("session_kv_") if any(w in x for w in words)]
        return "\n".join(x for x in lines if not x.startswith("#") and "_created" not in x)

    def idle(self) -> bool:
        """No request is running or waiting."""
        found = self.metrics()
        return not (found["vllm:num_requests_running"] or found["vllm:num_requests_waiting"])


def _labelled(line: str) -> tuple[str, str, str]:
    name, _, rest = line.partition("{")
    return name, "", rest.rpartition("} ")[2]


def _process_ids() -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            yield int(entry.name)


def _group_of(pid: int) -> int:
    """Process group, or 0 if the process is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] == "Z" else int(fields[2])


@contextlib.contextmanager
def running(*specs: Spec) -> Iterator[list[VllmServer]]:
    """Servers started at once, all ready; all stopped at the end, whatever happens."""
    made = [VllmServer(spec) for spec in specs]
    try:
        for server in made:
            server.launch()
        for server in made:
            server.wait_ready()
        yield made
    finally:
        for server in made:
            server.stop()
