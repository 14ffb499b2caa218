"""Faults on the way in: loads that fail, hang, come late, or bring something else.

vLLM's scheduler, our connector, real servers. The numbers are those of tests/faults.py.
"""

from __future__ import annotations

import re

import pytest

from store_worker.codec import HEADER_BYTES
from tests.vllm.conftest import Engines, Solo, Store
from tests.vllm.scheduler_kit import B, Engine, Text, prompt

DEADLINE_S = 1.0
BLOCKS = 9
PROMPT = prompt(1, BLOCKS * B + 5)


def saved(engine: Engine, tokens: list[int], max_tokens: int = 4) -> Text:
    """Answer a prompt and wait until all of it is in the store."""
    text = engine.answer("writer", tokens, max_tokens, session_id="s")
    engine.run_all()
    assert engine.stats.get("saves_failed", 0) == 0
    assert engine.stats["tokens_saved"] == (len(tokens) + max_tokens - 1) // B * B
    engine.assert_empty()
    return text


def lose_objects(store: Store) -> None:
    """Delete every object, and nothing else, of the first node."""
    objects = store.objects()
    assert objects
    with store.data.client() as client:
        client.delete(*objects)


def counted(engine: Engine, name: str) -> float:
    """A counter, summed over its labels."""
    return sum(v for k, v in engine.stats.items() if re.fullmatch(rf"{name}(\{{.*\}})?", k))


@pytest.mark.parametrize("blocks", [1, 2, 9])
def test_fault_06_full_prompt_hit_is_one_number_on_both_sides(
    engines: Engines, solo: Solo, blocks: int
) -> None:
    tokens = prompt(6, blocks * B)
    saved(engines(), tokens, max_tokens=B)
    reader = engines()
    text = reader.answer("a", tokens, max_tokens=8, session_id="s")
    promised = (blocks * B - 1) // B * B
    assert text.cached == promised
    assert sum(len(job.blocks) for job in reader.loads()) * B == promised
    assert text.tokens == solo(tokens, 8)


def test_fault_07_blocks_that_the_engine_has_are_never_written(
    engines: Engines, solo: Solo
) -> None:
    tokens = prompt(7, 6 * B + 9)
    saved(engines(), tokens)
    reader = engines()
    reader.answer("short", tokens[: 3 * B + 4], session_id="other")
    reader.run_all()
    own = {h.block_id for h in reader.pool.blocks if h.block_hash is not None}
    assert len(own) >= 3
    before = {block: reader.model.page(block) for block in own}
    text = reader.answer("a", tokens, max_tokens=8, session_id="s")
    assert text.cached == 6 * B
    loaded = {block for job in reader.loads() if job.request == "a" for block in job.blocks}
    assert len(loaded) == 3 and not loaded & own
    assert {block: reader.model.page(block) for block in own} == before
    assert text.tokens == solo(tokens, 8)


def test_fault_10_promises_are_whole_blocks(engines: Engines) -> None:
    tokens = prompt(10, 5 * B)
    saved(engines(), tokens)
    reader = engines()
    for length in range(1, 4 * B + 1):
        request = reader.make(f"r{length}", tokens[:length], 1, session_id="s")
        reader.connector.on_new_request(request)
        found: list[int | None] = [None]

        def answered(request=request, found=found) -> bool:  # type: ignore[no-untyped-def]
            found[0] = reader.connector.get_num_new_matched_tokens(request, 0)[0]
            return found[0] is not None

        reader.run_until(answered, "the lookup")
        assert found[0] == (length - 1) // B * B, length
        again = reader.connector.get_num_new_matched_tokens(request, 0)
        assert again == (found[0], bool(found[0])), "asked twice, answered twice"
        reader.connector.request_finished(request, [])


def swap_two(objects: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """Two objects exchange their values, headers and all."""
    first, second = sorted(objects)[:2]
    return {first: objects[second], second: objects[first]}


def flip_byte(objects: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """The last byte of one payload changes."""
    key = sorted(objects)[0]
    return {key: objects[key][:-1] + bytes([objects[key][-1] ^ 1])}


def cut_short(objects: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """One value loses its end."""
    key = sorted(objects)[0]
    return {key: objects[key][:-1]}


@pytest.mark.parametrize("damage", [swap_two, flip_byte, cut_short])
def test_fault_13_another_objects_bytes_are_a_miss(
    engines: Engines, store: Store, solo: Solo, damage
) -> None:
    saved(engines(), PROMPT)
    with store.data.client() as client:
        for key, value in damage(store.objects()).items():
            client.set(key, value)
    reader = engines()
    text = reader.answer("a", PROMPT, max_tokens=8, session_id="s")
    reader.run_all()
    assert text.tokens == solo(PROMPT, 8)
    assert counted(reader, "load_blocks_failed") >= 1
    assert reader.stats.get("load_objects{outcome=CORRUPT}", 0) >= 1
    reader.assert_empty()


@pytest.mark.parametrize("checksums", [True, False])
def test_control_two_payloads_that_change_places_are_noticed(
    engines: Engines, store: Store, solo: Solo, checksums: bool
) -> None:
    """Without the checksum the text is wrong: so equal text proves equal blocks."""
    saved(engines(checksums=checksums), PROMPT)
    first, second = sorted(objects := store.objects())[:2]
    with store.data.client() as client:
        for key, other in ((first, second), (second, first)):
            client.set(key, objects[key][:HEADER_BYTES] + objects[other][HEADER_BYTES:])
    reader = engines(checksums=checksums)
    text = reader.answer("a", PROMPT, max_tokens=8, session_id="s")
    assert (text.tokens == solo(PROMPT, 8)) == checksums
    assert (counted(reader, "load_blocks_failed") > 0) == checksums


def test_fault_14_a_load_that_hangs_ends_at_its_deadline(
    engines: Engines, store: Store, solo: Solo
) -> None:
    saved(engines(), PROMPT)
    reader = engines(load_deadline_s=DEADLINE_S)
    store.data.pause()
    text = reader.answer("a", PROMPT, max_tokens=8, session_id="s")
    assert text.tokens == solo(PROMPT, 8)
    assert len(reader.loads()) == 1, "a failed hit must not be promised again"
    store.data.resume()
    reader.run_all()
    reader.assert_empty()


@pytest.mark.parametrize("lost", [0, 2, 8])
def test_fault_15_a_missing_block_leaves_what_lies_before_it(
    engines: Engines, store: Store, solo: Solo, lost: int
) -> None:
    saved(engines(), PROMPT)
    reader = engines()
    request = reader.make("a", PROMPT, 8, session_id="s")
    with store.data.client() as client:
        (key,) = [k for k in store.objects() if k.endswith(request.block_hashes[lost])]
        client.delete(key)
    text = reader.add(request)
    reader.run_all()
    assert text.tokens == solo(PROMPT, 8)
    assert counted(reader, "tokens_loaded") == lost * B
    reader.assert_empty()


@pytest.mark.parametrize("ahead", [0, 1])
def test_fault_09_recompute_after_a_refused_load_gives_the_same_text(
    engines: Engines, store: Store, solo: Solo, ahead: int
) -> None:
    saved(engines(), PROMPT)
    lose_objects(store)
    reader = engines(kit={"steps_ahead": ahead})
    texts = [reader.ask(f"r{i}", PROMPT, 24, session_id="s") for i in range(3)]
    reader.run_all()
    assert [t.tokens for t in texts] == [solo(PROMPT, 24)] * 3
    reader.assert_empty()


def test_fault_36_a_failed_load_then_more_steps_keeps_the_engine_up(
    engines: Engines, store: Store, solo: Solo
) -> None:
    saved(engines(), PROMPT)
    reader = engines()
    lose_objects(store)
    text = reader.ask("a", PROMPT, 3 * B, session_id="s")
    reader.run_until(lambda: len(text.tokens) > B, "tokens after the failed load")
    later = reader.ask("b", prompt(36, 70), 8, session_id="t")
    reader.run_all()
    assert text.tokens == solo(PROMPT, 3 * B)
    assert later.tokens == solo(prompt(36, 70), 8)
    assert reader.saves(), "after a failed load the request is saved again"
    reader.assert_empty()


def test_fault_38_a_dead_node_fails_every_load_and_no_request(
    engines: Engines, store: Store, solo: Solo
) -> None:
    saved(engines(), PROMPT)
    reader = engines()
    store.data.kill()
    texts = [reader.ask(f"r{i}", PROMPT, 8, session_id="s") for i in range(4)]
    reader.run_until(lambda: all(t.finished for t in texts), "all answers")
    assert [t.tokens for t in texts] == [solo(PROMPT, 8)] * 4
    reader.run_all()
    reader.assert_empty()


def test_fault_39_a_blocked_get_is_recomputed(engines: Engines, store: Store, solo: Solo) -> None:
    saved(engines(), PROMPT)
    reader = engines(load_deadline_s=DEADLINE_S)
    first = reader.answer("warm", PROMPT[: 3 * B], session_id="s")  # the connection is up
    assert first.cached == 2 * B
    reader.run_all()
    assert reader.scheduler.reset_prefix_cache()
    store.data.pause()
    text = reader.answer("a", PROMPT, max_tokens=8, session_id="s")
    assert text.tokens == solo(PROMPT, 8)
    store.data.resume()
    reader.run_all()
    reader.assert_empty()
    after = reader.answer("b", prompt(39, 200), session_id="t")
    assert after.tokens == solo(prompt(39, 200))


def test_fault_41_a_failed_load_wakes_an_idle_engine(
    engines: Engines, store: Store, solo: Solo
) -> None:
    saved(engines(), PROMPT)
    lose_objects(store)
    reader = engines()
    text = reader.ask("only", PROMPT, 2, session_id="s")
    reader.run_until(lambda: text.finished, "the only request, with no other traffic")
    ended = [m for m in reader.outputs if m.invalid_block_ids]
    assert ended and all("only" in m.finished_recving for m in ended)
    assert text.tokens == solo(PROMPT, 2)


def test_fault_44_an_evicted_object_is_a_clean_miss_and_is_forgotten(
    engines: Engines, store: Store, solo: Solo
) -> None:
    saved(engines(), PROMPT)
    reader = engines()
    request = reader.make("a", PROMPT, 4, session_id="s")
    with store.data.client() as client:
        for key in store.objects():
            if key.endswith((request.block_hashes[4], request.block_hashes[7])):
                client.delete(key)
    text = reader.add(request)
    reader.run_all()
    assert text.tokens == solo(PROMPT)
    assert counted(reader, "blocks_forgotten") >= 2
    reader.assert_empty()
    # What was lost was computed and saved again: the next engine finds all of it.
    third = engines()
    text = third.answer("c", PROMPT, session_id="s")
    assert (text.cached, text.tokens) == (BLOCKS * B, solo(PROMPT))
    assert counted(third, "load_blocks_failed") == 0


def test_fault_53_one_token_is_always_left_to_compute(engines: Engines, solo: Solo) -> None:
    tokens = prompt(53, 4 * B)
    saved(engines(), tokens, max_tokens=2 * B)
    whole = tokens + solo(tokens, 2 * B)
    for length in (4 * B - 1, 4 * B, 4 * B + 1):
        reader = engines()
        text = reader.answer("a", whole[:length], max_tokens=4, session_id="s")
        assert text.cached == (length - 1) // B * B
        assert text.tokens == solo(whole[:length])


def test_fault_55_what_was_stored_is_hit(engines: Engines, solo: Solo) -> None:
    writer, reader = engines(), engines()
    for length, reply in ((B - 1, 1), (B, 2), (3 * B + 7, 40), (10 * B, 3 * B)):
        tokens = prompt(length, length)
        text = writer.answer(f"w{length}", tokens, reply, session_id=f"s{length}")
        writer.run_all()
        assert text.tokens == solo(tokens, reply)
        turn = tokens + text.tokens + prompt(55, 20)
        again = reader.answer(f"r{length}", turn, 4, session_id=f"s{length}")
        need = min((length + reply - 1) // B, (len(turn) - 1) // B) * B
        assert again.cached == need, (length, reply)
        assert again.tokens == solo(turn)
        reader.run_all()
