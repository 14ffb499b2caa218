"""`session-kv`: finding commands, errors as one line, and a quick start."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import types
from importlib import metadata
from pathlib import Path

import pytest

from connector.errors import StoreUnavailable
from store_worker.cli import main as cli
from store_worker.cli import options, output

ROOT = Path(__file__).resolve().parents[2]
# The budget is 0.3 s of a quiet machine; the tests run beside others.
IMPORT_SECONDS_MAX = 0.3


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A command `greet`, known under the module name `greeting`."""
    module = types.ModuleType("greeting")

    def add_parser(subparsers: argparse._SubParsersAction) -> None:
        parser = subparsers.add_parser("greet", help="say hello")
        parser.add_argument("name")
        options.add_json(parser)

    module.add_parser = add_parser  # type: ignore[attr-defined]
    module.run = lambda args: print(f"hello {args.name}") or 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "greeting", module)
    monkeypatch.setattr(cli, "BUILT_IN", {"greet": "greeting", "gone": "no_such_module_at_all"})
    return module


def test_a_command_is_found_and_run(
    command: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["greet", "you"]) == 0
    assert capsys.readouterr().out == "hello you\n"


def test_no_command_prints_help(
    command: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([]) == cli.EXIT_NOT_TRIED
    assert "say hello" in capsys.readouterr().out


def test_a_missing_module_breaks_no_other_command(
    command: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["gone", "--anything", "x"]) == cli.EXIT_NOT_TRIED
    assert "'gone' is not available here" in capsys.readouterr().err
    assert cli.main(["greet", "you"]) == 0


def test_a_missing_module_answers_in_json_where_asked(
    command: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["gone", "--json"]) == cli.EXIT_NOT_TRIED
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is False and "no_such_module_at_all" in answer["error"]


@pytest.mark.parametrize("as_json", [False, True])
def test_errors_of_ours_are_one_line(
    command: types.ModuleType, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    def fail(args: argparse.Namespace) -> int:
        raise StoreUnavailable("nobody there")

    command.run = fail  # type: ignore[attr-defined]
    assert cli.main(["greet", "you", *["--json"] * as_json]) == cli.EXIT_NOT_TRIED
    seen = capsys.readouterr()
    if as_json:
        assert json.loads(seen.out) == {"ok": False, "error": "nobody there"}
    else:
        assert seen.err == "session-kv: nobody there\n" and not seen.out


def test_bugs_are_not_hidden(command: types.ModuleType) -> None:
    def fail(args: argparse.Namespace) -> int:
        raise ZeroDivisionError

    command.run = fail  # type: ignore[attr-defined]
    with pytest.raises(ZeroDivisionError):
        cli.main(["greet", "you"])


def test_an_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["no-such-command"])
    assert end.value.code == 2
    assert "invalid choice" in capsys.readouterr().err


def test_commands_of_other_packages_come_by_entry_point(
    command: types.ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "BUILT_IN", {"gone": "no_such_module_at_all"})
    points = [
        metadata.EntryPoint("greet", "greeting", cli.GROUP),
        metadata.EntryPoint("gone", "greeting", cli.GROUP),  # ours can't be replaced
    ]
    monkeypatch.setattr(metadata, "entry_points", lambda group: points)
    assert cli.main(["greet", "you"]) == 0
    assert cli.main(["gone"]) == cli.EXIT_NOT_TRIED
    assert "hello you" in capsys.readouterr().out


def test_a_known_command_looks_for_no_entry_points(
    command: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "known_commands", lambda: pytest.fail("all modules were looked for"))
    assert cli.main(["greet", "you"]) == 0


@pytest.mark.parametrize(
    ("store", "expected"),
    [
        ("redis://h:1", ("redis://h:1", ("redis://h:1",))),
        ('{"index": "redis://a", "data": ["redis://b", "redis://c"]}',
         ("redis://a", ("redis://b", "redis://c"))),
    ],
)  # fmt: skip
def test_store_option(store: str, expected: tuple[str, tuple[str, ...]]) -> None:
    config = options.config_of(argparse.Namespace(store=store))
    with options.resolved_store(config) as where:
        assert (where.index, where.data) == expected


@pytest.mark.parametrize("store", ["", "http://h", "{", '{"index": "redis://a"}'])
def test_bad_store_option_is_one_line(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--store", store]) == cli.EXIT_NOT_TRIED
    assert capsys.readouterr().err.startswith("session-kv: config key 'store")


def test_store_option_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(options.STORE_ENV, "redis://from-env")
    parser = argparse.ArgumentParser()
    options.add_store(parser)
    assert parser.parse_args([]).store == "redis://from-env"


def test_table_without_rich(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in ("rich", "rich.console", "rich.table", "rich.text"):
        monkeypatch.setitem(sys.modules, module, None)
    output.table("T", ("turn", "equal"), [(1, True), (22, False)])
    assert capsys.readouterr().out.splitlines() == [
        "T", "turn  equal", "----  -----", "1     yes", "22    no",
    ]  # fmt: skip


def test_table_with_rich_shows_every_cell(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    output.table("", ("turn", "note"), [(1, "[bold]as it is[/bold]"), (2, None)])
    assert "[bold]as it is[/bold]" in capsys.readouterr().out


def test_sizes_for_people() -> None:
    assert [output.count_bytes(n) for n in (0, 1023, 1536, 3 << 30)] == [
        "0 B", "1023 B", "1.5 KiB", "3.0 GiB",
    ]  # fmt: skip


def test_json_of_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    output.emit_json({"key": b"\x01\xff"})
    assert json.loads(capsys.readouterr().out) == {"key": "01ff"}


PROBE = """
import sys, time
began = time.process_time()  # what others do on this machine must not count
import {module}
took = time.process_time() - began
heavy = [name for name in {heavy!r} if name in sys.modules]
print(took, *heavy)
"""


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("store_worker.cli.main", ["torch", "redis", "zmq", "numpy", "rich"]),
        ("connector", ["torch", "redis", "zmq", "numpy", "vllm"]),
        ("connector.config", ["torch", "redis", "zmq", "numpy", "vllm"]),
        ("store_worker.embedded", ["torch", "redis", "zmq", "numpy"]),
    ],
)
def test_import_is_quick_and_light(module: str, heavy: list[str]) -> None:
    took = []
    for _ in range(3):
        code = PROBE.format(module=module, heavy=heavy)
        run = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
        )
        seconds, *found = run.stdout.split()
        assert not found
        took.append(float(seconds))
    assert min(took) < IMPORT_SECONDS_MAX


def test_help_imports_nothing_heavy() -> None:
    """`session-kv --help` goes through every command's add_parser."""
    code = (
        "import sys\nfrom store_worker.cli.main import build\nbuild('')\n"
        "print(*[m for m in ('torch', 'redis', 'zmq', 'numpy', 'rich') if m in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == ""
