"""`session-kv replay TRACE`: what a store of a given size would have done on a recorded load.

Drives the product's own index, placement and policy on virtual time; no server, no engine, no
bytes. Exit code 0; a trace or an option that can't be used ends with one line and code 2.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from connector.errors import ConfigError
from store_worker.cli.options import add_json

if TYPE_CHECKING:
    from store_worker.replay.report import Result, Setup
    from store_worker.replay.trace import Request

CAPACITIES = (1_000, 3_000, 10_000, 30_000, 50_000)
POLICIES = ("return", "lru")
CAPACITY_ALONE = 10_000

Told = Callable[[int], None]


def add_parser(subparsers: Any) -> None:
    """Adds `replay`."""
    parser = subparsers.add_parser(
        "replay",
        help="replay a request trace against index, placement and policy, on virtual time",
        description="Replays a JSONL trace (timestamp, input_length, hash_ids, and session_id if"
        " there) and prints hit rates, writes, evictions and the load of each node.",
    )
    add = parser.add_argument
    add("trace", metavar="TRACE", type=Path)
    add("--capacity-blocks", metavar="N[,N...]", type=_numbers, default=None,
        help="blocks of all nodes together; several with --compare (default:"
        f" {CAPACITY_ALONE}; with --compare {','.join(map(str, CAPACITIES))})")  # fmt: skip
    add("--nodes", metavar="K", type=_positive, default=1)
    add("--placement", choices=("session", "block"), default="session",
        help="`block` is per-block hashing, for comparison")  # fmt: skip
    add("--policy", metavar="NAME[,NAME...]", default="",
        help="return, lru, or module:Class; several with --compare"
        " (default: return; with --compare return,lru)")  # fmt: skip
    add("--block-tokens", metavar="N", type=_positive, default=512,
        help="tokens of one block of the trace (default 512)")  # fmt: skip
    add("--end-hints", metavar="SHARE", type=_share, default=0.0,
        help="share (0..1) of the sessions whose last turn says that it is the last")  # fmt: skip
    add("--lose-node", metavar="I@SECONDS", type=_loss, default=None,
        help="node number I (from 0) loses its data that long after the trace's start")  # fmt: skip
    add("--seed", metavar="N", type=int, default=0, help="chooses the sessions of --end-hints")
    add("--compare", action="store_true", help="run every policy at every capacity")
    add("--html", metavar="OUT", type=Path, default=None,
        help="also write one self-contained page with plots")  # fmt: skip
    add_json(parser)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{value} is not between 0 and 1")
    return value


def _loss(text: str) -> tuple[int, float]:
    node, at, seconds = text.partition("@")
    try:
        found = int(node), float(seconds)
    except ValueError:
        found = -1, -1.0
    if not at or found[0] < 0 or found[1] < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form I@SECONDS, such as 1@600")
    return found


def run(args: argparse.Namespace) -> int:
    """Replay, print, draw."""
    setups = grid(args)
    if args.html is not None:
        from store_worker.replay import page

        page.check()
    from store_worker.replay import trace

    requests = trace.read(args.trace, args.block_tokens)
    results = replay_all(requests, setups)
    if args.html is not None:
        args.html.write_text(page.page(args.trace.name, results), encoding="utf-8")
    show(args, results)
    return 0


def grid(args: argparse.Namespace) -> list[Setup]:
    """The runs that the options ask for. Raises ConfigError."""
    from store_worker.policy import make_policy
    from store_worker.replay.report import Setup

    capacities = args.capacity_blocks or (CAPACITIES if args.compare else (CAPACITY_ALONE,))
    policies = tuple(filter(None, args.policy.split(","))) or POLICIES[: 2 if args.compare else 1]
    if not args.compare and len(capacities) * len(policies) > 1:
        asked = f"{args.policy or policies[0]} at {','.join(map(str, capacities))}"
        raise ConfigError("replay", asked, "one run", "add --compare to run several")
    if min(capacities) < args.nodes:
        raise ConfigError("nodes", args.nodes, f"at most {min(capacities)}, a block per node")
    if args.lose_node is not None and args.lose_node[0] >= args.nodes:
        raise ConfigError("lose-node", args.lose_node[0], f"a node from 0 to {args.nodes - 1}")
    for name in policies:
        make_policy(name)
    return [
        Setup(
            capacity_blocks=capacity,
            nodes=args.nodes,
            placement=args.placement,
            policy=name,
            tokens_per_block=args.block_tokens,
            end_hints=args.end_hints,
            lose=args.lose_node,
            seed=args.seed,
        )
        for name in policies
        for capacity in capacities
    ]


def replay_all(requests: Sequence[Request], setups: Sequence[Setup]) -> list[Result]:
    """The runs, one after the other, with a progress bar if standard error is a terminal."""
    from store_worker.replay.engine import run as run_one

    results: list[Result] = []
    with progress(len(requests) * len(setups)) as tell:
        for number, setup in enumerate(setups):
            results.append(run_one(requests, setup, _after(number * len(requests), tell)))
    return results


def _after(before: int, tell: Told) -> Told:
    return lambda done: tell(before + done)


@contextlib.contextmanager
def progress(total: int) -> Iterator[Told]:
    """Something to tell how far it is."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        yield lambda done: None
        return
    console = Console(file=sys.stderr)
    columns = (TextColumn("replay"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"),
               TimeRemainingColumn())  # fmt: skip
    quiet = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=quiet) as bar:
        task = bar.add_task("replay", total=total)
        yield lambda done: bar.update(task, completed=done)


def show(args: argparse.Namespace, results: Sequence[Result]) -> None:
    """One object for one run; `runs` and the trace's name for a grid."""
    from store_worker.cli.output import emit_json, table

    if args.json:
        rows = [flat(result) for result in results]
        emit_json({"trace": args.trace.name, "runs": rows} if args.compare else rows[0])
    elif args.compare:
        table("", COMPARED, [compared(result) for result in results])
    else:
        pairs = [(name, _words(value)) for name, value in flat(results[0]).items()]
        table("", ("", args.trace.name), pairs)


COMPARED = ("policy", "blocks", "hit %", "written", "declined", "nodes", "lost %", "s")


def compared(result: Result) -> tuple[object, ...]:
    """A run's row of the comparison. nodes: per load; lost: of the hits, with a node."""
    setup, lost = result.setup, result.hit_share_lost_on_node_loss
    return (
        setup.policy, setup.capacity_blocks, f"{100 * result.usable_hit_rate:.2f}",
        result.blocks_written, result.blocks_declined, f"{result.nodes_per_load.mean:.2f}",
        f"{100 * lost.mean:.1f}", f"{result.seconds:.1f}",
    )  # fmt: skip


def flat(result: Result) -> dict[str, Any]:
    """A run as one JSON object: what was asked for, then what came out."""
    import msgspec

    fields: dict[str, Any] = msgspec.to_builtins(result)
    setup: dict[str, Any] = fields.pop("setup")
    return setup | fields


def _words(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_words(part)}" for name, part in value.items())
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)
