"""Entry point of `session-kv`: finds the command, runs it, turns errors into one line.

Commands of this package are in `BUILT_IN`. Other packages add theirs with an entry point in the
group `session_kv.commands` (command name -> module), so that nothing is imported from here that
this package must not know. A command whose module can't be imported is listed as unavailable; it
breaks no other.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from connector.errors import SessionKVError

GROUP = "session_kv.commands"
BUILT_IN: Mapping[str, str] = {
    "doctor": "store_worker.cli.doctor",
    "close": "store_worker.cli.close",
    "sessions": "store_worker.cli.inspect",
    "session": "store_worker.cli.inspect",
    "nodes": "store_worker.cli.inspect",
    "namespaces": "store_worker.cli.inspect",
    "verify": "store_worker.cli.inspect",
    "drain": "store_worker.cli.inspect",
    "replay": "store_worker.cli.replay",
}
EXIT_NO, EXIT_NOT_TRIED, EXIT_INTERRUPTED = 1, 2, 130

Subparsers = Any  # argparse gives this type no public name
Run = Callable[[argparse.Namespace], int]


class Command(Protocol):
    """A command module."""

    def add_parser(self, subparsers: Subparsers) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser, runs = build(arguments[0] if arguments else "")
    args = parser.parse_args(arguments)
    if args.command is None:
        parser.print_help()
        return EXIT_NOT_TRIED
    run = getattr(args, "run", None) or runs[args.command]
    try:
        return run(args)
    except SessionKVError as error:
        report(str(error), getattr(args, "json", False))
        return EXIT_NOT_TRIED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has gone. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_NO


def report(message: str, as_json: bool) -> None:
    """The one line that says why a command could not be tried."""
    if as_json:
        print(json.dumps({"ok": False, "error": message}))
    else:
        print(f"session-kv: {message}", file=sys.stderr)


def build(wanted: str) -> tuple[argparse.ArgumentParser, dict[str, Run]]:
    """The parser, and what runs each command. Only `wanted`'s module if it is known, else all."""
    parser = argparse.ArgumentParser(
        prog="session-kv", description="Operate a store of conversations' KV cache."
    )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    modules = {wanted: BUILT_IN[wanted]} if wanted in BUILT_IN else known_commands()
    runs: dict[str, Run] = {}
    for module_name in dict.fromkeys(modules.values()):
        names = [name for name, module in modules.items() if module == module_name]
        runs |= add_module(subparsers, module_name, names)
    return parser, runs


def known_commands() -> dict[str, str]:
    """Command name -> module: ours, then those of the entry points (which can't replace ours)."""
    from importlib.metadata import entry_points

    found = {point.name: point.value for point in entry_points(group=GROUP)}
    return found | dict(BUILT_IN)


def add_module(subparsers: Subparsers, module_name: str, names: Sequence[str]) -> dict[str, Run]:
    """Add a module's commands, or, if it can't be imported, stand-ins that say so."""
    before = set(subparsers.choices)
    try:
        command: Command = importlib.import_module(module_name)  # type: ignore[assignment]
        command.add_parser(subparsers)
    except ImportError as error:
        return {name: unavailable(subparsers, name, error) for name in names}
    return dict.fromkeys(set(subparsers.choices) - before, command.run)


def unavailable(subparsers: Subparsers, name: str, error: ImportError) -> Run:
    """A command that only says why it can't be had, whatever its arguments."""
    parser = subparsers.add_parser(
        name,
        help=f"(not available: {error})",
        add_help=False,
        prefix_chars="\0",  # nothing is an option: all of it is `rest`
    )
    parser.add_argument("rest", nargs="*")

    def run(args: argparse.Namespace) -> int:
        message = f"the command {name!r} is not available here: {error}"
        report(message, "--json" in args.rest)
        return EXIT_NOT_TRIED

    return run


if __name__ == "__main__":
    sys.exit(main())
