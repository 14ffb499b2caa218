"""A guard that is taken out is noticed: every mutation makes each of its tests fail.

The packages and the tests are copied once; the tests pass on that copy (one run of all of them),
then each mutation is applied to it, its tests are run, and it is taken back.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.faults import ROWS
from tests.mutations.mutations import MUTATIONS, VLLM_ONLY, Mutation

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("connector", "store_worker", "engine_shim", "tests")
TEST_TIMEOUT_S = 30
RUN_TIMEOUT_S = 300
PASSED, FAILED = 0, 1

pytestmark = pytest.mark.timeout(600)


class Tree:
    """A copy of the sources that may be spoiled, and the process that runs tests on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in COPIED:
            shutil.copytree(
                ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        shutil.copy(ROOT / "pyproject.toml", folder)
        self._written = 0
        self._runner = subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "mutations" / "runner.py")],
            cwd=folder,
            env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, tests: Sequence[str], deadline_s: float = 60.0) -> tuple[int, str]:
        """pytest's exit code and what it printed. deadline_s: for an effect that may never come."""
        output = self.folder / "output"
        request = {
            "folder": str(self.folder),
            "args": ["-q", "-p", "no:cacheprovider", "--timeout", str(TEST_TIMEOUT_S), *tests],
            "env": {
                "PYTHONPATH": str(self.folder),
                "OMP_NUM_THREADS": "1",
                "SKV_TEST_DEADLINE_S": str(deadline_s),
            },
            "output": str(output),
            "timeout_s": RUN_TIMEOUT_S,
        }
        assert self._runner.stdin is not None and self._runner.stdout is not None
        self._runner.stdin.write(json.dumps(request) + "\n")
        self._runner.stdin.flush()
        code = self._runner.stdout.readline()
        assert code.strip(), "the runner has ended"
        return int(code), output.read_text(encoding="utf-8", errors="replace")

    def close(self) -> None:
        """End the runner."""
        assert self._runner.stdin is not None
        self._runner.stdin.close()
        self._runner.wait(30)

    def write(self, path: str, text: str) -> None:
        """Replace a file. Its time is unlike any before, or compiled code might be taken for it."""
        self._written += 1
        target = self.folder / path
        target.write_text(text, encoding="utf-8")
        os.utime(target, (2_000_000_000 + self._written,) * 2)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tree]:
    """The copy, on which all tests of all mutations pass."""
    found = Tree(tmp_path_factory.mktemp("mutated"))
    tests = sorted({test for mutation in MUTATIONS for test in mutation.tests})
    code, output = found.run(tests)
    assert code == PASSED, f"the tests fail without a mutation:\n{output[-6000:]}"
    yield found
    found.close()


@pytest.fixture
def mutated(tree: Tree, request: pytest.FixtureRequest) -> Iterator[Tree]:
    """The copy with one mutation."""
    mutation: Mutation = request.param
    text = (tree.folder / mutation.path).read_text(encoding="utf-8")
    tree.write(mutation.path, text.replace(mutation.old, mutation.new))
    yield tree
    tree.write(mutation.path, text)


CASES = [pytest.param(m, m, id=m.name.replace(" ", "-")) for m in MUTATIONS]


@pytest.mark.parametrize(("mutated", "mutation"), CASES, indirect=["mutated"])
def test_it_is_noticed(mutated: Tree, mutation: Mutation) -> None:
    code, output = mutated.run(mutation.tests, deadline_s=4.0)
    # Another code says that the tests could not be run at all, which proves nothing.
    assert code == FAILED, f"exit code {code}:\n{output[-6000:]}"
    blind = [test for test in mutation.tests if test not in failed_tests(output)]
    assert not blind, f"these tests pass without the guard: {blind}\n{output[-6000:]}"


def failed_tests(output: str) -> set[str]:
    """Tests of which pytest says FAILED, with and without their parameters."""
    names = {
        line.split(" ", 1)[1].split(" - ")[0].strip()
        for line in output.splitlines()
        if line.startswith("FAILED ")
    }
    functions = {name.partition("[")[0] for name in names}
    return names | functions | {name.partition("::")[0] for name in names}


def test_the_copy_is_what_is_tested(tree: Tree) -> None:
    """Not an installed package, nor the sources themselves."""
    probe = "import sys, pathlib\n" + "".join(f"import {name}\n" for name in COPIED)
    probe += "def test_where():\n    here = str(pathlib.Path.cwd())\n"
    probe += f"    for name in {COPIED!r}:\n"
    probe += "        assert sys.modules[name].__file__.startswith(here), sys.modules[name]\n"
    (tree.folder / "tests" / "test_probe.py").write_text(probe, encoding="utf-8")
    code, output = tree.run(["tests/test_probe.py"])
    assert code == PASSED and str(tree.folder) != str(ROOT), output


def test_a_mutation_that_changes_nothing_would_be_noticed(tree: Tree) -> None:
    """The proof of this file itself: unspoiled, the tests do not fail."""
    code, _ = tree.run(MUTATIONS[0].tests)
    assert code == PASSED


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name.replace(" ", "-"))
def test_it_applies(mutation: Mutation) -> None:
    text = (ROOT / mutation.path).read_text(encoding="utf-8")
    assert text.count(mutation.old) == 1 and mutation.old != mutation.new
    compile(text.replace(mutation.old, mutation.new), mutation.path, "exec")


def test_every_guard_of_the_table_is_taken_out_somewhere() -> None:
    """Rows of tests/faults.py: here, or on vLLM with the row's own mutant."""
    here = {row for mutation in MUTATIONS for row in mutation.rows}
    rows = {row.number for row in ROWS}
    assert here | set(VLLM_ONLY) == rows and not here & set(VLLM_ONLY)
    assert [m.name for m in MUTATIONS if Counter(x.name for x in MUTATIONS)[m.name] > 1] == []
