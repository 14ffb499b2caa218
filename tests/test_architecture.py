"""The build fails on a wrong import, a size over the limit, or something banned (DESIGN rules)."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.architecture import (
    CHECKERS,
    PRODUCT,
    Allowed,
    Finding,
    Source,
    check,
    load_tree,
)

ROOT = Path(__file__).resolve().parent.parent

# The only way around a rule: one row, found by all, with its reason.
EXCEPTIONS: tuple[Allowed, ...] = (
    Allowed(
        "import",
        "connector/plugin.py",
        "vllm.distributed.kv_transfer.kv_connector.factory.KVConnectorFactory",
        "it registers the adapter by name, inside the function that vLLM itself calls",
    ),
    Allowed(
        "thread",
        "engine_shim/proxy_store.py",
        "asyncio.to_thread",
        "the proxy has no executor: index calls leave the event loop one at a time",
    ),
)


@cache
def tree() -> tuple[Source, ...]:
    return tuple(load_tree(ROOT))


@cache
def findings_of_the_tree() -> tuple[Finding, ...]:
    return tuple(finding for source in tree() for finding in check(source))


def test_tree_keeps_the_rules() -> None:
    left = [f for f in findings_of_the_tree() if not any(row.covers(f) for row in EXCEPTIONS)]
    assert not left, "\n" + "\n".join(map(str, left))


def test_every_exception_is_needed() -> None:
    found = findings_of_the_tree()
    stale = [row for row in EXCEPTIONS if not any(row.covers(f) for f in found)]
    assert not stale, f"rows that nothing needs any more: {stale}"
    assert all(row.reason for row in EXCEPTIONS)


def test_an_exception_covers_its_own_finding_only() -> None:
    row = Allowed("print", "connector/ids.py", "print", "why")
    assert row.covers(Finding("print", "connector/ids.py", 3, "print", ""))
    assert not row.covers(Finding("print", "connector/meta.py", 3, "print", ""))
    assert not row.covers(Finding("clock", "connector/ids.py", 3, "print", ""))
    assert not row.covers(Finding("print", "connector/ids.py", 3, "other", ""))


def test_the_tree_is_really_read() -> None:
    paths = {source.path for source in tree()}
    assert {"connector/ids.py", "tests/test_architecture.py"} <= paths


# (rule, path, code): each must be found. Every rule has at least one row (see the test below).
BAD: tuple[tuple[str, str, str], ...] = (
    ("import", "connector/ids.py", "import torch"),
    ("import", "connector/config.py", "from connector.tracker import RequestTracker"),
    ("import", "connector/meta.py", "from connector import tracker"),
    ("import", "connector/meta.py", "from .tracker import RequestTracker"),
    ("import", "connector/tracker.py", "def f():\n    import redis"),
    ("import", "connector/tracker.py", "import zmq"),
    ("import", "connector/planner.py", "from store_worker.keys import key"),
    ("import", "connector/scheduler.py", "from connector.vllm_adapter import SessionKVConnector"),
    ("import", "connector/scheduler.py", "from vllm.logger import init_logger"),
    ("import", "connector/scheduler.py", "from connector.vllm_facts import facts"),
    ("import", "connector/vllm_facts.py", "from vllm.config import VllmConfig"),
    ("import", "connector/plugin.py", "import vllm"),
    ("import", "connector/vllm_adapter.py", "from engine_shim.request import Request"),
    ("import", "connector/vllm_adapter.py", "import tests.servers"),
    ("import", "store_worker/worker.py", "from connector.scheduler import Scheduler"),
    ("import", "store_worker/worker.py", "from connector import ports"),
    ("import", "store_worker/cli/main.py", "import engine_shim.cli"),
    ("import", "store_worker/cli/main.py", "import importlib\nimportlib.import_module('vllm')"),
    ("import", "store_worker/index/redis.py", "from vllm import envs"),
    ("import", "engine_shim/engine.py", "from store_worker.worker import StoreWorker"),
    ("import", "engine_shim/engine.py", "from connector.tracker import RequestTracker"),
    ("import", "engine_shim/cli.py", "from store_worker.worker import StoreWorker"),
    ("import", "engine_shim/wiring.py", "import vllm"),
    ("file-lines", "connector/a.py", '"""Doc."""\n' + "x = 1\n" * 400),
    ("file-lines", "tests/unit/test_a.py", "x = 1\n" * 601),
    ("function-lines", "connector/a.py", "def f():\n" + "    x = 1\n" * 60),
    ("function-lines", "tests/a.py", "class A:\n  async def f(self):\n" + "    x = 1\n" * 60),
    ("parameters", "connector/a.py", "def f(a, b, c, /, d, *, e, f, g): ..."),
    ("parameters", "connector/a.py", "class A:\n    def f(self, a, b, c, d, e, f, g): ..."),
    ("line-chars", "connector/a.py", "x = '" + "y" * 95 + "'"),
    ("line-chars", "connector/a.py", "x = '" + "y" * 95 + "'  # type: ignore[arg-type]"),
    ("line-chars", "connector/a.py", "x = 1  # type: ignore " + "y" * 95 + " # so"),
    ("queue", "store_worker/a.py", "import queue\nq = queue.Queue()"),
    ("queue", "store_worker/a.py", "import queue\nq = queue.Queue(maxsize=0)"),
    ("queue", "store_worker/a.py", "from queue import PriorityQueue as Q\nq = Q()"),
    ("queue", "store_worker/a.py", "from queue import SimpleQueue\nq = SimpleQueue()"),
    ("queue", "engine_shim/a.py", "import asyncio\nq = asyncio.Queue()"),
    ("queue", "engine_shim/a.py", "import asyncio\nq: object = asyncio.Queue(-1)"),
    ("queue", "engine_shim/a.py", "from collections import deque\nq = deque()"),
    ("queue", "engine_shim/a.py", "import collections\nq = collections.deque([], None)"),
    ("thread", "store_worker/a.py", "import threading\nthreading.Thread(target=f).start()"),
    ("thread", "store_worker/a.py", "from threading import Timer as T\nT(1, f)"),
    ("thread", "store_worker/a.py", "import threading\nclass A(threading.Thread): ..."),
    ("thread", "store_worker/a.py", "from concurrent.futures import ThreadPoolExecutor as P\nP()"),
    ("thread", "engine_shim/a.py", "import asyncio\nasync def f(): await asyncio.to_thread(g)"),
    ("thread", "engine_shim/a.py", "async def f(loop): await loop.run_in_executor(None, g)"),
    ("clock", "store_worker/a.py", "import time\nnow = time.monotonic()"),
    ("clock", "store_worker/a.py", "from time import perf_counter as now\nnow()"),
    ("clock", "store_worker/a.py", "import time as t\nclock = t.time"),
    ("clock", "store_worker/a.py", "from datetime import datetime\ndatetime.now()"),
    ("clock", "engine_shim/a.py", "import time\ntime.sleep(1)"),
    ("clock", "tests/unit/test_a.py", "import time\ntime.sleep(0.1)"),
    ("print", "store_worker/worker.py", "print('x')"),
    ("print", "engine_shim/engine.py", "def f():\n    print('x')"),
    ("docstring", "store_worker/a.py", "x = 1"),
)

# (path, code): nothing may be found.
GOOD: tuple[tuple[str, str], ...] = (
    ("connector/meta.py", "import msgspec, enum\nfrom connector.ids import JobId"),
    ("connector/meta.py", "from . import ids"),
    ("connector/tracker.py", "from connector.ports import LookupPort\nfrom .ids import JobId"),
    ("connector/vllm_adapter.py", "import vllm\nfrom store_worker.worker import W"),
    ("connector/vllm_adapter.py", "from connector.scheduler import S\nimport torch"),
    ("connector/vllm_facts.py", "from store_worker.keys import NamespaceSpec"),
    ("store_worker/worker.py", "import torch, redis\nfrom connector.meta import LoadSpec"),
    ("engine_shim/wiring.py", "from store_worker.worker import W\nfrom connector.tracker import T"),
    ("engine_shim/frontend/app.py", "from connector.session import resolve_session_id"),
    ("engine_shim/cli.py", "from store_worker.cli.output import table\nprint(1)"),
    ("engine_shim/cli.py", "from store_worker.embedded import start_or_join"),
    ("store_worker/a.py", "import queue\nq = queue.Queue(4)\np = queue.Queue(maxsize=limits.jobs)"),
    ("store_worker/a.py", "from collections import deque\nq = deque(maxlen=8)\np = deque([], 8)"),
    ("store_worker/a.py", "from collections import deque\n# bounded: by Limits.jobs\nq = deque()"),
    ("store_worker/executor.py", "import threading\nthreading.Thread(target=f)"),
    ("store_worker/a.py", "import threading\ndef f(t: threading.Thread) -> None: t.join(1)"),
    ("connector/clock.py", "import time\ntime.monotonic()"),
    ("store_worker/a.py", "def f(clock): return clock.now() + clock.time"),
    ("tests/waiting.py", "import time\ntime.sleep(0.01)"),
    ("tests/unit/test_a.py", "import time, threading\ntime.monotonic()\nthreading.Thread()"),
    ("store_worker/cli/doctor.py", "print('x')"),
    ("store_worker/_private.py", "x = 1"),
    ("store_worker/backends/__init__.py", ""),
    ("connector/a.py", "def f():\n" + "    x = 1\n" * 59),
    ("connector/a.py", "x = '" + "y" * 90 + "'  # type: ignore[arg-type]"),
    ("connector/a.py", "class A:\n    def f(self, a, b, c, d, e, f): ..."),
    ("connector/a.py", '"""Doc."""\n' + "x = 1\n" * 390),
)


def rules_found(path: str, code: str) -> set[str]:
    return {finding.rule for finding in check(Source.parse(path, code))}


@pytest.mark.parametrize(("rule", "path", "code"), BAD)
def test_breach_is_found(rule: str, path: str, code: str) -> None:
    assert rule in rules_found(path, code)


@pytest.mark.parametrize(("path", "code"), GOOD)
def test_good_code_passes(path: str, code: str) -> None:
    assert rules_found(path, code) <= {"docstring"}


def test_every_checker_has_a_bad_snippet() -> None:
    sources = [Source.parse(path, code) for _, path, code in BAD]
    blind = [c.__name__ for c in CHECKERS if not any(list(c(source)) for source in sources)]
    assert not blind


def test_pyproject_lists_every_package_and_nothing_else() -> None:
    listed = set(pyproject()["tool"]["setuptools"]["packages"])
    assert listed == set(packages_on_disk())
    assert not any(name.split(".")[0] not in PRODUCT for name in listed)


def test_every_package_is_a_package() -> None:
    """A folder without __init__.py imports from the tree but is lost to type checkers."""
    folders = [ROOT / name.replace(".", "/") for name in packages_on_disk()]
    assert not [folder for folder in folders if not (folder / "__init__.py").is_file()]


def test_top_level_packages_are_marked_typed() -> None:
    assert all((ROOT / top / "py.typed").is_file() for top in PRODUCT)


def pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def packages_on_disk() -> Iterator[str]:
    """Every folder of the product that holds a Python file."""
    for top in PRODUCT:
        folders = {path.parent for path in (ROOT / top).rglob("*.py")}
        yield from (".".join(folder.relative_to(ROOT).parts) for folder in sorted(folders))
