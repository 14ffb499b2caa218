"""What the index does with an accepted kv_hints action. Thread: the index client's."""

from __future__ import annotations

from collections.abc import Callable

from connector.ids import SessionKey
from connector.lookup import CloseOp, CloseReply, HintKind, HintOp, HintReply
from store_worker.index.base import SessionIndex
from store_worker.index.limits import PRIORITY_MAX, PRIORITY_MIN

PRIORITY_DEMOTED = PRIORITY_MIN
DEMOTED_S = 7 * 24 * 3600.0


def take_hint(
    index: SessionIndex,
    session: SessionKey,
    op: HintOp,
    close: Callable[[CloseOp], CloseReply],
    pinned: Callable[[float], object],
) -> HintReply:
    """Carry one action out. pinned: is told for how many seconds. Raises StoreError."""
    if op.kind is HintKind.RELEASE:
        close(CloseOp(session_id=op.session_id, cache_salt=op.cache_salt))
    elif op.kind is HintKind.PIN:
        granted_s = index.pin(session, op.ttl_s)
        if granted_s <= 0:
            return HintReply(kind=op.kind, outcome="rejected", why="over the tenant's quota")
        pinned(granted_s)
        if granted_s < op.ttl_s:
            return HintReply(kind=op.kind, outcome="clipped", why="to the tenant's quota")
    elif op.kind is HintKind.DEMOTE:
        index.retain(session, PRIORITY_DEMOTED, DEMOTED_S)
    else:
        priority = max(PRIORITY_MIN, min(PRIORITY_MAX, op.priority))
        index.retain(session, priority, op.ttl_s)
        if priority != op.priority:
            return HintReply(kind=op.kind, outcome="clipped", why=f"to priority {priority}")
    return HintReply(kind=op.kind, outcome="accepted")
