"""Faults around the engine's blocks: who holds them, for how long, and what is in them.

vLLM's scheduler, our connector, real servers. The numbers are those of tests/faults.py.
"""

from __future__ import annotations

import pytest

from tests.vllm.conftest import Engines, Solo, Store
from tests.vllm.gate import Gate
from tests.vllm.scheduler_kit import B, Engine, Step, prompt
from tests.vllm.servers import transfer_config
from tests.waiting import eventually

# A save thread that is still connecting waits with the server, and has read no page yet.
PATIENT = {"connect_timeout_s": 30.0}


def preempt(engine: Engine, *names: str) -> None:
    """Preempt running requests (all of them without names), as vLLM does it between two steps."""
    scheduler = engine.scheduler
    for request in scheduler.running[::-1]:
        if not names or request.request_id in names:
            scheduler.running.remove(request)
            scheduler._preempt_request(request, 0.0, drop_stale_output=True)
            scheduler.prev_step_scheduled_req_ids.discard(request.request_id)


def pausing(engines: Engines, store: Store, blocks: int, hold: float = 1.0) -> Engine:
    """An engine whose saves wait until the data node is resumed."""
    engine = engines(kit={"num_blocks": blocks}, hold_share_max=hold, **PATIENT)
    store.pause_data()
    return engine


def test_fault_01_a_preempted_requests_save_keeps_its_bytes(
    engines: Engines, store: Store, solo: Solo
) -> None:
    mine, long, other = prompt(101, 8 * B + 3), prompt(105, 12 * B), prompt(102, 9 * B)
    engine = pausing(engines, store, 24, hold=0.36)  # 8 blocks: the first one's, no more
    engine.ask("a", mine, 40, session_id="s")
    second = engine.ask("x", long, 4, session_id="x")
    engine.run_until(engine.saves, "a save on its way")
    preempt(engine, "a")
    engine.abort("a")
    engine.run_until(lambda: second.finished, "room for another")
    # Blocks are handed out in the order in which they were given back: the first request's next,
    # if they were free.
    third = engine.ask("b", other, 4, session_id="t")
    engine.run_until(lambda: third.finished, "others to fill what was freed")
    store.data.resume()
    engine.run_all()
    assert (second.tokens, third.tokens) == (solo(long), solo(other))
    engine.assert_empty()
    # Stored whole, or given up because the engine was short of blocks: never another's bytes.
    text = engines().answer("c", mine, 8, session_id="s")
    assert text.cached in (0, 8 * B) and text.tokens == solo(mine, 8)


def test_fault_01_a_save_that_lost_its_blocks_overwrites_nobodys_object(
    engines: Engines, store: Store, solo: Solo
) -> None:
    """One engine is told to empty its cache while its save is stuck; another saves the same."""
    gate = Gate(store.data.socket_path)
    stores = {"index": store.index.url, "data": gate.url}
    transfer = transfer_config(stores, **PATIENT)
    mine = prompt(103, 8 * B + 3)
    slow = engines(transfer=transfer, kit={"num_blocks": 14})
    gate.shut()
    slow.answer("a", mine, 2, session_id="s")
    slow.run_until(lambda: gate.waiting, "the save to be stuck")
    gate.pass_by()
    stale = {block for job in slow.saves() for block in job.blocks}
    assert slow.scheduler.reset_prefix_cache(), "nothing may make a reset fail"
    other = slow.ask("b", prompt(104, 11 * B), 2)
    slow.run_until(lambda: other.finished, "another request in the same blocks")
    assert stale & slow.tables["b"]
    swift = engines(transfer=transfer)
    swift.answer("a", mine, 2, session_id="s")
    swift.run_all()
    gate.open()
    slow.run_all()
    text = engines(transfer=transfer).answer("c", mine, 8, session_id="s")
    gate.close()
    assert text.tokens == solo(mine, 8)


def test_fault_02_one_id_preempted_again_and_again_settles_every_job_once(
    engines: Engines, store: Store, solo: Solo
) -> None:
    tokens = prompt(201, 4 * B + 1)
    engine = pausing(engines, store, 64)
    text = engine.ask("a", tokens, 4 * B, session_id="s")
    for turn in range(3):
        goal = (turn + 1) * (B + 5)
        engine.run_until(lambda goal=goal: len(text.tokens) > goal, "more tokens")  # type: ignore[misc]
        preempt(engine)
    store.data.resume()
    engine.run_all()
    jobs = [job.job for job in engine.saves()]
    reported = [
        result.job
        for out in engine.outputs
        if out.kv_connector_worker_meta is not None
        for report in out.kv_connector_worker_meta.reports
        for result in report.results
    ]
    assert text.request.num_preemptions == 3
    assert text.tokens == solo(tokens, 4 * B)
    assert len(set(jobs)) == len(jobs) and sorted(reported) == sorted(
        jobs + [job.job for job in engine.loads()]
    )
    engine.assert_empty()


def test_fault_04_no_block_is_handed_out_while_it_is_being_saved(
    engines: Engines, store: Store, solo: Solo
) -> None:
    tokens = prompt(401, 6 * B)
    engine = pausing(engines, store, 20)
    engine.answer("a", tokens, 2, session_id="s")
    engine.run_until(lambda: engine.saves(), "a save on its way")
    held = {block for job in engine.saves() for block in job.blocks}
    assert len(held) == 6
    # Answered without the store: update_state_after_alloc gets 0 external tokens.
    for name in ("b", "c"):
        other = engine.ask(name, prompt(402 + ord(name), 10 * B), 20, session_id=name)
        engine.run_until(lambda other=other: other.finished, "the other request")  # type: ignore[misc]
        assert not held & engine.tables[name]
    store.data.resume()
    engine.run_all()
    engine.assert_empty()
    again = engines().answer("c", tokens, 4, session_id="s")
    assert (again.cached, again.tokens) == (5 * B, solo(tokens))


def test_fault_28_abort_while_waiting_for_a_load(
    engines: Engines, store: Store, solo: Solo
) -> None:
    tokens = prompt(281, 6 * B + 1)
    engines().answer("w", tokens, 2, session_id="s")
    engines.made[0].run_all()
    reader = engines(**PATIENT)
    store.data.pause()
    reader.ask("a", tokens, 4, session_id="s")
    reader.run_until(lambda: reader.loads(), "a load on its way")
    reader.abort("a")
    reader.step()
    assert reader.held_blocks() >= 6, "the blocks belong to the load until it has ended"
    store.data.resume()
    reader.run_all()
    reader.assert_empty()
    assert not reader.saves(), "blocks of an aborted load are saved by nobody"
    again = reader.answer("b", tokens, 4, session_id="s")
    assert (again.cached, again.tokens) == (6 * B, solo(tokens))


def test_fault_29_a_second_request_with_all_keys_there_frees_its_blocks(
    engines: Engines, solo: Solo
) -> None:
    tokens = prompt(291, 5 * B + 2)
    engine = engines()
    for turn in range(3):
        text = engine.answer(f"r{turn}", tokens, 4, session_id="s")
        assert text.tokens == solo(tokens)
        engine.run_all()
        engine.assert_empty()  # empties the local cache, too
    assert [len(job.blocks) for job in engine.saves()] == [5]


def test_fault_30_every_hold_ends_by_its_deadline(
    engines: Engines, store: Store, solo: Solo
) -> None:
    tokens = prompt(301, 6 * B)
    engine = engines(save_deadline_s=1.0, object_ttl_s=60.0)
    engine.answer("first", prompt(302, 2 * B), 2, session_id="s")
    engine.run_all()  # the connection is up, so that no attempt to connect times out
    store.data.pause()
    text = engine.answer("a", tokens, 2, session_id="s")
    assert text.tokens == solo(tokens, 2)
    engine.run_all()  # with the node still paused
    engine.assert_empty()


def test_fault_31_a_request_rejected_before_admission_leaves_nothing(engines: Engines) -> None:
    engine = engines()
    params = {"kv_transfer_params": {"do_remote_prefill": True}}
    request = engine.make("a", prompt(311, 1), 1, extra_args=params, abort_immediately=True)
    engine.add(request)
    engine.abort("a")
    engine.run_all()
    engine.assert_empty()
    assert engine.connector.get_kv_connector_stats() is None or not engine.loads()


def test_fault_33_only_loads_that_were_issued_are_reported(engines: Engines) -> None:
    engine = engines()
    for turn in range(3):
        engine.ask(f"r{turn}", prompt(330 + turn, 3 * B), 4, session_id=f"s{turn}")
    engine.run_all()
    assert engine.scheduler.reset_prefix_cache()
    engine.answer("hit", prompt(330, 3 * B), 4, session_id="s0")
    engine.answer("miss", prompt(339, 3 * B), 4, session_id="s9")
    engine.run_all()
    reported = [r for out in engine.outputs for r in out.finished_recving]
    assert reported == ["hit"], "once, and only for the load"


def test_fault_34_no_send_is_ever_reported(engines: Engines) -> None:
    engine = engines()
    for turn in range(4):
        engine.ask(f"r{turn}", prompt(340 + turn, 3 * B), 8, session_id="s")
    engine.run_until(lambda: engine.texts["r0"].tokens, "tokens")
    engine.abort("r1")
    engine.run_all()
    assert engine.saves()
    assert not any(out.finished_sending for out in engine.outputs)
    engine.assert_empty()


@pytest.mark.parametrize("hold", [0.25, 1.0])
def test_fault_37_a_small_pool_under_slow_saves_finishes_everything(
    engines: Engines, store: Store, solo: Solo, hold: float
) -> None:
    engine = engines(
        kit={"num_blocks": 21}, hold_share_max=hold, save_deadline_s=2.0, object_ttl_s=60.0
    )
    store.pause_data()
    prompts = [prompt(370 + i, 3 * B + i) for i in range(8)]
    texts = [engine.ask(f"r{i}", p, 2 * B, session_id=f"s{i}") for i, p in enumerate(prompts)]
    engine.run_until(engine.saves, "a save that gets nowhere")
    store.data.resume()
    engine.run_all()
    assert [t.tokens for t in texts] == [solo(p, 2 * B) for p in prompts]
    assert any(t.request.num_preemptions for t in texts)
    engine.assert_empty()


@pytest.mark.parametrize("ahead", [0, 1])
def test_fault_12_many_sessions_in_a_tiny_pool_read_nobody_elses_blocks(
    engines: Engines, solo: Solo, ahead: int
) -> None:
    engine = engines(kit={"num_blocks": 40, "tokens_per_step": 256, "steps_ahead": ahead})
    prompts = [prompt(1200 + i, B + 7 * (i % 9)) for i in range(64)]
    for turn in range(2):
        texts = [
            engine.ask(f"{turn}/{i}", p, 40, session_id=f"s{i}") for i, p in enumerate(prompts)
        ]
        engine.run_all()
        assert [t.tokens for t in texts] == [solo(p, 40) for p in prompts]
    assert engine.loads(), "the second round comes from the store"
    engine.assert_empty()


def test_fault_48_a_request_that_ends_between_plan_and_load(engines: Engines, solo: Solo) -> None:
    tokens = prompt(481, 5 * B + 1)
    engines().answer("w", tokens, 2, session_id="s")
    engines.made[0].run_all()
    reader = engines()
    reader.ask("a", tokens, 4, session_id="s")

    def planned() -> Step | None:
        step = Step(reader.scheduler.schedule())
        if step.output.kv_connector_metadata.step.loads:
            return step
        reader.run(step)
        return None

    step = eventually(planned, 10, "a load in a step's metadata")
    reader.abort("a")
    reader.run(step)
    reader.run_all()
    assert len(reader.loads()) == 1
    reader.assert_empty()
    assert reader.answer("b", tokens, 4, session_id="s").tokens == solo(tokens)


@pytest.mark.parametrize("ahead", [0, 1])
def test_fault_54_chunked_prefill_stores_every_block(
    engines: Engines, solo: Solo, ahead: int
) -> None:
    tokens = prompt(541, 10 * B)
    engine = engines(kit={"tokens_per_step": 3 * B + 5, "steps_ahead": ahead})
    text = engine.answer("a", tokens, B + 1, session_id="s")
    engine.run_all()
    assert text.tokens == solo(tokens, B + 1)
    assert sum(len(job.blocks) for job in engine.saves()) == 11, engine.stats
    engine.assert_empty()
    whole = [*tokens, *text.tokens, *prompt(542, 3)]
    again = engines().answer("b", whole, 4, session_id="s")
    assert (again.cached, again.tokens) == (11 * B, solo(whole))


def test_fault_08_a_connector_that_always_misses_changes_nothing(
    engines: Engines, store: Store, solo: Solo
) -> None:
    store.index.kill()
    store.data.kill()
    for kit in ({}, {"steps_ahead": 1}, {"tokens_per_step": 70}, {"num_blocks": 20}):
        engine = engines(kit=kit)
        prompts = [prompt(800 + i, 3 * B + 11 * i) for i in range(4)]
        texts = [engine.ask(f"r{i}", p, 24, session_id="s") for i, p in enumerate(prompts)]
        engine.run_until(lambda texts=texts: all(t.finished for t in texts), "answers")  # type: ignore[misc]
        assert [t.tokens for t in texts] == [solo(p, 24) for p in prompts]
        engine.run_all()
        engine.assert_empty()
