"""The demos as a person runs them, and that they can fail."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine_shim.demo import COLD, Report, alternate, connector_flag, http_client, running
from engine_shim.demo_processes import store_folder

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 110


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "store_worker.cli.main", *arguments],
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False, cwd=ROOT,
    )  # fmt: skip


@pytest.mark.slow
def test_demo() -> None:
    done = run("demo", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert set(report) == {"ok", "turns"} and report["ok"] is True
    turns = report["turns"]
    assert [turn["engine"] for turn in turns] == ["A", "B", "A", "B"]
    assert [turn["turn"] for turn in turns] == [1, 2, 3, 4]
    assert list(turns[0]) == [
        "turn", "engine", "prompt_tokens", "reply_tokens", "own_tokens", "loaded_tokens",
        "need_tokens", "ttft_s", "equal",
    ]  # fmt: skip
    assert turns[0]["own_tokens"] == turns[0]["loaded_tokens"] == 0
    for turn in turns[1:]:
        assert turn["own_tokens"] + turn["loaded_tokens"] >= turn["need_tokens"] > 300
        assert turn["loaded_tokens"] > 0 and turn["equal"] is True and turn["ttft_s"] > 0


@pytest.mark.slow
def test_demo_pd_as_a_table() -> None:
    done = run("demo", "--pd")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" P0 ") == done.stdout.count(" D0 ") == 4
    assert done.stdout.count("yes") == 4 and "everything as it must be" in done.stdout


@pytest.mark.slow
def test_demo_fails_where_nothing_is_shared() -> None:
    """The same conversation on engines with a store each."""

    async def main() -> Report:
        with store_folder() as one, store_folder() as other:
            flags = {"A": connector_flag(one), "B": connector_flag(other)}
            serve = ("serve", "--port", "0", "--kv-transfer-config")
            commands = {name: (*serve, flag) for name, flag in flags.items()}
            async with running({**commands, "cold": COLD}) as engines, http_client() as http:
                return await alternate(http, engines, 2, lambda text: None)

    report = asyncio.run(main())
    assert not report.ok
    assert [problem.split(": ")[0] for problem in report.problems] == ["turn 2", "turn 2"]
    assert all(turn.equal for turn in report.turns)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("demo", "--turns", "3"), "4 or more"),
        (("serve", "--kv-transfer-config", "{"), "kv-transfer-config"),
        (("serve", "--max-model-len", "0"), "max_model_len"),
        (("serve", "--model", '{"no_such": 1}'), "no_such"),
        (("proxy", "--prefill", "x", "--decode", "y"), "a URL such as"),
    ],
)
def test_bad_arguments_are_one_line(arguments: tuple[str, ...], words: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2 and words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
