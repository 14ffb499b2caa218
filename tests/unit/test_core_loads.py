"""Lookups, promises and loads of the scheduler half."""

from __future__ import annotations

import pytest

from connector.ids import NodeId
from connector.indexmsg import RunSlice
from connector.lookup import ForgetOp, LookupOp, LookupOutcome
from connector.meta import BlockOutcome
from connector.planner import worth_loading
from tests.unit.core_kit import INCARNATION, NODE, B, FakeRequest, Kit


def request(tokens: int = 22, name: str = "r") -> FakeRequest:
    return FakeRequest(name, num_prompt_tokens=tokens, num_tokens=tokens)


def test_a_lookup_is_posted_on_arrival_and_asked_again_until_it_is_answered() -> None:
    kit, r = Kit(), request()
    kit.arrive(r)
    assert kit.match(r) is None
    assert kit.match(r) is None
    op = kit.hit(3)
    assert op.session_id == "s"
    assert kit.match(r) == 3 * B
    assert not kit.index.has(LookupOp)


def test_after_the_deadline_the_answer_is_a_miss_and_never_none_again() -> None:
    kit, r = Kit(), request()
    kit.arrive(r)
    kit.clock.advance(kit.config.lookup_deadline_s)
    assert kit.match(r) == 0
    assert kit.match(r) == 0
    assert kit.core.take_stats()["lookups_late"] == 1


@pytest.mark.parametrize(
    ("tokens", "depth", "computed", "expected"),
    [
        (22, 5, 0, 20),
        (20, 5, 0, 16),  # one token must be left
        (21, 5, 0, 20),
        (22, 5, 8, 12),
        (22, 5, 20, 0),
        (22, 2, 8, 0),
        (3, 0, 0, 0),
        (22, 5, 6, 0),  # not at a block boundary: nothing may touch a block in use
    ],
)
def test_a_promise_is_whole_blocks_and_leaves_a_token(
    tokens: int, depth: int, computed: int, expected: int
) -> None:
    kit, r = Kit(), request(tokens)
    kit.arrive(r)
    kit.hit(depth)
    assert kit.match(r, computed) == expected


def test_scheduler_and_workers_use_one_number() -> None:
    kit, r = Kit(), request(20)
    kit.arrive(r)
    kit.hit(5)
    tokens = kit.match(r)
    assert tokens == 16
    kit.allocate(r, 4, tokens)
    (load,), _ = kit.step()
    assert len(load.blocks) * B == tokens
    assert load.blocks == (100, 101, 102, 103)
    assert load.hashes == tuple(r.block_hashes[:4])
    assert [(p.node, p.count, p.incarnation) for p in load.placed] == [(NODE, 4, INCARNATION)]
    assert (load.session, load.generation) == (b"session-key", 7)


def test_a_load_begins_behind_what_the_engine_has() -> None:
    kit, r = Kit(), request()
    kit.arrive(r)
    kit.hit(5)
    tokens = kit.match(r, 8)
    assert tokens == 12
    kit.allocate(r, 5, tokens)
    (load,), _ = kit.step()
    assert load.blocks == (102, 103, 104)
    assert load.hashes == tuple(r.block_hashes[2:5])


def test_the_second_allocation_call_loads_nothing() -> None:
    kit, r = Kit(), request()
    kit.arrive(r)
    kit.hit(5)
    kit.allocate(r, 5, kit.match(r) or 0)
    (load,), _ = kit.step()
    kit.report(load)
    kit.allocate(r, 6, 0)
    assert kit.step() == ([], [])
    assert kit.idle()


def test_a_match_that_was_not_chosen_loads_nothing() -> None:
    kit, r = Kit(), request()
    kit.arrive(r)
    kit.hit(5)
    assert kit.match(r) == 20
    kit.allocate(r, 6, 0)
    assert kit.step() == ([], [])
    assert kit.core.open_jobs() == 0


def test_a_failed_load_is_never_promised_again_beyond_the_first_bad_block() -> None:
    kit, r = Kit(), request()
    kit.arrive(r)
    kit.hit(5)
    kit.allocate(r, 5, kit.match(r) or 0)
    (load,), _ = kit.step()
    kit.report(load, {2: BlockOutcome.MISSING, 4: BlockOutcome.CORRUPT})
    assert kit.match(r) == 8
    op = kit.index.take(ForgetOp)
    assert op.hashes == (load.hashes[2], load.hashes[4])
    assert op.node == NODE


def test_blocks_that_failed_for_the_nodes_sake_are_not_forgotten() -> None:
    kit, r = Kit(), request()
    kit.arrive(r)
    kit.hit(5)
    kit.allocate(r, 5, kit.match(r) or 0)
    (load,), _ = kit.step()
    kit.report(load, dict.fromkeys(range(5), BlockOutcome.TIMED_OUT))
    assert kit.match(r) == 0
    assert not kit.index.has(ForgetOp)


def test_lost_blocks_are_forgotten_on_the_node_they_were_on() -> None:
    kit, r = Kit(), request()
    kit.arrive(r)
    two = (
        RunSlice(node=NodeId("a"), incarnation=b"", start=0, stop=2),
        RunSlice(node=NodeId("b"), incarnation=b"", start=2, stop=5),
    )
    kit.hit(5, slices=two)
    kit.allocate(r, 5, kit.match(r) or 0)
    (load,), _ = kit.step()
    assert [(p.node, p.count) for p in load.placed] == [("a", 2), ("b", 3)]
    kit.report(load, {1: BlockOutcome.MISSING, 2: BlockOutcome.MISSING})
    first, second = kit.index.take(ForgetOp), kit.index.take(ForgetOp)
    assert (first.node, first.hashes) == ("a", (load.hashes[1],))
    assert (second.node, second.hashes) == ("b", (load.hashes[2],))


def test_a_load_ends_when_the_last_rank_has_reported_and_the_worst_counts() -> None:
    kit, r = Kit(ranks=2), request()
    kit.arrive(r)
    kit.hit(5)
    kit.allocate(r, 5, kit.match(r) or 0)
    (load,), _ = kit.step()
    kit.report(load, rank=0)
    assert kit.core.open_jobs() == 1
    kit.report(load, {3: BlockOutcome.FAILED}, rank=1)
    assert kit.core.open_jobs() == 0
    assert kit.match(r) == 12


def test_a_request_that_ends_during_its_load_is_settled_by_the_workers() -> None:
    kit, r = Kit(), request()
    kit.arrive(r)
    kit.hit(5)
    kit.allocate(r, 5, kit.match(r) or 0)
    (load,), _ = kit.step()
    kit.finish(r, 20)
    assert kit.core.has_pending_work()
    kit.report(load)
    kit.done()
    kit.core.poll()
    assert kit.idle()
    assert not kit.core.has_pending_work()


def test_an_answer_for_a_request_that_is_gone_is_ignored() -> None:
    kit, r = Kit(), request()
    kit.arrive(r)
    kit.finish(r, 0)
    kit.hit(5)
    assert kit.match(r) == 0
    assert kit.idle()


def test_an_answer_to_an_older_request_of_the_same_id_is_ignored() -> None:
    kit, old = Kit(), request()
    kit.arrive(old)
    new = FakeRequest("r", 22, 22, salt="other")
    kit.arrive(new)
    kit.hit(5)  # the old one's
    assert kit.match(new) is None
    kit.hit(1)
    assert kit.match(new) == B


def test_an_expired_lease_is_not_relied_on() -> None:
    kit, r = Kit(), request()
    kit.arrive(r)
    kit.hit(5)
    assert kit.match(r) == 20
    kit.clock.advance(kit.config.load_deadline_s)
    assert kit.match(r) == 0


def test_a_waiting_request_renews_its_lease() -> None:
    kit, r = Kit(), request()
    kit.arrive(r)
    kit.hit(5)
    assert kit.match(r) == 20
    kit.clock.advance(kit.config.load_deadline_s - 0.5)
    kit.step()
    kit.hit(5)
    kit.clock.advance(1.0)
    assert kit.match(r) == 20


def test_a_preempted_request_is_looked_up_again() -> None:
    kit, r = Kit(), request()
    kit.arrive(r)
    kit.hit(2)
    kit.allocate(r, 2, kit.match(r) or 0)
    (load,), _ = kit.step()
    kit.report(load)
    kit.core.on_preempted(r.request_id)  # type: ignore[arg-type]
    assert kit.match(r) == 8  # never None after a first answer
    kit.hit(5)
    assert kit.match(r) == 20


def test_an_unreachable_index_is_a_miss() -> None:
    kit, r = Kit(), request()
    kit.arrive(r)
    kit.hit(0, outcome=LookupOutcome.UNAVAILABLE, store=b"")
    assert kit.match(r) == 0
    kit.step(r, 0, 22)
    assert kit.core.open_jobs() == 0


def test_a_full_queue_is_a_miss_and_is_counted() -> None:
    kit, r = Kit(), request()
    kit.index.full = True
    kit.arrive(r)
    assert kit.match(r) == 0
    assert kit.core.take_stats()["index_queue_full"] == 1


def test_more_bytes_than_may_be_in_flight_are_a_miss_before_blocks_are_promised() -> None:
    kit = Kit(load_bytes_in_flight_max=700)
    a, b = request(name="a"), request(name="b")
    kit.arrive(a)
    kit.hit(5)
    kit.allocate(a, 5, kit.match(a) or 0)
    kit.arrive(b)
    kit.hit(5)
    assert kit.match(b) == 0
    assert kit.core.take_stats()["loads_declined{reason=bytes}"] == 1


def test_a_load_larger_than_the_limit_runs_alone() -> None:
    kit, r = Kit(load_bytes_in_flight_max=1), request()
    kit.arrive(r)
    kit.hit(5)
    assert kit.match(r) == 20


def test_short_hits_may_be_left_by_config() -> None:
    kit, r = Kit(min_load_tokens=12), request()
    kit.arrive(r)
    kit.hit(2)
    assert kit.match(r) == 0
    assert kit.core.take_stats()["loads_declined{reason=short}"] == 1


def test_an_unacceptable_session_id_counts_as_none() -> None:
    kit, r = Kit(), request()
    kit.arrive(r, session_id="x" * 257)
    assert kit.hit(0).session_id is None
    assert kit.core.take_stats()["sessions_invalid"] == 1


def test_the_session_may_come_from_the_extra_arguments_or_a_hand_off() -> None:
    kit = Kit()
    kit.arrive(request(name="a"), session_id=None, extra_args={"session_id": "x"})
    assert kit.hit(0).session_id == "x"
    hand_off = {"session_kv": {"session": "h", "tip": "00", "namespace": ""}}
    kit.arrive(request(name="b"), session_id=None, kv_transfer_params=hand_off)
    assert kit.hit(0).session_id == "h"


def test_a_load_that_would_clearly_take_longer_than_computing_is_left() -> None:
    assert worth_loading(1 << 20, 64, None, 1.0)
    assert worth_loading(1 << 20, 64, 1.0, None)
    assert worth_loading(100_000_000, 1000, 1e9, 5000.0)  # 0.1 s against 0.2 s
    assert worth_loading(150_000_000, 500, 1e9, 5000.0)  # 0.15 s against 0.1 s: not clearly
    assert not worth_loading(1_000_000_000, 500, 1e9, 5000.0)  # 1 s against 0.1 s
    assert worth_loading(10_000_000, 5, 1e9, 5000.0)  # 10 ms against 1 ms: noise


def test_small_loads_say_nothing_of_the_bandwidth() -> None:
    kit, r = Kit(), request()
    kit.arrive(r)
    kit.hit(5)
    kit.allocate(r, 5, kit.match(r) or 0)
    (load,), _ = kit.step()
    kit.report(load)  # 100 bytes in 10 ms
    slow = request(name="next")
    kit.arrive(slow)
    kit.hit(5)
    assert kit.match(slow) == 20
