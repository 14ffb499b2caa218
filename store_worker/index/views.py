"""What people and routers see of a `State`. Pure functions."""

from __future__ import annotations

from connector.ids import Generation, Namespace, NodeId, SessionKey
from connector.indexmsg import NodeState, SessionState
from store_worker.index import limits as L
from store_worker.index.records import BUSY, Node, State
from store_worker.index.sessions import held_at
from store_worker.policy import ScoreTable


def node_state(node: Node) -> NodeState:
    """One node's accounting."""
    return NodeState(
        NodeId(node.name), node.incarnation, node.up, node.draining, node.capacity, node.stored,
        node.copies, node.granted, node.dying, node.blocks,
    )  # fmt: skip


def session_state(s: State, session: SessionKey) -> SessionState:
    """A known session."""
    record = s.sessions[session]
    depth, tokens = 0, 0
    for run_id, _ in record.holds.items()[-L.HOLDS_SHOWN :]:
        run = s.runs[run_id]
        at = held_at(run, session)
        depth = max(depth, at)
        tokens = max(tokens, at * s.described.get(run.ns, ("", 0))[1])
    active = record.priority_until_ms > s.clock_ms
    return SessionState(
        session, Generation(record.generation),
        NodeId(s.node_at(record.home).name) if record.home else None,
        depth, tokens, record.turns, record.last_ms,
        record.pin_until_ms if record.pin_until_ms > s.clock_ms else 0,
        record.priority if active else 0, record.engines,
    )  # fmt: skip


def namespaces(s: State) -> dict[Namespace, tuple[str, int, int]]:
    """Described ones and those with blocks."""
    names = {*s.described, *s.entries}
    return {
        Namespace(ns): (*s.described.get(ns, ("", 0)), len(s.entries.get(ns, {})))
        for ns in sorted(names)
    }


def stats(s: State) -> dict[str, int]:
    """Counters and gauges."""
    gauges = {
        "sessions": len(s.sessions),
        "open_sessions": len(s.sessions) - len(s.idle),
        "leases": sum(len(place.lists.get(BUSY, ())) for place in s.places.values()),
        "runs": len(s.runs),
        "blocks": sum(len(blocks) for blocks in s.entries.values()),
        "grants": sum(1 for grant in s.grants.values() if grant.reply is None),
    }
    return {**s.counts, **gauges}


def check_table(old: ScoreTable, new: ScoreTable, listed: bool) -> None:
    """Raises ValueError if leaves have classes that the new table does not know."""
    if listed and old.num_classes != new.num_classes:
        raise ValueError(
            f"a table of {new.num_classes} classes can't follow one of {old.num_classes}"
            " while blocks are listed; start with an empty index"
        )
