"""What an operation is answered when the index could not be asked."""

from __future__ import annotations

from connector.lookup import (
    CloseOp,
    CloseReply,
    CommitOp,
    CommitReply,
    DoneReply,
    HintOp,
    HintReply,
    IndexOp,
    IndexReply,
    LookupOp,
    LookupOutcome,
    LookupReply,
    PrepareOp,
    PrepareReply,
)


def failure(op: IndexOp, seconds: float) -> IndexReply:
    """The reply of an operation that the index could not be asked."""
    match op:
        case LookupOp():
            return LookupReply(
                ticket=op.ticket,
                request=op.request,
                outcome=LookupOutcome.UNAVAILABLE,
                seconds=seconds,
            )
        case PrepareOp():
            return PrepareReply(job=op.job, unavailable=True)
        case CommitOp():
            return CommitReply(job=op.job, outcome=None)
        case CloseOp():
            return CloseReply(session_id=op.session_id, ok=False)
        case HintOp():
            return HintReply(kind=op.kind, outcome="rejected", why="the index is unreachable")
    return DoneReply(op=type(op).__name__, ok=False)


