"""`session-kv sessions | session | nodes | namespaces | verify | drain`: what is in a store.

Exit code 0; 1 where the answer is "no" (no such session or node, something is wrong); 2 if the
store can't be asked. `--json` prints one value for programs.
"""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from store_worker.cli.options import add_json, add_store, add_tenant, config_of, resolved_store

if TYPE_CHECKING:
    from connector.config import Config, StoreConfig
    from connector.indexmsg import SessionState
    from store_worker.index.base import SessionIndex
    from store_worker.verify import Report

COMMANDS = {
    "sessions": "list the stored conversations, oldest first",
    "session": "where one conversation lives and how much of it is stored",
    "nodes": "the data nodes and what they hold",
    "namespaces": "which models' KV is stored",
    "verify": "compare the index with what the data nodes hold",
    "drain": "empty a node that is to leave: new blocks avoid it",
}


def add_parser(subparsers: Any) -> None:
    """Adds all six."""
    for name, text in COMMANDS.items():
        parser = subparsers.add_parser(name, help=text, description=text.capitalize() + ".")
        parser.set_defaults(inspect=name)
        add_store(parser)
        add_json(parser)
        if name == "session":
            parser.add_argument("session", metavar="SESSION", help="the id as the clients send it")
            add_tenant(parser)
        if name == "sessions":
            parser.add_argument("--limit", type=int, default=100, help="at most so many (100)")
        if name == "verify":
            parser.add_argument(
                "--repair",
                action="store_true",
                help="delete orphans, forget what is lost, take left-over expiries off",
            )
        if name == "drain":
            parser.add_argument("node", metavar="NODE", help="as `session-kv nodes` names it")
            parser.add_argument("--off", action="store_true", help="take blocks again")


def run(args: argparse.Namespace) -> int:
    """One of the six. Raises ConfigError, StoreError, SessionIdError."""
    from store_worker.index import open_index

    config = config_of(args)
    with resolved_store(config) as store:
        index = open_index(store.index, config)
        answer: Callable[[argparse.Namespace, SessionIndex, Config, StoreConfig], int] = {
            "sessions": _sessions,
            "session": _session,
            "nodes": _nodes,
            "namespaces": _namespaces,
            "verify": _verify,
            "drain": _drain,
        }[args.inspect]
        return answer(args, index, config, store)


def _session_row(state: SessionState) -> dict[str, object]:
    return {
        "session": state.session.hex(),
        "generation": state.generation,
        "home": state.home,
        "blocks": state.blocks,
        "tokens": state.tokens,
        "turns": state.turns,
        "last_use_ms": state.last_use_ms,
        "pinned_until_ms": state.pinned_until_ms,
        "priority": state.priority,
        "engines": list(state.engines),
    }


def _time(ms: int) -> str:
    """Local time, or nothing."""
    if not ms:
        return ""
    return datetime.datetime.fromtimestamp(ms / 1000).strftime("%Y-%m-%d %H:%M:%S")


def _show_sessions(rows: list[dict[str, Any]], title: str) -> None:
    from store_worker.cli.output import table

    table(
        title,
        ("session", "home", "tokens", "turns", "last use", "engines"),
        [
            (
                row["session"][:16],
                row["home"],
                row["tokens"],
                row["turns"],
                _time(row["last_use_ms"]),
                ", ".join(row["engines"]),
            )
            for row in rows
        ],
    )


def _sessions(
    args: argparse.Namespace, index: SessionIndex, config: Config, store: StoreConfig
) -> int:
    from store_worker.cli.output import emit_json

    rows: list[dict[str, Any]] = []
    cursor = 0
    while len(rows) < args.limit:
        cursor, page = index.sessions(cursor, min(100, args.limit - len(rows)))
        rows += map(_session_row, page)
        if not cursor:
            break
    if args.json:
        emit_json({"sessions": rows, "more": bool(cursor)})
    else:
        more = " (more: raise --limit)" if cursor else ""
        _show_sessions(rows, f"{len(rows)} sessions, by the digest of their id{more}")
    return 0


def _session(
    args: argparse.Namespace, index: SessionIndex, config: Config, store: StoreConfig
) -> int:
    from store_worker.cli.output import emit_json
    from store_worker.inspect import key_of

    state = index.session(key_of(index, config, args.session, args.cache_salt))
    if args.json:
        emit_json(None if state is None else _session_row(state))
    elif state is None:
        print(f"no session {args.session!r} of tenant {config.tenant!r} is stored")
    else:
        _show_sessions([_session_row(state)], args.session)
    return int(state is None)


def _nodes(
    args: argparse.Namespace, index: SessionIndex, config: Config, store: StoreConfig
) -> int:
    from store_worker.cli.output import count_bytes, emit_json, table

    states = index.nodes()
    if args.json:
        fields = states[0].__struct_fields__ if states else ()
        emit_json([{name: getattr(state, name) for name in fields} for state in states])
        return 0
    table(
        "",
        ("node", "up", "draining", "blocks", "stored", "copies", "promised", "dying", "capacity"),
        [
            (
                s.node, s.up, s.draining, s.blocks, count_bytes(s.stored), count_bytes(s.copies),
                count_bytes(s.granted), count_bytes(s.dying),
                count_bytes(s.capacity) if s.capacity else "its own",
            )
            for s in states
        ],
    )  # fmt: skip
    return 0


def _namespaces(
    args: argparse.Namespace, index: SessionIndex, config: Config, store: StoreConfig
) -> int:
    import json

    from store_worker.cli.output import emit_json, table

    known = index.namespaces()
    rows = []
    for namespace, (text, tokens_per_block, blocks) in known.items():
        facts = json.loads(text) if text else {}
        rows.append((namespace.hex(), facts, tokens_per_block, blocks))
    if args.json:
        emit_json(
            [
                {"namespace": ns, "facts": facts, "tokens_per_block": t, "blocks": blocks}
                for ns, facts, t, blocks in rows
            ]
        )
        return 0
    table(
        "",
        ("namespace", "model", "dtype", "tp", "tenant", "epoch", "tokens"),
        [
            (
                ns[:16], facts.get("model", "?"), facts.get("kv_dtype", "?"),
                facts.get("tp_size", "?"), facts.get("tenant", "?"), facts.get("epoch", "?"),
                blocks * tokens,
            )
            for ns, facts, tokens, blocks in rows
        ],
    )  # fmt: skip
    return 0


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str, int], None] | None]:
    """A moving line on standard error, where somebody looks at it."""
    if quiet:
        yield None
        return
    try:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn
    except ImportError:
        yield None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}: {task.completed:.0f} keys"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading the index", total=None)
        yield lambda what, count: bar.update(task, description=what, completed=count)


def _verify(
    args: argparse.Namespace, index: SessionIndex, config: Config, store: StoreConfig
) -> int:
    import msgspec

    from store_worker.cli.output import emit_json
    from store_worker.verify import verify

    with _progress(quiet=args.json) as progress:
        report = verify(index, store, args.repair, progress)
    if args.json:
        emit_json({"ok": report.clean, **msgspec.to_builtins(report)})
    else:
        _show_report(report)
    return int(not report.clean)


def _show_report(report: Report) -> None:
    from store_worker.cli.output import table

    table(
        "",
        ("node", "objects", "orphans", "missing", "wrong size", "expiring", "passing", "repaired"),
        [
            (
                n.node, n.objects, len(n.orphans), len(n.missing), len(n.wrong_size),
                len(n.expiring), n.passing, n.repaired,
            )
            for n in report.nodes
        ],
    )  # fmt: skip
    for node in report.unreachable:
        print(f"FAIL  {node} does not answer")
    for line in report.index[:20]:
        print(f"FAIL  index: {line}")
    for node_report in report.nodes:
        for kind in ("orphans", "missing", "wrong_size", "expiring"):
            for key in getattr(node_report, kind)[:5]:
                print(f"      {node_report.node} {kind}: {key}")
    print("index and nodes agree" if report.clean else "run with --repair to put it right")


def _drain(
    args: argparse.Namespace, index: SessionIndex, config: Config, store: StoreConfig
) -> int:
    from connector.ids import NodeId
    from store_worker.cli.output import emit_json

    known = [state.node for state in index.nodes()]
    if args.node not in known:
        if args.json:
            emit_json({"ok": False, "node": args.node, "known": known})
        else:
            print(f"no node {args.node!r}; known: {', '.join(known) or 'none'}")
        return 1
    index.drain(NodeId(args.node), not args.off)
    left = next(s for s in index.nodes() if s.node == args.node)
    if args.json:
        emit_json({"ok": True, "node": args.node, "draining": left.draining, "blocks": left.blocks})
    elif args.off:
        print(f"{args.node} takes blocks again")
    else:
        print(f"{args.node} takes no new blocks; {left.blocks} are left on it and still loaded")
    return 0
