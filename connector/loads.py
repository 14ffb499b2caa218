"""Lookups, promises and loads of the scheduler half.

Core module. Owned by the scheduler thread; nothing here waits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from connector import planner
from connector.context import Context
from connector.ids import BlockHash, BlockId, JobId, NodeId
from connector.ledger import Job, JobState
from connector.lookup import ForgetOp, LookupOp, LookupOutcome, LookupReply, RenewOp
from connector.meta import BlockOutcome, JobKind, LoadMeta
from connector.tracker import Promise, RequestTracker

LEASE_MARGIN_S = 5.0
RATE_BYTES_MIN = 4 << 20
"""Smaller loads measure the round trip, not the bandwidth."""


class LoadFlow:
    """From a request's arrival to its blocks in the engine's cache."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._by_ticket: dict[int, RequestTracker] = {}
        self._ready: list[LoadMeta] = []
        self._owner: dict[int, tuple[RequestTracker, Promise]] = {}
        self.lease_s = context.config.load_deadline_s + LEASE_MARGIN_S

    # -- lookup ------------------------------------------------------------------------------

    def ask(self, tracker: RequestTracker, wait_s: float = 0.0) -> None:
        """Post a lookup; the answer comes with a later `take`."""
        context = self._context
        tracker.ticket = next(context.tickets)
        deadline_s = max(wait_s, context.config.lookup_deadline_s)
        if not tracker.answered:
            tracker.deadline = context.clock.now() + deadline_s
        op = LookupOp(
            ticket=tracker.ticket,
            request=tracker.id,
            namespace=tracker.namespace,
            session_id=tracker.identity.session_id,
            cache_salt=tracker.identity.cache_salt,
            hashes=tuple(BlockHash(h) for h in tracker.request.block_hashes),
            deadline_s=deadline_s,
            lease_s=self.lease_s,
            wait_tip=tracker.identity.wait_tip if wait_s else BlockHash(b""),
        )
        if context.post(op):
            self._by_ticket[tracker.ticket] = tracker
        else:
            tracker.answered = True

    def take(self, reply: LookupReply) -> None:
        """An answer has come, perhaps to a request that is gone or that has asked again."""
        tracker = self._by_ticket.pop(reply.ticket, None)
        stats = self._context.stats
        stats.observe("lookup", reply.seconds)
        stats.add("lookups", by=reply.outcome.value)
        stats.add("lookup_round_trips", reply.round_trips)
        if tracker is None or tracker.ticket != reply.ticket:
            return
        tracker.answered = True
        if reply.outcome is LookupOutcome.UNAVAILABLE:
            return
        tracker.identified = True
        tracker.session, tracker.generation = reply.session, reply.generation
        tracker.store = reply.store
        tracker.hit_kind = "tip" if reply.outcome is LookupOutcome.HIT_TIP else "shared"
        tracker.slices, tracker.known = reply.slices, reply.depth
        tracker.turn_start = reply.turn_start
        tracker.lease_until = self._context.clock.now() + self.lease_s - LEASE_MARGIN_S
        if all(job.cancelled for job in tracker.window):
            tracker.planned = tracker.committed = reply.depth

    def renew(self) -> None:
        """Keep leases of requests that wait or run: called now and then, not every step."""
        context = self._context
        now = context.clock.now()
        for tracker in context.trackers.values():
            if not tracker.identified or tracker.lease_until - now > self.lease_s / 2:
                continue
            if tracker.blocks and tracker.committed:
                tracker.lease_until = now + self.lease_s - LEASE_MARGIN_S
                context.post(
                    RenewOp(
                        namespace=tracker.namespace,
                        hash=tracker.hash_at(tracker.committed),
                        depth=tracker.committed,
                        lease_s=self.lease_s,
                    )
                )
            elif not tracker.blocks and tracker.ticket not in self._by_ticket:
                self.ask(tracker)

    def forget_request(self, tracker: RequestTracker) -> None:
        """The request is gone; a late answer is for nobody."""
        self._by_ticket.pop(tracker.ticket, None)

    # -- promise and load --------------------------------------------------------------------

    def match(self, tracker: RequestTracker, num_computed_tokens: int) -> int | None:
        """Tokens beyond `num_computed_tokens` that can be loaded; None: ask again.

        Free of side effects but for the remembered promise, which the next match replaces. After
        the first answer or the deadline it never says None again.
        """
        context = self._context
        now = context.clock.now()
        tracker.promise = None
        if not tracker.answered:
            if now < tracker.deadline:
                return None
            tracker.answered = True
            context.stats.add("lookups_late")
        engine = context.engine
        self._count_ask(tracker)
        start = -(-num_computed_tokens // engine.tokens_per_block)
        stop = planner.usable_depth(tracker, engine, now)
        tokens = stop * engine.tokens_per_block - num_computed_tokens
        if tracker.loading is not None or stop <= start or tokens <= 0:
            return 0
        if num_computed_tokens % engine.tokens_per_block:
            return 0
        why = self._reason_to_leave(stop - start, tokens)
        if why:
            context.stats.add("loads_declined", reason=why)
            return 0
        tracker.promise = Promise(start=start, stop=stop, slices=tracker.slices)
        return tokens

    def _count_ask(self, tracker: RequestTracker) -> None:
        if not tracker.counted:
            tracker.counted = True
            self._context.stats.add("tokens_asked", tracker.request.num_tokens)

    def _reason_to_leave(self, blocks: int, tokens: int) -> str:
        context = self._context
        config, engine = context.config, context.engine
        load_bytes = blocks * engine.block_bytes
        if tokens < config.min_load_tokens:
            return "short"
        open_bytes = context.ledger.bytes_open(JobKind.LOAD, engine.block_bytes)
        if open_bytes and open_bytes + load_bytes > config.load_bytes_in_flight_max:
            return "bytes"
        if config.cost_model and not planner.worth_loading(
            load_bytes, tokens, context.load_rate.median, context.compute_rate.median
        ):
            return "cost"
        return ""

    def allocate(
        self, tracker: RequestTracker, blocks: Sequence[BlockId], num_external_tokens: int
    ) -> None:
        """The engine has allocated `blocks` (its table so far) and expects that many tokens.

        Called a second time with 0 tokens when the load is over. The promise and the engine's
        count are one number; the job covers exactly the blocks the engine waits for.
        """
        promise, tracker.promise = tracker.promise, None
        tracker.blocks = list(blocks)
        if num_external_tokens <= 0:
            return
        context = self._context
        tokens_per_block = context.engine.tokens_per_block
        assert promise is not None, "tokens were allocated that were never promised"
        assert num_external_tokens % tokens_per_block == 0, "a load is whole blocks"
        stop = promise.start + num_external_tokens // tokens_per_block
        assert stop <= promise.stop, "more was allocated than promised"
        hashes = [BlockHash(h) for h in tracker.request.block_hashes[promise.start : stop]]
        job = context.ledger.open(
            JobKind.LOAD,
            tracker.id,
            tracker.namespace,
            (promise.start, hashes, tracker.blocks[promise.start : stop]),
            context.clock.now(),
        )
        tracker.loading = job.id
        self._owner[job.id] = (tracker, promise)
        placed = planner.place(promise.slices, promise.start, stop)
        context.stats.add("load_nodes", len(planner.nodes_of(placed)))
        self._ready.append(
            LoadMeta(
                job=job.id,
                request=tracker.id,
                store=tracker.store,
                hashes=job.hashes,
                blocks=job.blocks,
                placed=placed,
                deadline_s=context.config.load_deadline_s,
                session=tracker.session,
                generation=tracker.generation,
                namespace=tracker.namespace,
            )
        )

    def send(self) -> tuple[LoadMeta, ...]:
        """Loads for this step's metadata."""
        ready, self._ready = tuple(self._ready), []
        for meta in ready:
            job = self._context.ledger.get(meta.job)
            assert job is not None
            job.state = JobState.SENT
        return ready

    def done(self, job: Job) -> None:
        """Every rank has reported a load."""
        context = self._context
        tracker, promise = self._owner.pop(job.id)
        context.ledger.settle(job)
        engine = context.engine
        context.stats.observe("load", job.seconds)
        context.stats.add("loads")
        context.stats.add(
            "tokens_loaded", job.ok * engine.tokens_per_block, by=tracker.hit_kind
        )
        if job.bytes_moved >= RATE_BYTES_MIN:
            context.load_rate.add(job.bytes_moved, job.seconds)
        if tracker.loading == job.id:
            tracker.loading = None
        if job.ok < len(job.hashes):
            self._failed(tracker, job, promise)

    def _failed(self, tracker: RequestTracker, job: Job, promise: Promise) -> None:
        """Remember it, so that the same hit is not promised for ever; forget what is lost."""
        context = self._context
        bad = job.start + job.ok
        tracker.usable_max = min(tracker.usable_max, bad)
        tracker.known = min(tracker.known, bad)
        if not tracker.window:
            tracker.planned = min(tracker.planned, bad)
            tracker.committed = min(tracker.committed, bad)
        context.stats.add("load_blocks_failed", len(job.hashes) - job.ok)
        lost: dict[NodeId, list[BlockHash]] = defaultdict(list)
        at = 0
        for piece in planner.place(promise.slices, job.start, job.depth):
            for index in range(at, at + piece.count):
                if job.outcomes[index] in (BlockOutcome.MISSING, BlockOutcome.CORRUPT):
                    lost[piece.node].append(job.hashes[index])
            at += piece.count
        for node, hashes in lost.items():
            context.stats.add("blocks_forgotten", len(hashes))
            context.post(
                ForgetOp(namespace=job.namespace, hashes=tuple(hashes), node=node)
            )

    def check_integrity(self) -> list[str]:
        """What is kept for nobody; empty when sound."""
        context = self._context
        found = [f"load {job} has an owner and is not open" for job in self._owner
                 if context.ledger.get(JobId(job)) is None]  # fmt: skip
        if self._by_ticket and not context.index.pending():
            found.append(f"{len(self._by_ticket)} lookups are waited for and none is asked")
        return found
