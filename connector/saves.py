"""Saves of the scheduler half: plan, prepare, send, commit.

Core module. Owned by the scheduler thread; nothing here waits. A request has a window of jobs in
the order of their depth; only the first is on its way, since each one's parent must be listed
before it can be prepared. A job is prepared as soon as its blocks are scheduled to be computed and
sent one step later, when they are.
"""

from __future__ import annotations

from connector import planner
from connector import saveops as ops
from connector.context import Context
from connector.ids import BlockHash, JobId
from connector.indexmsg import CommitOutcome, DeclineReason
from connector.ledger import Job, JobState
from connector.lookup import (
    AbandonOp,
    CommitReply,
    PrepareReply,
)
from connector.meta import JobKind, SaveMeta
from connector.pressure import Need
from connector.tracker import RequestTracker

RETRY_S = 1.0
GRANT_MARGIN_S = 15.0


class SaveFlow:
    """From computed blocks to blocks that other engines can find."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._owner: dict[int, RequestTracker] = {}
        self._ready: list[Job] = []
        self._ask_again: list[RequestTracker] = []
        self._revoked: list[JobId] = []

    # -- plan --------------------------------------------------------------------------------

    def plan(self, tracker: RequestTracker, tokens: int) -> None:
        """Open jobs for what is complete once `tokens` tokens are computed.

        Called while the step that computes them is being built: the jobs are sent with a later
        one. The blocks are held from here on. A running request has one job at a time (what is
        computed meanwhile becomes the next one); one that ends queues all that is left, since
        its blocks are lost otherwise.
        """
        context = self._context
        if context.clock.now() < tracker.retry_at:
            return
        complete = planner.complete_depth(tracker, tokens, context.engine)
        while tracker.finished or not tracker.window:
            piece = planner.next_save(tracker, complete, context.config.blocks_per_job_max)
            if piece is None or not self._open(tracker, *piece):
                break
        self._advance(tracker)

    def _open(self, tracker: RequestTracker, start: int, stop: int) -> bool:
        """Open a job over (start, stop], or over as much of it as there is room for."""
        context = self._context
        ledger = context.ledger
        blocks, why = min((ledger.room(), "hold"), (self._byte_room(), "bytes"))
        if blocks <= 0:
            tracker.retry_at = context.clock.now() + RETRY_S / 20
            context.stats.add("saves_declined", reason=why)
            return False
        stop = min(stop, start + blocks)
        hashes = [BlockHash(h) for h in tracker.request.block_hashes[start:stop]]
        span = (start, hashes, tracker.blocks[start:stop])
        now = context.clock.now()
        job = ledger.open(JobKind.SAVE, tracker.id, tracker.namespace, span, now)
        job.parent = tracker.hash_at(start)
        self._owner[job.id] = tracker
        tracker.window.append(job)
        tracker.planned = stop
        return True

    def _byte_room(self) -> int:
        """Blocks that one more save may have in flight; at least one when there is no other."""
        context = self._context
        block_bytes = context.engine.block_bytes
        used = context.ledger.bytes_open(JobKind.SAVE, block_bytes)
        left = (context.config.save_bytes_in_flight_max - used) // block_bytes
        return left if used else max(1, left)

    def _advance(self, tracker: RequestTracker) -> None:
        """Ask for room for the first job, if it has not been asked for."""
        if not tracker.window or tracker.window[0].state is not JobState.QUEUED:
            return
        context, job = self._context, tracker.window[0]
        job.state = JobState.PREPARING
        op = ops.prepare(context, tracker, job, GRANT_MARGIN_S)
        if not context.post(op):
            self._roll_back(tracker, job)

    def prepared(self, reply: PrepareReply) -> None:
        """Room was promised, or not."""
        context = self._context
        job = context.ledger.get(reply.job)
        if job is None:
            context.stats.add("grants_orphaned", 1 if reply.grant else 0)
            return
        tracker = self._owner[job.id]
        if reply.declined is not None or reply.unavailable:
            self._declined(tracker, job, reply.declined)
        else:
            job.grant, job.node, job.first = reply.grant, reply.node, reply.first_missing
            job.incarnation, job.store = reply.incarnation, reply.store
            if job.cancelled:
                self._end(tracker, job)
            elif job.first == len(job.hashes):
                context.ledger.release(job)
                self._commit(tracker, job)
            else:
                job.state = JobState.READY
                self._ready.append(job)
        self._go_on(tracker)

    def _declined(
        self, tracker: RequestTracker, job: Job, reason: DeclineReason | None
    ) -> None:
        self._context.stats.add(
            "saves_declined", reason=reason.value if reason else "unavailable"
        )
        if job.cancelled:
            self._end(tracker, job)
            return
        self._roll_back(tracker, job)
        if reason is DeclineReason.MISSING_PARENT:
            self._lost_parent(tracker)
        elif reason in (DeclineReason.STALE_GENERATION, DeclineReason.NOT_WORTH):
            tracker.saving = False
            tracker.declined = reason is DeclineReason.NOT_WORTH

    # -- send and report ---------------------------------------------------------------------

    def send(self) -> tuple[SaveMeta, ...]:
        """Saves for this step's metadata: granted, and planned in an earlier step."""
        metas = []
        for job in self._ready:
            if job.cancelled or self._context.ledger.get(job.id) is None:
                continue
            tracker = self._owner[job.id]
            job.state = JobState.SENT
            metas.append(ops.save_meta(self._context, tracker, job))
        self._ready.clear()
        return tuple(metas)

    def done(self, job: Job) -> None:
        """Every rank has reported a save: its blocks are free, and it may be committed."""
        context = self._context
        tracker = self._owner[job.id]
        context.stats.observe("save", job.seconds)
        context.ledger.release(job)
        if job.cancelled:
            self._end(tracker, job)
        elif job.ok == 0:
            context.stats.add("saves_failed")
            self._roll_back(tracker, job)
        else:
            self._commit(tracker, job)
        self._go_on(tracker)

    def _go_on(self, tracker: RequestTracker) -> None:
        """Something has ended: the next job's turn, or the turn's end."""
        self._advance(tracker)
        self._finish(tracker)

    # -- commit ------------------------------------------------------------------------------

    def _commit(self, tracker: RequestTracker, job: Job) -> None:
        """Ask for the commit of what every rank has saved."""
        job.state = JobState.COMMITTING
        reached = job.start + job.first + job.ok
        last = tracker.finished and (job is tracker.window[-1] or reached < job.depth)
        op = ops.commit(self._context, tracker, job, reached if last else None)
        if not self._context.post(op):
            self._roll_back(tracker, job)
            return
        tracker.turn_sent = tracker.turn_sent or last

    def committed(self, reply: CommitReply) -> None:
        """The index has answered a commit."""
        context = self._context
        job = context.ledger.get(reply.job)
        if job is None:
            return  # a touch, or a job that was given up meanwhile
        tracker = self._owner[job.id]
        context.stats.add("commits", by=reply.outcome.value if reply.outcome else "unavailable")
        reached = job.start + job.first + job.ok
        if reply.outcome is CommitOutcome.OK:
            tracker.committed = max(tracker.committed, reached)
            context.stats.add("tokens_saved", job.ok * context.engine.tokens_per_block)
            if reached < job.depth:
                self._roll_back(tracker, job, reached)
            else:
                self._end(tracker, job)
        else:
            self._roll_back(tracker, job)
            if reply.outcome is CommitOutcome.STALE_GENERATION:
                tracker.saving = False
            elif reply.outcome is CommitOutcome.MISSING_PARENT:
                self._lost_parent(tracker)
        self._go_on(tracker)

    # -- the ways out ------------------------------------------------------------------------

    def _end(self, tracker: RequestTracker, job: Job) -> None:
        """The job is over. If it still has a grant of which nothing was committed, give it back."""
        tracker.window.remove(job)
        self._owner.pop(job.id)
        self._context.ledger.settle(job)
        if job.grant and job.state is not JobState.COMMITTING:
            self._context.post(ops.abort(self._context, job))

    def _roll_back(self, tracker: RequestTracker, job: Job, depth: int | None = None) -> None:
        """The chain ends at `depth` (the job's start) for now: plan again from there, later.

        What waits behind the job is given up with it. A job that is with the index or the workers
        ends when they answer; its blocks stay held until then.
        """
        tracker.planned = job.start if depth is None else depth
        tracker.retry_at = self._context.clock.now() + RETRY_S
        for later in tracker.window[::-1]:
            if later.state is JobState.QUEUED:
                self._end(tracker, later)
        if job.state is JobState.SENT and job.ranks_left:
            job.cancelled = True
        else:
            self._end(tracker, job)

    def _lost_parent(self, tracker: RequestTracker) -> None:
        """The chain below was evicted. Once: look where it ends now and go on from there."""
        if tracker.regained or tracker.finished:
            tracker.saving = False
            self._context.stats.add("saves_given_up")
            return
        tracker.regained = True
        tracker.identified = False
        tracker.retry_at = 0.0
        self._ask_again.append(tracker)

    def take_lost(self) -> list[RequestTracker]:
        """Trackers whose chain must be looked up anew, since the last call."""
        lost, self._ask_again = self._ask_again, []
        return lost

    # -- end ---------------------------------------------------------------------------------

    def finish(self, tracker: RequestTracker, tokens: int) -> None:
        """The request ends with `tokens` tokens computed: save the rest, then record the turn."""
        tracker.finished = True
        tracker.retry_at = 0.0
        if tracker.loading is None:
            self.plan(tracker, tokens)
        self._go_on(tracker)

    def _finish(self, tracker: RequestTracker) -> None:
        """Once nothing is open any more: remember where the turn ended."""
        if not tracker.finished or tracker.window or tracker.turn_sent:
            return
        tracker.turn_sent = True
        depth = tracker.committed
        self._abandon_if_short(tracker, depth)
        # A turn that the policy declined counts too: or it would never know who comes back.
        if not tracker.identified or not (tracker.declined or (depth and tracker.saving)):
            return
        self._context.post(ops.touch(self._context, tracker, depth))

    def _abandon_if_short(self, tracker: RequestTracker, depth: int) -> None:
        """A hand-off whose tip will never be committed: whoever waits for it should stop."""
        if not tracker.identity.must_save:
            return
        tip = tracker.request.num_prompt_tokens // self._context.engine.tokens_per_block
        if tip > depth and tip <= len(tracker.request.block_hashes):
            self._context.post(
                AbandonOp(namespace=tracker.namespace, tip=tracker.hash_at(tip))
            )

    def cancel(self, tracker: RequestTracker) -> None:
        """Stop saving this request; what is open ends without becoming visible.

        A commit that is already asked for is left to the index, which knows whether the session's
        generation is over.
        """
        tracker.saving = False
        for job in tracker.window[::-1]:
            if job.state in (JobState.QUEUED, JobState.READY):
                self._end(tracker, job)
            elif job.state is not JobState.COMMITTING:
                job.cancelled = True

    def give_way(self, need: Need) -> None:
        """The engine is short of blocks: let go of the newest save of a request that has ended; if
        it is stuck, also of one that was preempted. What a worker is reading may be overwritten
        from here on: it is never committed."""
        context = self._context
        held = [job for job in context.ledger.jobs()[::-1] if job.kind is JobKind.SAVE and job.held]
        ended = (job for job in held if self._owner[job.id].finished)
        bare = (job for job in held if not self._owner[job.id].blocks and need is Need.STUCK)
        job = next(ended, None) or next(bare, None)
        if job is None:
            return
        tracker = self._owner[job.id]
        context.stats.add("saves_gave_way")
        tracker.planned = min(tracker.planned, job.start)
        if job.state in (JobState.QUEUED, JobState.READY):
            self._end(tracker, job)
        else:
            self._let_go(job)
        self._go_on(tracker)

    def drop_holds(self) -> None:
        """The engine empties its cache: let go of every block, and commit nothing of it."""
        for job in self._context.ledger.jobs():
            if job.kind is JobKind.SAVE and job.held:
                self.cancel(self._owner[job.id])
                if job.held:
                    self._let_go(job)

    def _let_go(self, job: Job) -> None:
        """Give up the blocks of a save that is with the index or the workers.

        They may be overwritten by the next step, and an object's key names its content, not its
        writer: so the workers are told, and what they send nevertheless fails its checksum. Without
        checksums nothing would tell it from the truth: then the blocks stay held.
        """
        job.cancelled = True
        if job.state is JobState.SENT and job.ranks_left:
            if not self._context.config.checksums:
                return
            self._revoked.append(job.id)
        self._context.ledger.release(job)

    def take_revoked(self) -> tuple[JobId, ...]:
        """Jobs that have lost their blocks since the last call, for this step's metadata."""
        revoked, self._revoked = tuple(self._revoked), []
        return revoked

    def check_integrity(self) -> list[str]:
        """What is kept for nobody; empty when sound."""
        ledger = self._context.ledger
        return [
            f"save {job} has an owner and is not open"
            for job in self._owner
            if ledger.get(JobId(job)) is None
        ]
