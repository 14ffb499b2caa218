"""`session-kv close SESSION --store URL`: end a conversation and free what only it needs.

The index ends the session's generation at once, so that no save still under way becomes visible.
Its blocks are then freed from the leaves upward, as far as no other session needs them, and their
objects deleted. Exit code 0 if the session was known, 1 if not, 2 if the store can't be asked.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, NamedTuple

from store_worker.cli.options import (
    add_json,
    add_store,
    add_tenant,
    config_of,
    resolved_store,
)

if TYPE_CHECKING:
    from connector.clock import Clock
    from connector.config import Config, StoreConfig
    from connector.ids import SessionKey
    from store_worker.index.base import SessionIndex
    from store_worker.index.janitor import Desk

# A session has at most some ten thousand blocks, and one call frees 128: this is a bug's bound.
CALLS_MAX = 10_000


class Outcome(NamedTuple):
    """known: whether there was such a session. blocks: freed. left: not deleted here, because
    their node did not answer or was not named; the engines delete them later."""

    known: bool
    blocks: int
    left: int


def add_parser(subparsers: Any) -> None:
    """Adds `close`."""
    parser = subparsers.add_parser(
        "close",
        help="end a conversation and free its blocks",
        description="Ends a session: nothing of it can be loaded any more, its room is given back.",
    )
    parser.add_argument("session", metavar="SESSION", help="the id as the clients send it")
    add_store(parser)
    add_tenant(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Close, print, and return 1 if there was no such session."""
    from connector.session import check_session_id
    from store_worker.cli.output import emit_json

    config = config_of(args)
    check_session_id(args.session)
    with resolved_store(config) as store:
        outcome = close_session(store, config, args.session, args.cache_salt)
    if args.json:
        emit_json({"ok": outcome.known, "session": args.session, **outcome._asdict()})
    elif not outcome.known:
        print(f"no session {args.session!r} of tenant {config.tenant!r} is stored")
    else:
        later = f"; {outcome.left} are left to the engines to delete" if outcome.left else ""
        print(f"closed: {outcome.blocks} blocks freed{later}")
    return int(not outcome.known)


def close_session(
    store: StoreConfig, config: Config, session_id: str, cache_salt: str | None
) -> Outcome:
    """Close one session. Raises StoreError if the index can't be asked."""
    from connector.clock import SystemClock
    from connector.session import session_key
    from store_worker.index import open_index

    clock = SystemClock()
    index = open_index(store.index, config)
    identity = index.identity()
    secret = bytes.fromhex(config.session_secret) or identity.secret
    key = session_key(secret, config.tenant, cache_salt, session_id)
    state = index.session(key)
    # A closed session leaves its generation behind, by which late saves are refused.
    known = state is not None and bool(state.blocks or state.turns or state.home)
    desk = open_desk(store, config, index, clock)
    try:
        blocks, left = free_all(desk, identity.incarnation, key)
    finally:
        desk.close()
    return Outcome(known, blocks, left)


def open_desk(store: StoreConfig, config: Config, index: SessionIndex, clock: Clock) -> Desk:
    """What the janitor's functions need, for the nodes that can be opened here."""
    from store_worker.index.janitor import Desk
    from store_worker.nodes import NodeDirectory

    directory = NodeDirectory(store.data, config, clock)
    directory.refresh()
    return Desk(
        index=index,
        directory=directory,
        config=config,
        clock=clock,
        object_bytes=0,
        tell_identity=lambda identity: None,
    )


def free_all(desk: Desk, incarnation: bytes, key: SessionKey) -> tuple[int, int]:
    """(blocks freed, blocks not deleted): the index frees a bounded number per call."""
    from store_worker.index.janitor import delete_victims

    blocks = left = 0
    for _ in range(CALLS_MAX):
        closed = desk.index.close(key)
        gone = delete_victims(desk, incarnation, closed.victims)
        if gone:
            desk.index.freed(gone)
        blocks += closed.blocks
        left += len(closed.victims) - len(gone)
        if not closed.more:
            break
    return blocks, left
