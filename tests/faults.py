"""Faults that others have shipped, what guards against each here, and the tests that would see it.

    .venv/bin/python -m tests.faults [NUMBER ...]   (or `make faults`)

runs the proof: for each row with a mutant the tree is copied, the guard is taken out, and the row's
tests must fail, on vLLM too. That takes many minutes, so `make test` checks that the table is true
(every guard and test exists, every mutant still applies), and takes the guards out only where fast
tests can see it: `tests/mutations`. Numbers are stable and have gaps.
"""

from __future__ import annotations

import argparse
import ast
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MUTANT_TIMEOUT_S = 300
COPIED = ("connector", "store_worker", "engine_shim", "tests", "pyproject.toml")


@dataclass(frozen=True)
class Mutant:
    """A change that takes the guard out: `old`, found once in `path`, becomes `new`."""

    path: str
    old: str
    new: str


@dataclass(frozen=True)
class Row:
    """fault: what must not happen. guard: `path:name` of a function or class.

    tests: `path::name` of those on vLLM's own scheduler, and of others without the number in their
    name; a name may be the start of one. `numbered_tests` has all that carry the number.
    """

    number: int
    fault: str
    guard: str
    tests: tuple[str, ...]
    mutant: Mutant | None = None


BLOCKS = "tests/vllm/test_faults_blocks.py::"
LOADS = "tests/vllm/test_faults_loads.py::"
KEYS = "tests/vllm/test_faults_keys.py::"
LOOKUP = "tests/vllm/test_faults_lookup.py::"
WORKER = "tests/unit/test_worker.py::"
SHIM = "tests/integration/test_conversation.py::"
ON_SHIM = "tests/integration/test_faults_shim.py::test_fault_"
SHIM_REPORTS = "tests/integration/test_faults_shim_reports.py::test_fault_"
PREEMPTION = "tests/integration/test_preemption.py::test_fault_"
GUARDS = "tests/unit/test_core_guards.py::test_fault_"
ADAPTER = "connector/vllm_adapter.py"

NO_HOLD = Mutant("connector/ledger.py", "        if saving:\n", "        if False:\n")

ROWS: tuple[Row, ...] = (
    Row(
        1, "a preempted request's key gets another's bytes",
        "connector/ledger.py:Ledger.open",
        (
            BLOCKS + "test_fault_01_a_preempted_requests_save_keeps_its_bytes",
            PREEMPTION + "01_",
        ),
        NO_HOLD,
    ),
    Row(
        2, "a late end of an old transfer settles a new one",
        "connector/ledger.py:Ledger.settle",
        (
            BLOCKS + "test_fault_02_one_id_preempted_again_and_again_settles_every_job_once",
            PREEMPTION + "02_",
        ),
        Mutant("connector/ledger.py", "itertools.count(1)", "itertools.repeat(1)"),
    ),
    Row(
        3, "a block is copied before the forward pass has written it",
        "store_worker/paged/copy.py:fence",
        (
            "tests/unit/test_paged_copy.py::test_fault_3_nothing_is_read_before_the_fence",
            "tests/gpu/test_cuda_copy.py::test_fault_3_a_gather_waits_for_the_forward_pass",
        ),
    ),
    Row(
        4, "a block is handed out while it is being saved",
        "connector/ledger.py:Ledger.open",
        (
            BLOCKS + "test_fault_04_no_block_is_handed_out_while_it_is_being_saved",
            ON_SHIM + "04_",
        ),
        NO_HOLD,
    ),
    Row(
        5, "blocks are saved that another connector has yet to fill",
        "connector/scheduler.py:ConnectorScheduler.on_finished",
        (
            LOOKUP + "test_fault_05_an_abort_during_anothers_load_saves_nothing",
            LOOKUP + "test_fault_05_nothing_is_saved_below_anothers_unfinished_load",
            ON_SHIM + "05_",
        ),
        Mutant("connector/scheduler.py", "min(num_computed_tokens, tracker.computed, ",
               "min(num_computed_tokens, "),
    ),
    Row(
        6, "scheduler and worker disagree by one on a full hit",
        "connector/loads.py:LoadFlow.allocate",
        (
            LOADS + "test_fault_06_full_prompt_hit_is_one_number_on_both_sides",
            SHIM + "test_fault_06_53_a_full_hit_leaves_one_token",
        ),
        Mutant("connector/loads.py", "tracker.blocks[promise.start : stop]),",
               "tracker.blocks[promise.start + 1 : stop] + tracker.blocks[:1]),"),
    ),
    Row(
        7, "a load overwrites blocks the engine has itself",
        "connector/loads.py:LoadFlow.match",
        (
            LOADS + "test_fault_07_blocks_that_the_engine_has_are_never_written",
            ON_SHIM + "07_",
        ),
        Mutant("connector/loads.py", "tracker.blocks[promise.start : stop]),",
               "tracker.blocks[: stop - promise.start]),"),
    ),
    Row(
        8, "a connector that never hits changes the text",
        "connector/loads.py:LoadFlow.match",
        (
            BLOCKS + "test_fault_08_a_connector_that_always_misses_changes_nothing",
            ON_SHIM + "08_",
        ),
    ),
    Row(
        9, "recompute after a refused load gives other tokens",
        "connector/vllm_adapter.py:SessionKVConnector.get_block_ids_with_load_errors",
        (
            LOADS + "test_fault_09_recompute_after_a_refused_load_gives_the_same_text",
            "tests/integration/test_async_scheduling.py::test_fault_09_",
            SHIM_REPORTS + "09_",
        ),
        Mutant(ADAPTER, "if outcome != BlockOutcome.OK", "if outcome == BlockOutcome.TIMED_OUT"),
    ),
    Row(
        10, "a hit ends in the middle of a block",
        "connector/planner.py:usable_depth",
        (LOADS + "test_fault_10_promises_are_whole_blocks", SHIM + "test_fault_10_promises"),
        Mutant("connector/loads.py", "tokens = stop * engine.tokens_per_block - num_computed",
               "tokens = stop * engine.tokens_per_block + 1 - num_computed"),
    ),
    Row(
        11, "device memory is read before the device has written it",
        "store_worker/paged/copy.py:fence",
        ("tests/unit/test_paged_copy.py::test_fault_3_nothing_is_read_before_the_fence",),
    ),
    Row(
        12, "text is wrong only under many requests at once",
        "connector/ledger.py:Ledger.open",
        (
            BLOCKS + "test_fault_12_many_sessions_in_a_tiny_pool_read_nobody_elses_blocks",
            "tests/vllm/test_conversation.py::test_many_conversations_at_once",
            "tests/integration/test_concurrency.py::test_fault_12_",
        ),
    ),
    Row(
        13, "another object's bytes are taken for this block's",
        "store_worker/codec.py:Codec.verify",
        (
            LOADS + "test_fault_13_another_objects_bytes_are_a_miss",
            WORKER + "test_fault_13_another_objects_bytes_are_found_with_or_without_checksums",
            ON_SHIM + "13_14_",
        ),
        Mutant("store_worker/codec.py", "        if len(header) != HEADER_BYTES:\n",
               "        return True\n        if len(header) != HEADER_BYTES:\n"),
    ),
    Row(
        14, "changed bytes are loaded; a read that hangs holds a thread for ever",
        "store_worker/codec.py:checksum",
        (
            LOADS + "test_fault_14_a_load_that_hangs_ends_at_its_deadline",
            LOADS + "test_fault_13_another_objects_bytes_are_a_miss",
            WORKER + "test_fault_14_any_flipped_byte_is_found",
            ON_SHIM + "13_14_",
        ),
        Mutant("store_worker/codec.py", "or checksum(regions) == digest", "or True"),
    ),
    Row(
        15, "a missing block is reported as there, or those before it as lost",
        "store_worker/load_job.py:_load_batch",
        (
            LOADS + "test_fault_15_a_missing_block_leaves_what_lies_before_it",
            WORKER + "test_fault_15_missing_and_broken_blocks_are_named_one_by_one",
            ON_SHIM + "15_",
            SHIM_REPORTS + "15_",
        ),
    ),
    Row(
        17, "two deployments whose bytes differ share keys",
        "connector/vllm_facts.py:namespace_spec",
        (
            KEYS + "test_fault_17_whatever_changes_the_bytes_changes_the_namespace",
            "tests/unit/test_keys.py::test_fault_17_each_dimension_gives_disjoint_keys",
        ),
        Mutant("connector/vllm_facts.py",
               "tp_size=vllm_config.parallel_config.tensor_parallel_size", "tp_size=1"),
    ),
    Row(
        18, "an adapter reads another's blocks",
        "connector/loads.py:LoadFlow.ask",
        (KEYS + "test_fault_23_every_dimension_reaches_the_store",),
    ),
    Row(
        19, "new weights under an old name read old blocks",
        "connector/vllm_facts.py:namespace_spec",
        (
            KEYS + "test_fault_19_new_weights_under_an_old_name_have_a_config_key",
            SHIM_REPORTS + "19_",
        ),
        Mutant("connector/vllm_facts.py", "(model.revision, config.model_revision)",
               "(model.revision,)"),
    ),
    Row(
        21, "different images share blocks",
        "connector/loads.py:LoadFlow.ask",
        (KEYS + "test_fault_21_two_images_share_no_block",
         KEYS + "test_fault_23_every_dimension_reaches_the_store"),
    ),
    Row(
        22, "a salt is honoured in the engine and dropped in the store",
        "connector/session.py:session_key",
        (KEYS + "test_fault_22_a_salt_separates_sessions_too",
         SHIM + "test_fault_22_another_salt_reads_nothing"),
        Mutant("connector/session.py", '(cache_salt or "").encode()', 'b""'),
    ),
    Row(
        23, "a dimension of identity is missing in one tier",
        "connector/loads.py:LoadFlow.ask",
        (KEYS + "test_fault_23_every_dimension_reaches_the_store",),
    ),
    Row(
        24, "hashes are random per process: every lookup misses in silence",
        "connector/vllm_adapter.py:hash_seed",
        (KEYS + "test_fault_24_hashes_that_no_other_process_has_are_told_apart_and_named",),
        Mutant(ADAPTER, "    return seed\n\n\nclass", '    return ""\n\n\nclass'),
    ),
    Row(
        26, "keys of a deployment that is not understood are derived anyway",
        "connector/vllm_facts.py:check_supported",
        (KEYS + "test_fault_26_what_cannot_be_served_is_refused_at_start",),
        Mutant("connector/vllm_facts.py", "        if size > 1:\n", "        if size > 99:\n"),
    ),
    Row(
        27, "a reset leaves old blocks in use, or wipes everybody's",
        "connector/scheduler.py:ConnectorScheduler.reset_cache",
        (
            KEYS + "test_fault_27_reset_cache_moves_one_engine_and_nobody_else",
            ON_SHIM + "27_",
        ),
        Mutant("connector/scheduler.py",
               "self._context.namespace = self._namespace_of(epoch)", "pass"),
    ),
    Row(
        28, "an abort during a load leaves its blocks held for ever",
        "connector/vllm_adapter.py:SessionKVConnector.get_transfer_results",
        (
            BLOCKS + "test_fault_28_abort_while_waiting_for_a_load",
            "tests/vllm/test_pressure.py::test_a_client_that_goes_away_during_the_load",
            ON_SHIM + "28_",
        ),
        Mutant(ADAPTER, "for r in results if r.kind is JobKind.LOAD}",
               "for r in results if r.kind is JobKind.LOAD and str(r.request) != 'a'}"),
    ),
    Row(
        29, "a save with nothing to write never ends",
        "connector/saves.py:SaveFlow.prepared",
        (
            BLOCKS + "test_fault_29_a_second_request_with_all_keys_there_frees_its_blocks",
            WORKER + "test_fault_29_38_every_exception_becomes_outcomes",
            ON_SHIM + "29_",
        ),
        Mutant("connector/saves.py", "            elif job.first == len(job.hashes):\n",
               "            elif job.first == len(job.hashes) and job.first == 0:\n"),
    ),
    Row(
        30, "blocks are held for a transfer that nobody ends",
        "store_worker/save_job.py:_save_slice",
        (
            BLOCKS + "test_fault_30_every_hold_ends_by_its_deadline",
            ON_SHIM + "30_",
            GUARDS + "30_39_",
        ),
        Mutant("connector/saveops.py", "deadline_s=context.config.save_deadline_s,",
               "deadline_s=1e9,"),
    ),
    Row(
        31, "a request that is rejected before it is admitted leaves something",
        "connector/scheduler.py:ConnectorScheduler.on_finished",
        (
            BLOCKS + "test_fault_31_a_request_rejected_before_admission_leaves_nothing",
            ON_SHIM + "31_",
            GUARDS + "31_",
        ),
    ),
    Row(
        33, "a load is reported twice, or one that was never issued",
        "connector/vllm_adapter.py:SessionKVConnector.get_transfer_results",
        (
            BLOCKS + "test_fault_33_only_loads_that_were_issued_are_reported",
            LOOKUP + "test_fault_33_under_multiconnector_anothers_load_is_not_reported_by_us",
            ON_SHIM + "33_34_",
        ),
        Mutant(ADAPTER, "for r in results if r.kind is JobKind.LOAD}", "for r in results}"),
    ),
    Row(
        34, "a send is reported for a request that has none",
        "connector/vllm_adapter.py:SessionKVConnector.get_transfer_results",
        (
            BLOCKS + "test_fault_34_no_send_is_ever_reported",
            ON_SHIM + "33_34_",
        ),
        Mutant(ADAPTER, "KVConnectorTransferResults(finished_recving=loads)",
               "KVConnectorTransferResults(set(finished_req_ids), loads)"),
    ),
    Row(
        36, "a failed load leads to an assertion that stops the engine",
        "connector/loads.py:LoadFlow._failed",
        (
            LOADS + "test_fault_36_a_failed_load_then_more_steps_keeps_the_engine_up",
            ON_SHIM + "36_38_41_",
        ),
    ),
    Row(
        37, "slow saves and a small pool stand in each other's way for ever",
        "connector/ledger.py:Ledger.room",
        (
            BLOCKS + "test_fault_37_a_small_pool_under_slow_saves_finishes_everything",
            "tests/unit/test_core_pressure.py::test_",
            "tests/vllm/test_pressure.py::test_preempted_requests_say_the_same",
            PREEMPTION + "37_",
        ),
    ),
    Row(
        38, "failed loads are logged and never reported",
        "store_worker/worker.py:StoreWorker.end_all",
        (
            LOADS + "test_fault_38_a_dead_node_fails_every_load_and_no_request",
            WORKER + "test_fault_29_38_every_exception_becomes_outcomes",
            ON_SHIM + "36_38_41_",
            "tests/unit/test_executor.py::test_",
        ),
        Mutant("store_worker/executor.py",
               "        end(task.failed, error)\n\n\ndef end", "\n\ndef end"),
    ),
    Row(
        39, "a load whose answer never comes parks its request",
        "store_worker/load_job.py:_load_slice",
        (
            LOADS + "test_fault_39_a_blocked_get_is_recomputed",
            WORKER + "test_fault_39_a_late_load_is_counted",
            ON_SHIM + "39_50_",
            GUARDS + "30_39_",
        ),
        Mutant("connector/loads.py", "deadline_s=context.config.load_deadline_s,",
               "deadline_s=1e9,"),
    ),
    Row(
        40, "one exception ends the lookup thread, and the scheduler waits for it",
        "store_worker/index/client.py:IndexClient._answer",
        (LOOKUP + "test_fault_40_a_lookup_that_fails_once_is_a_miss_and_the_next_one_works",
         WORKER + "test_fault_40_malformed_jobs_end_too"),
    ),
    Row(
        41, "an idle engine is not woken when a load has failed",
        "connector/vllm_adapter.py:SessionKVConnector.get_block_ids_with_load_errors",
        (
            LOADS + "test_fault_41_a_failed_load_wakes_an_idle_engine",
            ON_SHIM + "36_38_41_",
        ),
    ),
    Row(
        44, "part of an object is evicted, and the rest says it is there",
        "store_worker/codec.py:Codec.verify",
        (
            LOADS + "test_fault_44_an_evicted_object_is_a_clean_miss_and_is_forgotten",
            WORKER + "test_fault_44_truncated_objects_are_corrupt",
            ON_SHIM + "44_",
        ),
        Mutant("connector/loads.py",
               "if job.outcomes[index] in (BlockOutcome.MISSING, BlockOutcome.CORRUPT):",
               "if False:"),
    ),
    Row(
        46, "one stuck part of a load makes all of it ignore its timeout",
        "store_worker/job.py:run_job",
        (LOOKUP + "test_fault_46_one_stuck_node_of_two_costs_only_its_own_blocks",),
    ),
    Row(
        48, "a request ends between the plan of a step and its load",
        "connector/loads.py:LoadFlow.done",
        (
            BLOCKS + "test_fault_48_a_request_that_ends_between_plan_and_load",
            ON_SHIM + "28_48_",
        ),
    ),
    Row(
        50, "a store that hangs hangs the engine; a counter that falls raises",
        "connector/vllm_adapter.py:SessionKVPromMetrics.observe",
        (
            LOOKUP + "test_fault_50_metrics_never_raise",
            "tests/contract/test_data_node_worker.py::"
            "test_fault_50_a_node_that_never_answers_delays_nobody_else",
            ON_SHIM + "39_50_",
        ),
    ),
    Row(
        51, "a lookup blocks the scheduler",
        "connector/loads.py:LoadFlow.match",
        (
            LOOKUP + "test_fault_51_a_lookup_never_blocks_the_scheduler",
            GUARDS + "51_",
            "tests/integration/test_store_loss.py::test_a_server_that_accepts",
        ),
        Mutant("connector/loads.py", "if now < tracker.deadline:", "if True:"),
    ),
    Row(
        53, "a full hit leaves no token to compute",
        "connector/planner.py:usable_depth",
        (LOADS + "test_fault_53_one_token_is_always_left_to_compute",
         SHIM + "test_fault_06_53_a_full_hit_leaves_one_token"),
        Mutant("connector/planner.py", "(tracker.request.num_tokens - 1) //",
               "tracker.request.num_tokens //"),
    ),
    Row(
        54, "chunked prefill stores fewer blocks than it computes",
        "connector/planner.py:complete_depth",
        (
            BLOCKS + "test_fault_54_chunked_prefill_stores_every_block",
            ON_SHIM + "54_",
        ),
        Mutant("connector/planner.py", "        tokens // engine.tokens_per_block, len(",
               "        max(0, tokens // engine.tokens_per_block - 1), len("),
    ),
    Row(
        55, "what was stored is never hit",
        "connector/planner.py:turn_end",
        (
            LOADS + "test_fault_55_what_was_stored_is_hit",
            ON_SHIM + "55_",
        ),
    ),
    Row(
        57, "a model with several cache groups is served half",
        "connector/vllm_facts.py:check_supported",
        (KEYS + "test_fault_57_several_cache_groups_are_refused_with_the_flag_that_helps",),
        Mutant("connector/vllm_facts.py", "if len(kv_cache_config.kv_cache_groups) != 1:",
               "if False:"),
    ),
    Row(
        60, "decode looks before prefill has stored",
        "store_worker/index/client.py:IndexClient._lookup",
        (
            ON_SHIM + "60_",
            LOOKUP + "test_fault_60_decode_waits_for_the_hand_off_and_hits",
            LOOKUP + "test_fault_60_decode_falls_back_at_its_deadline",
            "tests/vllm/test_pd_proxy.py::test_conversation_streamed_through_the_proxy",
        ),
        Mutant("store_worker/index/client.py",
               "        if tip and waited_s < op.deadline_s and ", "        if False and "),
    ),
    Row(
        62, "another tensor-parallel size reads the wrong heads",
        "connector/vllm_facts.py:namespace_spec",
        (
            KEYS + "test_fault_17_whatever_changes_the_bytes_changes_the_namespace",
            "tests/vllm/test_variants.py::test_tp2_and_tp1_share_nothing",
            "tests/integration/test_tp.py::test_fault_62_",
        ),
        Mutant("connector/vllm_facts.py",
               "tp_size=vllm_config.parallel_config.tensor_parallel_size", "tp_size=1"),
    ),
)  # fmt: skip

LEFT_OUT: dict[int, str] = {
    56: "Not one fault but a property of the index (no holes, I1): the index's contract and "
    "property suites check it after every operation; the policy is switchable.",
    59: "Operators' stalls of Mooncake itself; deadlines and the breaker that bound them here are "
    "tested in tests/mooncake and in row 50.",
    61: "Copies of one block on every rank (MLA under tensor parallelism): each rank saves its own "
    "object here, which costs memory and is right; striping is not built.",
}

KNOWN = frozenset(
    number
    for first, last in (
        (1, 15), (17, 19), (21, 24), (26, 31), (33, 34), (36, 41), (44, 44), (46, 46), (48, 48),
        (50, 51), (53, 57), (59, 62),
    )
    for number in range(first, last + 1)
)  # fmt: skip


def functions_of(path: str) -> Iterator[str]:
    """Qualified names of the functions, methods and classes of a file."""

    def walk(node: ast.AST, prefix: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield prefix + child.name
                yield from walk(child, f"{prefix}{child.name}.")

    return walk(ast.parse((ROOT / path).read_text(encoding="utf-8")), "")


def numbered_tests() -> dict[int, list[str]]:
    """Every test that carries a row's number in its name (`test_fault_28_48_...`), by number."""
    found: dict[int, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        name = path.relative_to(ROOT).as_posix()
        for function in functions_of(name):
            start = re.match(r"test_fault((?:_\d+)+)_", function.split(".")[-1])
            numbers = {int(text) for text in start[1].split("_")[1:]} if start else set()
            for number in numbers & KNOWN:
                found.setdefault(number, []).append(f"{name}::{function}")
    return found


# ---- the proof --------------------------------------------------------------------------------


def prove(row: Row) -> str:
    """Take the guard out and run the row's tests: `killed`, or `SURVIVED`."""
    assert row.mutant is not None
    with tempfile.TemporaryDirectory(prefix="skv-mutant-") as name:
        tree = Path(name)
        for item in COPIED:
            copy = shutil.copytree if (ROOT / item).is_dir() else shutil.copy
            copy(ROOT / item, tree / item)
        (tree / ".cache").symlink_to(ROOT / ".cache")
        target = tree / row.mutant.path
        text = target.read_text(encoding="utf-8")
        target.write_text(text.replace(row.mutant.old, row.mutant.new), encoding="utf-8")
        return "killed" if any(fails(tree, test) for test in proving(row)) else "SURVIVED"


def proving(row: Row) -> list[str]:
    """The row's tests that need no whole vLLM server."""
    slow = ("test_conversation.py", "test_pressure.py", "test_variants.py", "test_pd_proxy.py")
    return [t for t in row.tests if not (t.startswith("tests/vllm/") and any(s in t for s in slow))]


def fails(tree: Path, test: str) -> bool:
    """Does a test, by the start of its name, fail in that tree? A hang counts."""
    path, _, name = test.partition("::")
    venv = ".venv-vllm" if path.startswith("tests/vllm/") else ".venv"
    command = [str(ROOT / venv / "bin" / "python"), "-m", "pytest", path, "-k", name, "-x", "-q"]
    try:
        done = subprocess.run(
            [*command, "--timeout", "60"],
            cwd=tree,
            capture_output=True,
            text=True,
            timeout=MUTANT_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return True
    # What ends badly after all has passed says nothing about the test.
    passed = re.search(r"\b\d+ passed", done.stdout) and " failed" not in done.stdout
    assert passed or done.returncode == 1, done.stdout + done.stderr
    return not passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("numbers", nargs="*", type=int, help="rows; all of them if left out")
    wanted = parser.parse_args().numbers
    survived = 0
    for row in ROWS:
        if wanted and row.number not in wanted:
            continue
        if row.mutant is None:
            print(f"{row.number:3} no mutant  {row.fault}")
            continue
        verdict = prove(row)
        survived += verdict != "killed"
        print(f"{row.number:3} {verdict:10} {row.fault}", flush=True)
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
