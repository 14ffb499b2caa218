"""Guards taken out, one at a time, and the tests that must notice.

`tests/faults.py` says which fault a guard is for; the ones of its rows that only vLLM can show are
proved by `python -m tests.faults`. Fast killers are chosen: a unit test where one sees the guard,
else an engine with PatternRunner.
"""

from __future__ import annotations

from dataclasses import dataclass

CORE = "tests/unit/test_core_"
SHIM = "tests/integration/test_faults_shim.py::test_fault_"
REPORTS = "tests/integration/test_faults_shim_reports.py::test_fault_"
TALK = "tests/integration/test_conversation.py::test_"
WORKER = "tests/unit/test_worker.py::test_"
CLIENT = "tests/unit/test_index_client.py::test_"
WIRING = "engine_shim/wiring.py"


@dataclass(frozen=True)
class Mutation:
    """`old`, which occurs once in `path`, becomes `new`; then each of `tests` must fail.

    rows: of tests/faults.py, whose guard this takes out.
    """

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]
    rows: tuple[int, ...] = ()


MUTATIONS: tuple[Mutation, ...] = (
    # ---- saves
    Mutation(
        "commit before all ranks have saved",
        "connector/ledger.py",
        "        if job.ranks_left:\n            return None\n        job.ok",
        "        job.ok",
        (
            CORE + "saves.py::test_blocks_are_given_back_when_all_ranks_have_reported_"
            "and_only_then_committed",
            "tests/integration/test_tp.py::test_a_block_is_visible_when_both_ranks_have_saved_it",
        ),
    ),
    Mutation(
        "no reference on a block that is being saved",
        "connector/ledger.py",
        "        if saving:\n",
        "        if False:\n",
        (
            CORE + "saves.py::test_preemption_does_not_touch_what_is_being_saved",
            "tests/integration/test_preemption.py::"
            "test_fault_01_a_preempted_requests_save_keeps_its_bytes[short-sync]",
            SHIM + "04_no_block_is_handed_out_while_it_is_being_saved",
        ),
        (1, 4, 12),
    ),
    Mutation(
        "one id for all jobs",
        "connector/ledger.py",
        "itertools.count(1)",
        "itertools.repeat(1)",
        ("tests/integration/test_preemption.py::"
         "test_fault_02_every_job_of_an_id_settles_once[sync]",),
        (2,),
    ),
    Mutation(
        "a page is read before the forward pass has filled it",
        "store_worker/paged/copy.py",
        "            self.event.synchronize()\n",
        "            pass\n",
        ("tests/unit/test_paged_copy.py::"
         "test_fault_3_nothing_is_read_before_the_fence_is_reached[direct]",),
        (3, 11),
    ),
    Mutation(
        "blocks are saved that were promised and not computed",
        "connector/scheduler.py",
        "min(num_computed_tokens, tracker.computed, ",
        "min(num_computed_tokens, ",
        (CORE + "saves.py::test_blocks_that_somebody_else_promised_to_load_are_not_saved",),
        (5,),
    ),
    Mutation(
        "saves are planned by the list of hashes alone",
        "connector/planner.py",
        "        tokens // engine.tokens_per_block, len(tracker.request.block_hashes)",
        "        len(tracker.request.block_hashes), len(tracker.request.block_hashes)",
        ("tests/integration/test_async_scheduling.py::"
         "test_the_last_whole_block_is_stored_wherever_a_turn_ends[pattern-async]",),
    ),
    Mutation(
        "the last block of a turn is not looked at",
        "connector/saves.py",
        "        if tracker.loading is None:\n            self.plan(tracker, tokens)\n",
        "",
        ("tests/integration/test_async_scheduling.py::"
         "test_the_last_whole_block_is_stored_wherever_a_turn_ends[pattern-async]",),
    ),
    Mutation(
        "one block of each chunk is left out",
        "connector/planner.py",
        "        tokens // engine.tokens_per_block, len(",
        "        max(0, tokens // engine.tokens_per_block - 1), len(",
        (CORE + "saves.py::test_chunked_prefill_saves_every_block",),
        (54,),
    ),
    Mutation(
        "a save with nothing to write is sent",
        "connector/saves.py",
        "            elif job.first == len(job.hashes):\n",
        "            elif False:\n",
        (CORE + "saves.py::test_a_save_of_nothing_moves_the_hold_only",),
        (29,),
    ),
    Mutation(
        "what is read after its blocks were given up is committed",
        "connector/saves.py",
        "        job.cancelled = True\n        if job.state is JobState.SENT and",
        "        if job.state is JobState.SENT and",
        (
            CORE + "pressure.py::test_a_request_that_finds_no_room_is_not_kept_waiting_by_a_save",
            "tests/integration/test_preemption.py::"
            "test_a_request_that_needs_what_saves_hold_is_not_kept_waiting[sync]",
        ),
    ),
    Mutation(
        "a reset of the cache keeps the blocks of saves",
        "engine_shim/engine.py",
        "        self._connector.scheduler.drop_holds()\n",
        "",
        (TALK + "a_reset_of_the_prefix_cache_in_mid_save[sync]",),
    ),
    Mutation(
        "holds have no limit",
        "connector/ledger.py",
        "self._held_blocks_max - self.held_blocks\n",
        "1 << 30\n",
        (CORE + "saves.py::test_holds_are_bounded",),
        (37,),
    ),
    Mutation(
        "saves never give way",
        "connector/scheduler.py",
        "        if need is not Need.NONE:\n",
        "        if False:\n",
        (
            CORE + "pressure.py::test_a_request_that_finds_no_room_is_not_kept_waiting_by_a_save",
            "tests/integration/test_preemption.py::"
            "test_a_request_that_needs_what_saves_hold_is_not_kept_waiting[sync]",
        ),
        (37,),
    ),
    Mutation(
        "a save without a deadline",
        "connector/saveops.py",
        "deadline_s=context.config.save_deadline_s,",
        "deadline_s=1e9,",
        (CORE + "guards.py::test_fault_30_39_jobs_carry_their_deadlines",),
        (30,),
    ),
    Mutation(
        "the end of an unknown request is an error",
        "connector/scheduler.py",
        "tracker = self._context.trackers.pop(request, None)",
        "tracker = self._context.trackers.pop(request)",
        (CORE + "guards.py::test_fault_31_the_end_of_a_request_that_was_never_announced",),
        (31,),
    ),
    Mutation(
        "a commit of a closed generation counts",
        "store_worker/index/commits.py",
        "    elif sessions.stale(op, grant.session, grant.generation):\n",
        "    elif False:\n",
        (
            CLIENT + "a_late_save_of_a_closed_session_never_becomes_visible",
            TALK + "a_save_that_is_late_for_its_session_never_becomes_visible[another]",
        ),
    ),
    # ---- lookups and promises
    Mutation(
        "a full hit leaves no token to compute",
        "connector/planner.py",
        "(tracker.request.num_tokens - 1) //",
        "tracker.request.num_tokens //",
        (
            CORE + "loads.py::test_a_promise_is_whole_blocks_and_leaves_a_token",
            TALK + "fault_06_53_a_full_hit_leaves_one_token[sync-7]",
        ),
        (53,),
    ),
    Mutation(
        "the job covers other blocks than were promised",
        "connector/loads.py",
        "tracker.blocks[promise.start : stop]),",
        "tracker.blocks[promise.start + 1 : stop] + tracker.blocks[:1]),",
        (CORE + "loads.py::test_scheduler_and_workers_use_one_number",),
        (6,),
    ),
    Mutation(
        "a load begins at the root, over blocks that the engine has",
        "connector/loads.py",
        "tracker.blocks[promise.start : stop]),",
        "tracker.blocks[: stop - promise.start]),",
        (
            CORE + "loads.py::test_a_load_begins_behind_what_the_engine_has",
            SHIM + "07_blocks_that_the_engine_has_are_never_written",
        ),
        (7,),
    ),
    Mutation(
        "a lookup that is not answered is waited for, for ever",
        "connector/loads.py",
        "            if now < tracker.deadline:\n",
        "            if True:\n",
        (CORE + "loads.py::test_after_the_deadline_the_answer_is_a_miss_and_never_none_again",),
        (8,),
    ),
    Mutation(
        "a promise of a part of a block",
        "connector/loads.py",
        "tokens = stop * engine.tokens_per_block - num_computed_tokens",
        "tokens = stop * engine.tokens_per_block + 1 - num_computed_tokens",
        (CORE + "loads.py::test_a_promise_is_whole_blocks_and_leaves_a_token",),
        (10,),
    ),
    Mutation(
        "the scheduler waits for the index",
        "store_worker/index/client.py",
        "            self._queue.append(Pending(op, self._clock.now()))\n"
        "            self._wake.notify()\n        return True\n",
        "            self._answer(Pending(op, self._clock.now()))\n        return True\n",
        (CORE + "guards.py::test_fault_51_nobody_waits_for_a_slow_index",),
        (51,),
    ),
    Mutation(
        "one exception ends the index thread",
        "store_worker/index/client.py",
        "        except Exception:\n            logger.exception(\"index: %s failed\"",
        "        except KeyboardInterrupt:\n            logger.exception(\"index: %s failed\"",
        (CLIENT + "every_operation_is_answered_by_a_failing_index_too",),
        (40,),
    ),
    Mutation(
        "a hand-off is not waited for",
        "store_worker/index/client.py",
        "        if tip and waited_s < op.deadline_s and ",
        "        if False and ",
        (
            CLIENT + "a_hand_off_is_waited_for_until_it_is_committed",
            SHIM + "60_decode_waits_for_the_hand_off[sync]",
        ),
        (60,),
    ),
    Mutation(
        "a turn leaves no boundaries",
        "connector/planner.py",
        "for d in (end, end - 1) if 0 < d <= reach}",
        "for d in (end, end - 1) if False}",
        (
            CORE + "saves.py::test_a_turn_ends_with_the_boundaries_of_prompt_and_reply",
            SHIM + "55_what_was_stored_is_hit",
        ),
        (55,),
    ),
    # ---- loads and their ends
    Mutation(
        "the first failed block only is reported",
        WIRING,
        "            failed_blocks=frozenset(\n"
        "                int(block)\n"
        "                for r in loads\n"
        "                for block, outcome in zip(r.blocks, r.outcomes, strict=True)\n"
        "                if outcome != BlockOutcome.OK\n"
        "            ),\n",
        "            failed_blocks=frozenset(\n"
        "                [int(block)\n"
        "                for r in loads\n"
        "                for block, outcome in zip(r.blocks, r.outcomes, strict=True)\n"
        "                if outcome != BlockOutcome.OK][:1]\n"
        "            ),\n",
        (REPORTS + "09_every_failed_block_of_a_step_is_reported",),
    ),
    Mutation(
        "the first lost block only is forgotten",
        "connector/loads.py",
        "                    lost[piece.node].append(job.hashes[index])\n",
        "                    lost[piece.node] = lost[piece.node] or [job.hashes[index]]\n",
        (REPORTS + "15_every_lost_block_is_forgotten",),
    ),
    Mutation(
        "failed blocks are reported only after a timeout",
        WIRING,
        "                if outcome != BlockOutcome.OK\n",
        "                if outcome == BlockOutcome.TIMED_OUT\n",
        (SHIM + "36_38_41_every_get_raises_and_nothing_else_happens[error0]",),
        (9, 41),
    ),
    Mutation(
        "a hit that failed is promised again",
        "connector/loads.py",
        "        tracker.usable_max = min(tracker.usable_max, bad)\n"
        "        tracker.known = min(tracker.known, bad)\n",
        "",
        (CORE + "loads.py::test_a_failed_load_is_never_promised_again_beyond_the_first_bad_block",),
        (36,),
    ),
    Mutation(
        "what the store has lost is not forgotten",
        "connector/loads.py",
        "if job.outcomes[index] in (BlockOutcome.MISSING, BlockOutcome.CORRUPT):",
        "if False:",
        (SHIM + "44_half_of_a_block_is_a_clean_miss[ranks0]",),
        (44,),
    ),
    Mutation(
        "any header will do",
        "store_worker/codec.py",
        "        if len(header) != HEADER_BYTES:\n",
        "        return True\n        if len(header) != HEADER_BYTES:\n",
        (WORKER + "fault_13_another_objects_bytes_are_found_with_or_without_checksums",
         SHIM + "13_14_wrong_bytes_are_computed_again[swapped-0]"),
        (13,),
    ),
    Mutation(
        "any payload will do",
        "store_worker/codec.py",
        "or checksum(regions) == digest",
        "or True",
        (WORKER + "fault_14_any_flipped_byte_is_found",
         SHIM + "13_14_wrong_bytes_are_computed_again[payload_of_another-1]"),
        (14,),
    ),
    Mutation(
        "an object that is not the right one counts as loaded",
        "store_worker/load_job.py",
        "        BlockOutcome.CORRUPT\n        if outcome is BlockOutcome.OK",
        "        BlockOutcome.OK\n        if outcome is BlockOutcome.OK",
        (WORKER + "fault_15_missing_and_broken_blocks_are_named_one_by_one",),
        (15,),
    ),
    Mutation(
        "a load's end is not reported",
        WIRING,
        "            finished_loads=frozenset(str(r.request) for r in loads),\n",
        "            finished_loads=frozenset(),\n",
        (SHIM + "28_abort_during_a_load_keeps_its_blocks_until_it_has_ended",),
        (28,),
    ),
    Mutation(
        "a save's end is reported as a load's",
        WIRING,
        "[r for r in report.results if r.kind is JobKind.LOAD]",
        "list(report.results)",
        (SHIM + "33_34_only_what_was_issued_is_reported",),
        (33,),
    ),
    Mutation(
        "a save's end is reported as a send's",
        WIRING,
        "            finished_loads=frozenset(str(r.request) for r in loads),\n",
        "            finished_loads=frozenset(str(r.request) for r in loads),\n"
        "            finished_sends=frozenset(str(r.request) for r in report.results),\n",
        (SHIM + "33_34_only_what_was_issued_is_reported",),
        (34,),
    ),
    Mutation(
        "an error in a job ends it without a result",
        "store_worker/executor.py",
        "        end(task.failed, error)\n\n\ndef end",
        "\n\ndef end",
        ("tests/unit/test_executor.py",),
        (38,),
    ),
    Mutation(
        "a job has no deadline at the worker",
        "store_worker/job.py",
        "        return self.received + self.meta.deadline_s\n",
        "        return self.received + 1e9\n",
        (WORKER + "a_job_that_waited_past_its_deadline_does_no_io",),
        (39,),
    ),
    Mutation(
        "a node that fails takes a whole job along",
        "store_worker/job.py",
        "            _run_one(piece, ticket, context, outcomes, run_slice)\n",
        "            run_slice(piece, ticket, context, outcomes)\n",
        (WORKER + "a_node_that_is_down_takes_only_its_own_blocks_along",),
        (46,),
    ),
    Mutation(
        "a load's end is looked up by its live request",
        "connector/loads.py",
        "        tracker, promise = self._owner.pop(job.id)\n",
        "        tracker, promise = self._owner.pop(job.id)\n"
        "        tracker = context.trackers[job.request]\n",
        (CORE + "loads.py::test_a_request_that_ends_during_its_load_is_settled_by_the_workers",
         SHIM + "28_abort_during_a_load_keeps_its_blocks_until_it_has_ended"),
        (48,),
    ),
    Mutation(
        "a node that is away is tried again by everybody",
        "store_worker/backends/breaker.py",
        "            if wait_s > 0:\n",
        "            if False:\n",
        ("tests/unit/test_worker_nodes.py::test_after_a_failure_one_probe_per_pause",),
        (50,),
    ),
    # ---- whose blocks
    Mutation(
        "all deployments share keys",
        "store_worker/keys.py",
        "hashlib.sha256(_DOMAIN + namespace_text(spec))",
        "hashlib.sha256(_DOMAIN)",
        ("tests/unit/test_keys.py::test_fault_17_each_dimension_gives_disjoint_keys",
         "tests/integration/test_tp.py::test_fault_62_other_tp_sizes_are_a_clean_miss"),
        (17, 62),
    ),
    Mutation(
        "new weights under an old name share keys",
        WIRING,
        "        revision=config.model_revision,\n",
        "        revision=\"\",\n",
        (REPORTS + "19_other_weights_under_the_same_name_share_nothing",),
        (19,),
    ),
    Mutation(
        "one session for all salts",
        "connector/session.py",
        '(cache_salt or "").encode()',
        'b""',
        (CLIENT + "the_same_id_under_another_salt_is_another_session",),
        (22,),
    ),
    Mutation(
        "a reset keeps the old namespace",
        "connector/scheduler.py",
        "self._context.namespace = self._namespace_of(epoch)",
        "pass",
        (
            CORE + "saves.py::test_reset_moves_only_this_engine_to_another_epoch",
            SHIM + "27_reset_moves_this_engine_and_nobody_else",
        ),
        (27,),
    ),
)

VLLM_ONLY: dict[int, str] = {
    18: "LoRA adapters are in vLLM's block hashes; the shim has none.",
    21: "Multimodal input is in vLLM's block hashes; the shim has none.",
    23: "The dimensions of identity are vLLM's; the shim's one (the salt) is row 22.",
    24: "The shim's hashes have a fixed root; vLLM's depend on algorithm and environment.",
    26: "What the adapter refuses of vLLM's configuration.",
    57: "What the adapter refuses of vLLM's cache groups.",
}
"""Rows whose guard can't be met on the shim."""
