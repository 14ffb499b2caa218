"""Saves of the scheduler half: what is planned, when it is sent, what is committed."""

from __future__ import annotations

import pytest

from connector.indexmsg import CommitOutcome, DeclineReason
from connector.lookup import AbandonOp, AbortOp, CloseOp, CommitOp, LookupOp, PrepareOp
from connector.meta import BlockOutcome
from tests.unit.core_kit import B, FakeRequest, Kit


def request(tokens: int = 22, name: str = "r") -> FakeRequest:
    return FakeRequest(name, num_prompt_tokens=tokens, num_tokens=tokens)


def running(kit: Kit, r: FakeRequest, hit: int = 0) -> None:
    """The request has arrived and computes its whole prompt in one step."""
    kit.arrive(r)
    kit.hit(hit)
    assert kit.match(r) is not None
    kit.step(r, 0, r.num_tokens)


def test_blocks_are_prepared_with_the_step_that_computes_them_and_sent_with_the_next() -> None:
    kit, r = Kit(), request()
    running(kit, r)
    assert kit.pool.refs == {100: 1, 101: 1, 102: 1, 103: 1, 104: 1}
    op = kit.grant()
    assert (op.start, op.parent, len(op.hashes)) == (0, b"", 5)
    assert (op.session, op.generation) == (b"session-key", 7)
    _, (save,) = kit.step()
    assert save.blocks == (100, 101, 102, 103, 104)
    assert save.hashes == tuple(r.block_hashes)
    assert (save.session, save.generation) == (b"session-key", 7)


def test_blocks_are_given_back_when_all_ranks_have_reported_and_only_then_committed() -> None:
    kit, r = Kit(ranks=2), request()
    running(kit, r)
    kit.grant()
    _, (save,) = kit.step()
    kit.report(save, rank=0)
    assert kit.pool.refs
    assert not kit.index.has(CommitOp)
    kit.report(save, rank=1)
    assert not kit.pool.refs
    assert kit.commit().saved == 5
    kit.core.poll()
    assert kit.core.open_jobs() == 0


def test_a_hash_alone_proves_nothing() -> None:
    kit, r = Kit(), request(7)
    kit.arrive(r)
    kit.hit(0)
    kit.step(r, 0, 7)
    assert kit.saved(r) == r.block_hashes[:1]
    r.num_tokens = 8  # sampled, not computed: the second hash is there, its block is not
    kit.step(r, 7, 0)
    assert not kit.index.has(PrepareOp)
    kit.step(r, 7, 1)
    assert kit.index.take(PrepareOp).start == 1


def test_chunked_prefill_saves_every_block() -> None:
    kit, r = Kit(), request(40)
    kit.arrive(r)
    kit.hit(0)
    saved: list[bytes] = []
    for computed, tokens in ((0, 12), (12, 12), (24, 16)):
        kit.step(r, computed, tokens)
        saved += kit.saved(r)
    assert saved == r.block_hashes[:10]


def test_what_is_computed_during_a_save_becomes_the_next_one() -> None:
    kit, r = Kit(), request(40)
    kit.arrive(r)
    kit.hit(0)
    for computed, tokens in ((0, 12), (12, 12), (24, 16)):
        kit.step(r, computed, tokens)
    assert kit.saved(r) == r.block_hashes[:3]
    r.num_tokens = 41
    kit.step(r, 40, 1)
    assert kit.saved(r) == r.block_hashes[3:10]


def test_what_is_stored_already_is_neither_sent_nor_held() -> None:
    kit, r = Kit(), request()
    running(kit, r)
    kit.grant(first_missing=3)
    _, (save,) = kit.step()
    assert save.blocks == (103, 104)
    kit.report(save)
    op = kit.commit()
    assert op.saved == 2
    assert op.hashes == save.hashes


def test_a_save_of_nothing_moves_the_hold_only() -> None:
    kit, r = Kit(), request()
    running(kit, r)
    kit.grant(first_missing=5)
    _, saves = kit.step()
    assert saves == []
    assert not kit.pool.refs
    assert kit.commit().saved == 0


def ended(kit: Kit) -> FakeRequest:
    """A request of ten blocks that ends with its first step: two jobs are left to save."""
    r = request(41)
    kit.arrive(r)
    kit.hit(0)
    kit.step(r, 0, 0)
    kit.end_of(r, 40)
    assert len(kit.pool.refs) == 10
    return r


def test_what_is_left_at_the_end_is_held_and_committed_in_order_of_depth() -> None:
    kit = Kit(blocks_per_job_max=5)
    r = ended(kit)
    assert kit.grant().start == 0
    assert not kit.index.has(PrepareOp)
    _, (first,) = kit.step()
    kit.report(first)
    assert len(kit.pool.refs) == 5
    commit = kit.commit()
    assert (commit.start, commit.turn_end) == (0, None)
    kit.core.poll()
    assert kit.grant().parent == r.block_hashes[4]
    _, (second,) = kit.step()
    kit.report(second)
    last = kit.commit()
    assert last.start == 5
    assert last.turn_end is not None
    kit.core.poll()
    assert kit.idle()
    assert not kit.index.has(CommitOp)


def test_a_block_that_failed_on_any_rank_ends_what_is_committed() -> None:
    kit = Kit(ranks=2, blocks_per_job_max=5)
    ended(kit)
    kit.grant()
    _, (first,) = kit.step()
    kit.report(first, rank=0)
    kit.report(first, {3: BlockOutcome.FAILED}, rank=1)
    commit = kit.commit()
    assert commit.saved == 3
    assert commit.turn_end is not None
    assert [b.depth for b in commit.turn_end.boundaries] == [3, 2]
    kit.core.poll()
    assert not kit.index.has(PrepareOp)
    assert kit.idle()


def test_after_a_failure_the_rest_is_saved_a_little_later() -> None:
    kit, r = Kit(), request()
    running(kit, r)
    kit.grant()
    _, (save,) = kit.step()
    kit.report(save, dict.fromkeys(range(5), BlockOutcome.FAILED))
    kit.index.take(AbortOp)
    r.num_tokens = 23
    kit.step(r, 22, 1)
    assert not kit.index.has(PrepareOp)
    kit.clock.advance(2.0)
    r.num_tokens = 24
    kit.step(r, 23, 1)
    assert kit.index.take(PrepareOp).start == 0


@pytest.mark.parametrize("reason", list(DeclineReason))
def test_a_declined_save_holds_nothing(reason: DeclineReason) -> None:
    kit, r = Kit(), request()
    running(kit, r)
    kit.grant(grant=0, declined=reason)
    kit.core.poll()
    assert kit.idle()
    assert kit.core.take_stats()[f"saves_declined{{reason={reason.value}}}"] == 1


def test_a_lost_parent_is_looked_for_once() -> None:
    kit, r = Kit(), request(40)
    kit.arrive(r)
    kit.hit(4)
    kit.step(r, 0, 40)
    kit.grant(grant=0, declined=DeclineReason.MISSING_PARENT)
    kit.core.poll()
    kit.hit(2)
    r.num_tokens = 41
    kit.step(r, 40, 1)
    assert kit.index.take(PrepareOp).start == 2


def test_nothing_is_saved_for_a_generation_that_is_over() -> None:
    kit, r = Kit(), request()
    running(kit, r)
    kit.grant()
    _, (save,) = kit.step()
    kit.report(save)
    kit.commit(CommitOutcome.STALE_GENERATION)
    kit.core.poll()
    r.num_tokens = 30
    kit.clock.advance(5.0)
    kit.step(r, 22, 8)
    assert not kit.index.has(PrepareOp)
    assert kit.idle()


def test_a_turn_ends_with_the_boundaries_of_prompt_and_reply() -> None:
    kit, r = Kit(), request(13)
    running(kit, r)
    kit.grant()
    _, (save,) = kit.step()
    kit.report(save)
    kit.commit()
    kit.core.poll()
    r.num_tokens = 26  # 13 generated; the last has no KV
    kit.end_of(r, 25)
    kit.grant()
    _, (tail,) = kit.step()
    assert tail.hashes == tuple(r.block_hashes[3:6])
    kit.report(tail)
    end = kit.commit().turn_end
    assert end is not None
    assert [b.depth for b in end.boundaries] == [6, 5, 3, 2]
    assert all(b.hash == r.block_hashes[b.depth - 1] for b in end.boundaries)
    kit.core.poll()
    assert kit.idle()
    assert not kit.core.has_pending_work()


def test_the_last_sampled_token_has_no_kv() -> None:
    kit, r = Kit(), request(6)
    running(kit, r)
    kit.grant()
    kit.step()
    r.num_tokens = 8
    kit.finish(r, 8)  # an engine that plans ahead says 8; the eighth token was only sampled
    assert not kit.index.has(PrepareOp)


def test_a_turn_without_new_blocks_is_a_touch() -> None:
    kit, r = Kit(), request(22)
    running(kit, r, hit=5)
    kit.finish(r, 22)
    op = kit.index.take(CommitOp)
    assert (op.grant, op.saved, op.start, op.parent) == (0, 0, 5, r.block_hashes[4])
    assert op.turn_end is not None


def test_blocks_of_an_unfinished_load_are_not_saved() -> None:
    kit, r = Kit(), request(22)
    kit.arrive(r)
    kit.hit(3)
    kit.allocate(r, 3, kit.match(r) or 0)
    (load,), _ = kit.step()
    kit.finish(r, 12)
    assert not kit.index.has(PrepareOp)
    kit.report(load)


def test_blocks_that_somebody_else_promised_to_load_are_not_saved() -> None:
    kit, r = Kit(), request(22)
    kit.arrive(r)
    kit.hit(0)
    assert kit.match(r) == 0
    kit.allocate(r, 5, 0)  # another connector loads them
    kit.finish(r, 20)  # and the client gives up meanwhile
    assert not kit.index.has(PrepareOp)


def test_holds_are_bounded() -> None:
    kit, r = Kit(num_blocks=12), request(22)
    running(kit, r)
    # Of 5 blocks as many as may be held: what is larger than the limit is not refused for ever.
    assert len(kit.grant().hashes) == 3 and sum(kit.pool.refs.values()) == 3
    other = request(22, name="other")
    running(kit, other)
    assert kit.core.open_jobs() == 1
    assert kit.core.take_stats()["saves_declined{reason=hold}"] == 1


@pytest.mark.parametrize(("limit", "first"), [(300, 3), (1, 1)])
def test_bytes_in_flight_are_bounded(limit: int, first: int) -> None:
    kit, r = Kit(save_bytes_in_flight_max=limit), request(22)
    running(kit, r)
    assert len(kit.grant().hashes) == first
    running(kit, request(22, name="other"))
    assert kit.core.open_jobs() == 1
    assert kit.core.take_stats()["saves_declined{reason=bytes}"] == 1


def test_preemption_does_not_touch_what_is_being_saved() -> None:
    kit, r = Kit(), request()
    running(kit, r)
    kit.grant()
    kit.core.on_preempted(r.request_id)  # type: ignore[arg-type]
    _, (save,) = kit.step()
    assert save.blocks == (100, 101, 102, 103, 104)
    assert set(kit.pool.refs) == set(save.blocks)
    kit.report(save)
    assert kit.commit().saved == 5


def test_a_late_report_settles_nothing_else() -> None:
    kit, r = Kit(), request()
    running(kit, r)
    kit.grant()
    _, (save,) = kit.step()
    kit.report(save)
    kit.report(save)
    kit.commit()
    kit.core.poll()
    kit.report(save)
    assert kit.idle()


def test_a_reset_of_the_engines_cache_lets_go_of_every_block_at_once() -> None:
    kit, r = Kit(), request()
    running(kit, r)
    kit.grant()
    _, (save,) = kit.step()
    kit.core.drop_holds()
    assert not kit.pool.refs
    kit.report(save)
    assert not kit.index.has(CommitOp)
    assert kit.index.has(AbortOp)
    kit.done()
    kit.core.poll()
    assert kit.idle()


def test_workers_are_told_of_saves_that_have_lost_their_blocks() -> None:
    kit, r = Kit(), request()
    running(kit, r)
    kit.grant()
    _, (save,) = kit.step()
    kit.core.drop_holds()
    assert kit.core.build_step([]).revoked == (save.job,)
    assert kit.core.build_step([]).revoked == ()


def test_without_checksums_blocks_stay_held_until_the_workers_have_reported() -> None:
    kit, r = Kit(checksums=False), request()
    running(kit, r)
    kit.grant()
    _, (save,) = kit.step()
    kit.core.drop_holds()
    assert len(kit.pool.refs) == 5
    kit.report(save)
    assert not kit.pool.refs
    assert not kit.index.has(CommitOp)


def test_reset_moves_only_this_engine_to_another_epoch() -> None:
    kit, r = Kit(), request()
    running(kit, r)
    before = kit.core.namespace
    kit.core.reset_cache("two")
    assert kit.core.namespace != before
    kit.arrive(request(name="new"))
    assert kit.index.take(LookupOp).namespace == kit.core.namespace


def test_closing_a_session_ends_its_running_saves() -> None:
    kit, r = Kit(), request()
    running(kit, r)
    kit.grant()
    _, (save,) = kit.step()
    assert kit.core.close_session("s")
    assert kit.index.take(CloseOp).session_id == "s"
    kit.report(save)
    assert not kit.index.has(CommitOp)
    assert kit.index.has(AbortOp)


def test_another_salt_is_another_session() -> None:
    kit, r = Kit(), request()
    running(kit, r)
    kit.grant()
    _, (save,) = kit.step()
    kit.core.close_session("s", "salt")
    kit.report(save)
    assert kit.index.has(CommitOp)


def test_a_prefill_engine_hands_its_tip_over_and_abandons_what_it_could_not_save() -> None:
    kit, r = Kit(pd_role="prefill"), request()
    running(kit, r)
    assert kit.grant().must
    _, (save,) = kit.step()
    r.num_tokens = 23
    params = kit.finish(r, 22)
    assert params is not None
    hand_off = params["session_kv"]
    assert isinstance(hand_off, dict)
    assert hand_off["tip"] == r.block_hashes[4].hex()
    assert hand_off["num_tokens"] == 5 * B
    kit.report(save, {0: BlockOutcome.FAILED})
    assert kit.index.take(AbandonOp).tip == r.block_hashes[4]


def test_a_decode_engine_waits_for_the_tip_of_its_own_namespace_only() -> None:
    kit = Kit(pd_role="decode")
    namespace = kit.core.namespace.hex()
    good = {"session_kv": {"session": "s", "tip": "ab", "namespace": namespace}}
    kit.arrive(request(name="a"), kv_transfer_params=good)
    op = kit.index.take(LookupOp)
    assert (op.wait_tip, op.deadline_s) == (b"\xab", kit.config.pd_wait_s)
    other = {"session_kv": {"session": "s", "tip": "ab", "namespace": "00"}}
    kit.arrive(request(name="b"), kv_transfer_params=other)
    assert kit.index.take(LookupOp).wait_tip == b""
    assert kit.core.take_stats()["hand_offs_refused"] == 1


def test_any_engine_tells_its_namespace_to_a_proxy_that_asks() -> None:
    kit, r = Kit(pd_role="decode"), request(3)
    kit.arrive(r, kv_transfer_params={"session_kv": {"probe": True}})
    assert kit.index.take(LookupOp).wait_tip == b""
    params = kit.finish(r, 2)
    assert params is not None
    told = params["session_kv"]
    assert isinstance(told, dict)
    assert (told["namespace"], told["num_tokens"]) == (kit.core.namespace.hex(), 0)
    assert "hand_offs_refused" not in kit.core.take_stats()
