"""The index contract: closed sessions, lost data, lost nodes, hints. Over all kinds of index."""

from __future__ import annotations

import pytest

from connector.ids import NO_SESSION
from connector.indexmsg import (
    CommitOutcome,
    Declined,
    DeclineReason,
    Granted,
)
from store_worker.index.limits import HOLDS_MAX
from tests.contract.index_fixtures import Drive, drive, index_servers
from tests.index_kit import BLOCK, NS, A, B, chain, key

__all__ = ["drive", "index_servers"]
S, T = key("s"), key("t")
NEW = b"inc-2   "


def test_close_frees_exactly_its_own_blocks(drive: Drive) -> None:
    d, c = drive(), chain("c", 10)
    d.save(c, session=S)
    other = chain("o", 4, c[:6])
    d.save(other, 6, T)
    closed = d.index.close(S, d.now)
    assert (closed.blocks, closed.more) == (4, False)
    assert [v.hash for v in closed.victims] == [*reversed(c[6:])]
    assert d.listed(c) == 6 and d.listed(other) == 10
    assert d.index.nodes()[0].dying == 4 * BLOCK
    d.index.freed(closed.victims, d.now)
    assert d.index.nodes()[0].stored == 10 * BLOCK
    assert d.index.close(T, d.now).blocks == 10
    d.sound()


def test_blocks_held_below_stay_when_the_chain_above_is_closed(drive: Drive) -> None:
    d, c = drive(), chain("c", 10)
    d.save(c[:6], session=T)
    d.save(c, 6, S)
    assert d.index.close(S, d.now).blocks == 4
    assert d.listed(c) == 6
    d.sound()


def test_a_chain_without_an_id_is_held_too(drive: Drive) -> None:
    d, c = drive(), chain("c", 10)
    d.save(c[:6])
    d.save(c, 6, S)
    assert d.index.close(S, d.now).blocks == 4
    assert d.listed(c) == 6
    d.sound()


def test_a_save_in_flight_for_a_closed_session_never_becomes_visible(drive: Drive) -> None:
    d, c = drive(), chain("c", 6)
    token = d.generation(S)
    granted = d.ask(c, session=S)
    assert isinstance(granted, Granted)
    d.index.close(S, d.now)
    late = d.settle(granted, 6, S, generation=token)
    assert late.outcome is CommitOutcome.STALE_GENERATION
    assert {v.hash for v in late.losers} == set(c), "its objects are to be deleted"
    assert d.listed(c) == 0
    d.index.freed(late.losers, d.now)
    assert d.ask(c, session=S, generation=token) == Declined(DeclineReason.STALE_GENERATION)
    assert d.generation(S) > token
    d.save(c, session=S)
    assert d.listed(c) == 6
    d.sound()


def test_a_session_that_was_never_known_can_be_closed(drive: Drive) -> None:
    d, c = drive(), chain("c", 2)
    token = d.generation(S)
    assert d.index.close(S, d.now).blocks == 0
    assert d.ask(c, session=S, generation=token) == Declined(DeclineReason.STALE_GENERATION)
    assert d.index.recall(NS, S, d.now).boundaries == ()


def test_records_of_closed_sessions_are_forgotten_but_their_late_saves_refused(
    drive: Drive,
) -> None:
    d, c = drive(), chain("c", 2)
    token = d.generation(S)
    d.index.close(S, d.now)
    d.at(2 * 24 * 3600)
    for _ in range(3):
        d.index.dying(A, d.now)
    assert d.index.session(S) is None
    assert d.ask(c, session=S, generation=token) == Declined(DeclineReason.STALE_GENERATION)


def test_close_is_bounded_and_resumes(drive: Drive) -> None:
    d, c = drive(), chain("c", 700)
    for at in range(0, 700, 128):
        d.save(c[: at + 128], at, S)
    first = d.index.close(S, d.now)
    token = d.generation(S)
    assert 0 < first.blocks <= 128 and first.more
    blocks = first.blocks
    while True:
        more = d.index.close(S, d.now, resume=True)
        assert more.blocks <= 128 and more.blocks == len(more.victims)
        blocks += more.blocks
        if not more.more:
            break
    assert blocks == 700 and d.listed(c) == 0
    assert d.generation(S) == token, "resuming ends no generation"
    d.sound()


def test_what_is_leased_at_the_close_is_freed_later(drive: Drive) -> None:
    d, c = drive(), chain("c", 10)
    d.save(c, session=S)
    d.index.acquire(NS, [(c[5], 6)], 10.0, NO_SESSION, d.now)
    assert d.index.close(S, d.now).blocks == 4
    assert d.at(9).index.dying(B, d.now) == ()
    assert d.listed(c) == 6
    victims = d.at(1).index.dying(A, d.now)
    assert {v.hash for v in victims} >= set(c[:6]) and d.listed(c) == 0
    d.sound()


@pytest.mark.parametrize("end", ["commit", "abort", "expiry"])
def test_what_a_save_needs_at_the_close_is_freed_after_it(drive: Drive, end: str) -> None:
    d, c = drive(), chain("c", 10)
    d.save(c[:6], session=S)
    other = chain("o", 2, c[:4])
    d.save(other, 4, S)
    token = d.generation(S)
    granted = d.ask(c, 6, session=S)
    assert isinstance(granted, Granted)
    assert d.index.close(S, d.now).blocks == 2, "the other branch"
    assert d.listed(c) == 6
    if end == "commit":
        assert d.settle(granted, 4, S, generation=token).outcome is CommitOutcome.STALE_GENERATION
    elif end == "abort":
        d.index.abort(granted.grant, d.now)
    else:
        d.at(700)
    freed = [victim.hash for victim in d.index.dying(A, d.now)]
    assert set(freed) >= set(c[:6]) and d.listed(c) == 0
    d.sound()


def test_what_a_save_of_another_needs_at_the_close_stays_with_it(drive: Drive) -> None:
    d, c = drive(), chain("c", 10)
    d.save(c[:6], session=S)
    granted = d.ask(c, 6, session=T)
    assert isinstance(granted, Granted)
    assert d.index.close(S, d.now).blocks == 0
    assert d.settle(granted, 4, T).outcome is CommitOutcome.OK
    d.index.dying(A, d.now)
    assert d.listed(c) == 10
    assert d.index.close(T, d.now).blocks == 10
    d.sound()


def test_leftovers_are_the_first_victims_and_wanted_again_after_a_use(drive: Drive) -> None:
    d = drive(blocks=20, high_water=1.0)
    c = chain("c", 8)
    d.save(chain("old", 8))
    d.at(10).save(c, session=S)
    d.index.acquire(NS, [(c[7], 8)], 10.0, NO_SESSION, d.now)
    d.index.close(S, d.now)
    d.at(11).save(chain("new", 8))
    assert d.listed(chain("old", 8)) == 8 and d.listed(c) == 4
    d.index.acquire(NS, [(c[3], 4)], 0.0, NO_SESSION, d.now)
    d.at(1).save(chain("newer", 4))
    assert d.listed(chain("old", 8)) == 4 and d.listed(c) == 4
    d.sound()


def test_many_sessions_share_a_tip(drive: Drive) -> None:
    d, c = drive(), chain("c", 4)
    for i in range(40):
        d.save(c, session=key(f"s{i}"))
    d.sound()
    for i in range(40):
        d.index.close(key(f"s{i}"), d.now)
        if i % 10 == 0:
            d.sound()
    assert d.listed(c) == 0


def test_a_session_holds_a_bounded_number_of_branches(drive: Drive) -> None:
    d, stem = drive(), chain("stem", 2)
    for i in range(70):
        d.at(1).save(chain(f"b{i}", 1, stem), 2 if i else 0, S)
    d.sound()
    closed = d.index.close(S, d.now)
    blocks = closed.blocks
    while closed.more:
        closed = d.index.close(S, d.now, resume=True)
        blocks += closed.blocks
    assert blocks == HOLDS_MAX
    d.sound()


def test_lost_blocks_are_found_no_more_and_can_be_saved_again(drive: Drive) -> None:
    d, c = drive(), chain("c", 10)
    d.save(c, session=S)
    victims = d.index.forget(NS, c[4:6], A, d.now)
    assert {v.hash for v in victims} == set(c[4:6])
    assert d.depth(c) == 4
    assert d.ask(c, 8) == Declined(DeclineReason.MISSING_PARENT), "the way there is broken"
    assert d.ask(c, 4) == Declined(DeclineReason.DYING)
    d.index.freed(victims, d.now)
    granted = d.ask(c, 4, S)
    assert isinstance(granted, Granted) and granted.first_missing == 0
    assert d.settle(granted, 2, S).outcome == "ok"
    assert d.depth(c) == 10, "what lies behind is of use again"
    d.sound()


def test_a_lost_part_may_be_saved_again_in_parts(drive: Drive) -> None:
    d, c = drive(), chain("c", 10)
    d.save(c, session=S)
    d.index.freed(d.index.forget(NS, c, A, d.now), d.now)
    assert d.depth(c) == 0
    for stop, depth in ((3, 3), (4, 4), (10, 10)):
        granted = d.ask(c[:stop], 0, S)
        assert isinstance(granted, Granted)
        d.settle(granted, stop - granted.first_missing, S)
        assert d.depth(c) == depth
        d.sound()
    assert d.index.nodes()[0].stored == 10 * BLOCK


def test_a_hold_moves_up_when_all_below_it_is_evicted(drive: Drive) -> None:
    d = drive(blocks=16, high_water=1.0)
    c = chain("c", 8)
    d.save(c[:4], session=S)
    d.save(c, 4, S, object_bytes=2 * BLOCK)  # another size: a run of its own
    d.at(1).save(chain("new", 12))
    assert d.listed(c) == 4
    d.sound()
    assert d.index.session(S).blocks == 4  # type: ignore[union-attr]
    assert d.index.close(S, d.now).blocks == 4
    d.sound()


def test_what_lies_behind_lost_blocks_is_swept_after_a_minute(drive: Drive) -> None:
    d, c = drive(), chain("c", 300)
    for at in range(0, 300, 100):
        d.save(c[: at + 100], at, S)
    d.index.freed(d.index.forget(NS, c[50:51], A, d.now), d.now)
    d.at(59)
    assert d.index.dying(A, d.now) == () and d.listed(c) == 300
    d.at(2)
    for _ in range(5):
        d.index.freed(d.index.dying(A, d.now), d.now)
        d.sound()
    assert d.listed(c) == 50
    assert d.index.nodes()[0].stored == 50 * BLOCK


def test_forget_at_another_node_changes_nothing(drive: Drive) -> None:
    d, c = drive(nodes=(A, B)), chain("c", 4)
    d.save(c, nodes=(A,))
    assert d.index.forget(NS, c, B, d.now) == () and d.depth(c) == 4
    assert len(d.index.forget(NS, c, type(A)(""), d.now)) == 4 and d.depth(c) == 0
    d.sound()


def test_a_node_that_comes_back_empty_is_a_miss_and_its_blocks_are_replaced(drive: Drive) -> None:
    d, c = drive(nodes=(A, B)), chain("c", 10)
    d.save(c[:6], session=S, nodes=(A,))
    d.save(c, 6, T, nodes=(B,))
    in_flight = d.ask(chain("x", 3), nodes=(A,))
    assert isinstance(in_flight, Granted)
    d.index.register_node(A, NEW, 1000 * BLOCK, d.now)
    assert d.settle(in_flight, 3).outcome is CommitOutcome.EXPIRED
    state = d.index.nodes()[0]
    assert (state.stored, state.granted, state.blocks) == (0, 0, 0)
    assert d.depth(c) == 0 and d.listed(c) == 10
    granted = d.ask(c[:8], 0, S)
    assert isinstance(granted, Granted) and granted.first_missing == 0
    done = d.settle(granted, 8, S)
    assert (done.outcome, done.already) == ("ok", (6, 7))
    assert d.depth(c) == 10
    d.sound()


def test_a_lost_node_is_swept_with_all_behind_it(drive: Drive) -> None:
    d, c = drive(nodes=(A, B)), chain("c", 10)
    d.save(c[:6], session=S, nodes=(A,))
    d.save(c, 6, T, nodes=(B,))
    d.index.register_node(A, NEW, 1000 * BLOCK, d.now)
    d.at(61)
    victims = d.index.dying(B, d.now)
    assert {(v.node, v.hash) for v in victims} == {(B, h) for h in c[6:]}
    assert d.listed(c) == 0
    d.sound()


def test_a_node_that_is_down_keeps_its_blocks_for_ten_minutes(drive: Drive) -> None:
    d, c = drive(nodes=(A, B)), chain("c", 6)
    d.save(c, session=S, nodes=(A,))
    d.index.node_down(A, d.now)
    assert d.depth(c) == 0
    assert d.save(chain("n", 2), session=S).node == B, "the home moves"
    d.at(300).index.dying(A, d.now)
    d.index.register_node(A, b"inc-1   ", 1000 * BLOCK, d.now)
    assert d.depth(c) == 6
    d.index.node_down(A, d.now)
    d.at(601)
    victims = d.index.dying(A, d.now)
    assert {v.hash for v in victims} == set(c), "named when it comes back, too"
    assert d.listed(c) == 0
    assert {v.hash for v in d.at(6).index.dying(A, d.now)} == set(c)
    d.sound()


def test_a_chain_saved_again_elsewhere_leaves_victims_on_the_node_that_is_down(
    drive: Drive,
) -> None:
    d, c = drive(nodes=(A, B)), chain("c", 6)
    d.save(c, session=S, nodes=(A,))
    d.index.node_down(A, d.now)
    granted = d.ask(c, session=S)
    assert isinstance(granted, Granted) and (granted.node, granted.first_missing) == (B, 0)
    done = d.settle(granted, 6, S)
    assert {(v.node, v.hash) for v in done.losers} == {(A, h) for h in c}
    assert d.depth(c) == 6 and d.index.nodes()[0].dying == 6 * BLOCK
    d.sound()


def test_priorities_bias_and_end(drive: Drive) -> None:
    d = drive(blocks=24, high_water=1.0)
    a, b, c = chain("a", 8), chain("b", 8), chain("c", 8)
    d.save(a, session=S)
    d.at(1).save(b, session=T)
    d.at(1).save(c)
    d.index.retain(S, 2, 60.0, d.now)
    d.index.retain(T, 0, 0.0, d.now)
    d.at(1).save(chain("n1", 8))
    assert [d.listed(x) for x in (a, b, c)] == [8, 0, 8]
    d.index.retain(key("later"), -1, 0.0, d.now)
    d.at(1).save(chain("l", 4), session=key("later"))
    d.at(1).save(chain("n2", 4))
    assert d.listed(chain("l", 4)) == 0, "demoted goes first, however new"
    d.at(60).save(chain("n3", 8))
    assert d.listed(a) == 0, "the retention is over"
    d.sound()


def test_pins_protect_until_their_time_and_within_the_quota(drive: Drive) -> None:
    d = drive(blocks=16, high_water=1.0, pinned_bytes_max=10 * BLOCK)
    a = chain("a", 8)
    d.save(a, session=S)
    assert d.index.pin(S, 60.0, d.now) == 60.0
    d.save(chain("b", 8), session=T)
    assert d.index.pin(T, 60.0, d.now) == 0.0, "over the tenant's quota"
    state = d.index.session(S)
    assert state is not None and state.pinned_until_ms == d.now + 60_000
    for i in range(4):
        d.at(1).save(chain(f"n{i}", 8))
    assert d.listed(a) == 8
    d.at(60).save(chain("last", 8))
    d.at(1).save(chain("very last", 8))
    assert d.listed(a) == 0
    assert d.index.pin(T, 1e9, d.now) == 24 * 3600
    d.sound()


def test_a_pinned_session_goes_when_nothing_else_is_left(drive: Drive) -> None:
    d = drive(blocks=8, high_water=1.0)
    d.save(chain("a", 8), session=S)
    d.index.pin(S, 60.0, d.now)
    d.at(1).save(chain("b", 4))
    assert d.index.stats()["pinned_overruns"] == 4
    assert d.listed(chain("a", 8)) == 4
    d.sound()


def test_a_pin_that_outgrows_its_quota_ends(drive: Drive) -> None:
    d, c = drive(pinned_bytes_max=6 * BLOCK), chain("c", 8)
    d.save(c[:4], session=S)
    assert d.index.pin(S, 60.0, d.now) == 60.0
    d.save(c, 4, S)
    assert d.index.session(S).pinned_until_ms == 0  # type: ignore[union-attr]
    assert d.index.stats()["pins_ended"] == 1
    assert d.index.pin(T, 60.0, d.now) == 60.0
    d.sound()


def test_a_tenant_has_a_bounded_number_of_sessions(drive: Drive) -> None:
    d = drive(tenant="a", sessions_max=2)
    other = drive(tenant="b", sessions_max=2)
    for i in range(2):
        d.save(chain(f"c{i}", 2), session=key(f"s{i}"))
    assert d.ask(chain("c", 2), session=key("third")) == Declined(DeclineReason.QUOTA)
    d.save(chain("c0", 4), 2, key("s0"))
    other.save(chain("c", 2), session=key("other"))
    d.index.close(key("s1"), d.now)
    d.save(chain("c", 2), session=key("third"))
    d.sound()


def test_hints_on_a_session_that_is_not_known_yet_stick(drive: Drive) -> None:
    d = drive(blocks=12, high_water=1.0)
    d.index.retain(S, 3, 0.0, d.now)
    d.index.pin(T, 60.0, d.now)
    d.save(chain("a", 4), session=S)
    d.save(chain("b", 4), session=T)
    for i in range(3):
        d.at(1).save(chain(f"n{i}", 4))
    assert d.listed(chain("a", 4)) == 4 and d.listed(chain("b", 4)) == 4
    d.index.close(S, d.now)
    assert d.index.session(S).priority == 0  # type: ignore[union-attr]
    d.sound()


def test_what_people_see(drive: Drive) -> None:
    d = drive()
    d.index.describe(NS, "model x", 16)
    d.index.describe(NS, "model y", 32)
    for i in range(7):
        d.save(chain(f"c{i}", 3 + i), session=key(f"s{i}"))
    assert d.index.namespaces() == {NS: ("model x", 16, sum(range(3, 10)))}
    cursor, seen = 0, []
    while True:
        cursor, page = d.index.sessions(cursor, 3)
        seen += page
        if not cursor:
            break
    assert [s.session for s in seen] == [key(f"s{i}") for i in range(7)]
    assert [(s.blocks, s.tokens) for s in seen] == [(3 + i, 16 * (3 + i)) for i in range(7)]
    stats = d.index.stats()
    assert (stats["sessions"], stats["open_sessions"], stats["blocks"]) == (7, 7, 42)
    d.index.close(key("s0"), d.now)
    assert d.index.stats()["open_sessions"] == 6
    assert d.index.session(key("nobody")) is None
