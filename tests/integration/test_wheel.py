"""What is shipped: the wheel, installed into an environment of its own, outside the repository."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.architecture import PRODUCT

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = {".py", ".pyi", ".lua", ".proto", ".typed"}


class Installed(NamedTuple):
    """An environment with the wheel, its third-party packages borrowed from this one."""

    wheel: Path
    folder: Path

    def run(self, *command: str, deadline_s: float = 60) -> subprocess.CompletedProcess[str]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        return subprocess.run(
            [str(self.folder / "bin" / command[0]), *command[1:]],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=deadline_s,
        )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    work = tmp_path_factory.mktemp("wheel")
    source = work / "source"
    for top in PRODUCT:
        shutil.copytree(ROOT / top, source / top, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    # A folder that must not be shipped, should somebody go back to finding packages.
    (source / "tests").mkdir()
    (source / "tests" / "__init__.py").touch()
    pip("wheel", "--no-build-isolation", "--no-deps", "-w", str(work), str(source))
    (wheel,) = work.glob("*.whl")
    folder = work / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    pip("--python", str(folder / "bin" / "python"), "install", "--no-deps", str(wheel))
    # As a plain path entry: the .pth files there, such as an editable install's, are not read.
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "third_party.pth").write_text(sysconfig.get_path("purelib") + "\n")
    yield Installed(wheel, folder)


def pip(*arguments: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_everything_of_the_product_and_nothing_else(installed: Installed) -> None:
    names = zipfile.ZipFile(installed.wheel).namelist()
    code = {name for name in names if ".dist-info/" not in name}
    expected = {
        path.relative_to(ROOT).as_posix()
        for top in PRODUCT
        for path in (ROOT / top).rglob("*")
        if path.suffix in SHIPPED and "__pycache__" not in path.parts
    } | {f"{top}/py.typed" for top in PRODUCT}
    assert code == expected
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_imports_come_from_the_wheel(installed: Installed) -> None:
    code = "import connector, store_worker, engine_shim; print(connector.__file__)"
    run = installed.run("python", "-c", code)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(str(installed.folder))


def test_commands_work(installed: Installed) -> None:
    run = installed.run("session-kv", "--help")
    assert run.returncode == 0, run.stderr
    assert "doctor" in run.stdout


def test_embedded_store_works(installed: Installed) -> None:
    """It runs a file of the package as a program."""
    code = (
        "import sys; from store_worker.embedded import start_or_join\n"
        "with start_or_join(sys.argv[1], 1 << 26) as store: print(store.started)"
    )
    run = installed.run("python", "-c", code, str(installed.folder / "e"))
    assert run.stdout == "True\n", run.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_demo_runs_from_the_wheel(installed: Installed) -> None:
    """Two engines and a store, none of which may find anything in the repository."""
    run = installed.run("session-kv", "demo", "--json", deadline_s=240)
    assert run.returncode == 0, run.stdout + run.stderr
    answer = json.loads(run.stdout)
    assert answer["ok"] and len(answer["turns"]) >= 4
    for before, turn in pairwise(answer["turns"]):
        assert turn["engine"] != before["engine"] and turn["equal"]
        assert turn["own_tokens"] + turn["loaded_tokens"] >= turn["need_tokens"] > 0
    assert answer["turns"][1]["loaded_tokens"] > 0
