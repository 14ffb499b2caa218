"""What a save asks of the index and of the workers, as messages. Pure.

Core module.
"""

from __future__ import annotations

from connector import planner
from connector.context import Context
from connector.ids import NO_HASH, JobId
from connector.ledger import Job
from connector.lookup import AbortOp, CommitOp, PrepareOp
from connector.meta import Placed, SaveMeta
from connector.tracker import RequestTracker

NO_JOB = JobId(0)


def prepare(context: Context, tracker: RequestTracker, job: Job, margin_s: float) -> PrepareOp:
    """Room for the job, until the save's deadline and a margin."""
    return PrepareOp(
        job=job.id,
        namespace=job.namespace,
        session=tracker.session,
        generation=tracker.generation,
        parent=job.parent,
        start=job.start,
        hashes=job.hashes,
        object_bytes=context.engine.object_bytes,
        ranks=context.engine.ranks,
        grant_s=context.config.save_deadline_s + margin_s,
        new_tokens=planner.new_tokens(tracker, context.engine),
        must=tracker.identity.must_save,
    )


def save_meta(context: Context, tracker: RequestTracker, job: Job) -> SaveMeta:
    """The job for the workers: the blocks that are not listed yet."""
    count = len(job.blocks) - job.first
    return SaveMeta(
        job=job.id,
        request=job.request,
        store=job.store,
        hashes=job.hashes[job.first :],
        blocks=job.blocks[job.first :],
        placed=(Placed(node=job.node, count=count, incarnation=job.incarnation),),
        deadline_s=context.config.save_deadline_s,
        session=tracker.session,
        generation=tracker.generation,
        namespace=job.namespace,
        grouped=tracker.hit_kind == "tip" and bool(tracker.session),
    )


def commit(context: Context, tracker: RequestTracker, job: Job, end: int | None) -> CommitOp:
    """Make what every rank has saved visible. end: depth at which the turn ends with it, if so."""
    return CommitOp(
        job=job.id,
        namespace=job.namespace,
        session=tracker.session,
        generation=tracker.generation,
        grant=job.grant,
        node=job.node,
        saved=job.ok,
        hashes=job.hashes[job.first :],
        ranks=context.engine.ranks,
        parent=job.parent,
        start=job.start,
        turn_end=None if end is None else planner.turn_end(tracker, end, context.engine),
    )


def touch(context: Context, tracker: RequestTracker, depth: int) -> CommitOp:
    """The turn has ended at `depth` with nothing left to save, or nothing that is let in."""
    further = tracker.declined and depth < len(tracker.request.block_hashes)
    return CommitOp(
        job=NO_JOB,
        namespace=tracker.namespace,
        session=tracker.session,
        generation=tracker.generation,
        parent=tracker.hash_at(depth),
        start=depth,
        turn_end=planner.turn_end(tracker, depth, context.engine),
        beyond=tracker.hash_at(depth + 1) if further else NO_HASH,
    )


def abort(context: Context, job: Job) -> AbortOp:
    """Give the job's grant back."""
    return AbortOp(
        job=job.id,
        namespace=job.namespace,
        grant=job.grant,
        node=job.node,
        hashes=job.hashes[job.first :],
        ranks=context.engine.ranks,
    )
