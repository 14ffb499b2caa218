"""The examples of docs/SESSIONS.md, run as they stand against the shim."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.shim_server import ShimServer

PAGE = Path(__file__).resolve().parents[2] / "docs" / "SESSIONS.md"
BLOCK = re.compile(r"^```(?P<kind>\w+)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
ADDRESS = "http://127.0.0.1:8000"
TIMEOUT_S = 60


def blocks(kind: str) -> list[str]:
    return [m["code"] for m in BLOCK.finditer(PAGE.read_text()) if m["kind"] == kind]


@pytest.fixture(scope="module")
def shim() -> Iterator[ShimServer]:
    with ShimServer("--enable-session-cache", "--max-model-len", "2048") as server:
        yield server


def run(command: list[str], code: str, url: str) -> str:
    assert ADDRESS in code, "an example names the address that the page promises"
    done = subprocess.run(
        command, input=code.replace(ADDRESS, url), capture_output=True, text=True,
        timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("code", blocks("bash"), ids=lambda code: code.split("\n")[0][:70])
def test_curl_example(shim: ShimServer, code: str) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed; the examples that use it were not run")
    said = run(["bash", "-e", "-u"], code, shim.url)
    if "-D -" in code:
        assert "x-session-id: 7f3c9e52-0d7e-4f6a-9d21-3a1f0c5be8aa" in said.lower()
    elif "close_session" in code:
        assert json.loads(said)["success"] is True
    else:
        assert json.loads(said)


@pytest.mark.parametrize("code", blocks("python"), ids=["turns", "body", "stream"])
def test_openai_example(shim: ShimServer, code: str) -> None:
    said = run([sys.executable, "-"], code, shim.url)
    assert said.strip()
    if "for question" in code:
        cached = [int(line.rsplit(": ", 1)[1]) for line in said.splitlines()]
        assert len(cached) == 3 and cached[0] == 0 and 0 < cached[1] < cached[2]


def test_page_has_examples_of_both_kinds() -> None:
    assert len(blocks("bash")) >= 5 and len(blocks("python")) >= 3


def test_json_of_the_page_is_a_valid_config() -> None:
    from connector.config import parse_config

    for code in blocks("json"):
        assert parse_config(json.loads(code))


def test_closing_frees_what_the_page_says(shim: ShimServer) -> None:
    body = {"model": "shim", "prompt": "x" * 64, "max_tokens": 1, "session_id": "to-close"}
    shim.post("/v1/completions", body)
    assert shim.post("/close_session", {"session_id": "to-close"})["freed_tokens"] == 64
    again = shim.post("/close_session", {"session_id": "to-close"})
    assert again["success"] and again["freed_tokens"] == 0
