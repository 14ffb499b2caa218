"""The index contract: saves, loads, turns. Over the reference, real servers and the fake one."""

from __future__ import annotations

import pytest

from connector.ids import (
    NO_HASH,
    NO_SESSION,
    BlockHash,
    Generation,
    GrantId,
    Namespace,
    SessionKey,
)
from connector.indexmsg import (
    Boundary,
    CommitOutcome,
    CommitRequest,
    Declined,
    DeclineReason,
    Granted,
    PrepareRequest,
    RunSlice,
    TurnEnd,
)
from tests.contract.index_fixtures import Drive, drive, index_servers
from tests.index_kit import BLOCK, INC, NS, OTHER_NS, A, B, chain, key

__all__ = ["drive", "index_servers"]
S, T = key("s"), key("t")


def test_a_saved_chain_is_listed_loaded_and_remembered(drive: Drive) -> None:
    d, c = drive(), chain("c", 300)
    for at in range(0, 300, 128):
        d.save(c[: at + 128], at, S, turn_end=at == 256)
    assert d.listed(c) == 300
    found = d.index.acquire(NS, [(c[-1], 300)], 5.0, S, d.now)
    assert found.depth == 300
    assert found.slices == (RunSlice(A, INC, 0, 300, 1),)
    assert found.lease_until_ms == d.now + 5000
    recalled = d.index.recall(NS, S, d.now)
    assert (recalled.home, recalled.boundaries) == (A, (Boundary(300, c[-1]),))
    d.sound()


def test_nothing_is_visible_before_the_commit(drive: Drive) -> None:
    d, c = drive(), chain("c", 5)
    granted = d.ask(c, session=S)
    assert isinstance(granted, Granted)
    assert (granted.node, granted.incarnation, granted.first_missing) == (A, INC, 0)
    assert d.listed(c) == 0 and d.depth(c) == 0
    assert d.index.nodes()[0].granted == 5 * BLOCK
    assert d.settle(granted, 5, S).outcome is CommitOutcome.OK
    state = d.index.nodes()[0]
    assert (state.granted, state.stored, state.blocks) == (0, 5 * BLOCK, 5)
    d.sound()


def test_recall_creates_nothing(drive: Drive) -> None:
    d = drive()
    assert d.index.recall(NS, S, d.now).home is None
    assert d.index.session(S) is None and d.index.sessions() == (0, ())


def test_acquire_takes_the_first_listed_candidate(drive: Drive) -> None:
    d, c = drive(), chain("c", 10)
    d.save(c[:6])
    candidates = [(c[9], 10), (c[7], 8), (c[4], 5), (c[0], 1)]
    assert d.index.acquire(NS, candidates, 0.0, NO_SESSION, d.now).depth == 5
    assert d.index.acquire(NS, [(c[9], 10)], 0.0, NO_SESSION, d.now).depth == 0


def test_branches_share_their_prefix(drive: Drive) -> None:
    d, c = drive(), chain("c", 10)
    d.save(c, session=S)
    left, right = chain("l", 5, c[:7]), chain("r", 5, c[:7])
    d.save(left, 7, S)
    granted = d.save(right, 4, T)
    assert granted.first_missing == 3  # blocks 5, 6 and 7 are there already
    assert [d.listed(x) for x in (c, left, right)] == [10, 12, 12]
    assert d.index.nodes()[0].blocks == 20
    assert d.depth(right) == 12
    d.sound()


def test_a_save_with_nothing_missing_is_a_touch(drive: Drive) -> None:
    d, c = drive(), chain("c", 6)
    d.save(c, session=S)
    granted = d.ask(c, session=T)
    assert isinstance(granted, Granted) and granted.first_missing == 6
    assert d.settle(granted, 0, T, TurnEnd((Boundary(6, c[-1]),))).outcome == "ok"
    assert d.index.session(T).blocks == 6  # type: ignore[union-attr]
    assert d.index.nodes()[0].granted == 0
    d.sound()


def test_commit_is_idempotent(drive: Drive) -> None:
    d, c = drive(), chain("c", 4)
    granted = d.ask(c, session=S)
    assert isinstance(granted, Granted)
    once = d.settle(granted, 4, S, TurnEnd((Boundary(4, c[-1]),)))
    assert d.settle(granted, 4, S, TurnEnd((Boundary(4, c[-1]),))) == once
    assert d.index.session(S).turns == 1  # type: ignore[union-attr]
    assert d.index.stats()["blocks_committed"] == 4
    d.at(200)
    assert d.index.dying(A, d.now) == ()
    assert d.settle(granted, 4, S).outcome is CommitOutcome.EXPIRED
    d.sound()


def test_a_save_after_a_missing_parent_is_declined(drive: Drive) -> None:
    d, c = drive(), chain("c", 8)
    assert d.ask(c, 4) == Declined(DeclineReason.MISSING_PARENT)
    d.save(c[:3])
    assert d.ask(c, 4) == Declined(DeclineReason.MISSING_PARENT)
    assert isinstance(d.ask(c, 3), Granted)


def test_the_first_of_two_commits_wins(drive: Drive) -> None:
    d, c = drive(nodes=(A, B)), chain("c", 6)
    first = d.ask(c, nodes=(A,))
    second = d.ask(c[:5], nodes=(B,))
    same_node = d.ask(c, nodes=(A,))
    assert isinstance(first, Granted) and isinstance(second, Granted)
    assert isinstance(same_node, Granted)
    assert d.settle(first, 4).losers == ()  # the other two may be same_node's
    late = d.settle(second, 5)
    assert (late.outcome, late.already) == ("ok", (0, 1, 2, 3))
    assert {v.hash for v in late.losers} == set(c[:4]) and {v.node for v in late.losers} == {B}
    last = d.settle(same_node, 5)
    assert (last.already, {v.hash for v in last.losers}) == ((0, 1, 2, 3, 4), {c[5], c[4]})
    d.index.freed([*late.losers, *last.losers], d.now)
    assert d.listed(c) == 5
    d.sound()


def test_a_grant_that_is_not_finished_in_time_expires(drive: Drive) -> None:
    d, c = drive(), chain("c", 4)
    granted = d.ask(c, grant_s=10.0)
    assert isinstance(granted, Granted)
    d.at(11)
    victims = d.index.dying(A, d.now)
    assert {v.hash for v in victims} == set(c), "what it may have written must be deleted"
    assert d.settle(granted, 4).outcome is CommitOutcome.EXPIRED
    assert d.ask(c) == Declined(DeclineReason.DYING)
    d.index.freed(victims, d.now)
    assert isinstance(d.ask(c), Granted)
    d.sound()


def test_what_expires_is_not_granted_again_in_the_same_call(drive: Drive) -> None:
    d, c = drive(), chain("c", 4)
    d.ask(c, grant_s=10.0)
    refused = d.at(11).ask(c)
    assert isinstance(refused, Declined) and refused.reason is DeclineReason.DYING
    assert {v.hash for v in refused.victims} == set(c)
    d.sound()


def test_abort_gives_room_back_once_the_objects_are_gone(drive: Drive) -> None:
    d, c = drive(), chain("c", 4)
    granted = d.ask(c)
    assert isinstance(granted, Granted)
    victims = d.index.abort(granted.grant, d.now)
    assert len(victims) == 4 and d.index.nodes()[0].dying == 4 * BLOCK
    assert d.index.abort(granted.grant, d.now) == ()
    assert d.index.abort(GrantId(99), d.now) == ()
    d.index.freed(victims, d.now)
    assert d.index.nodes()[0].dying == 0
    d.sound()


def test_aborting_one_of_two_grants_for_a_block_deletes_nothing_of_the_other(drive: Drive) -> None:
    d, c = drive(), chain("c", 4)
    first, second = d.ask(c), d.ask(c)
    assert isinstance(first, Granted) and isinstance(second, Granted)
    assert d.index.abort(first.grant, d.now) == ()
    assert d.settle(second, 4).losers == ()
    assert d.listed(c) == 4
    d.sound()


def test_a_committed_block_that_another_still_saves_is_not_evicted_under_it(drive: Drive) -> None:
    """Its objects would be deleted after the other has written them, and before it commits."""
    d, c = drive(blocks=10, high_water=1.0), chain("c", 4)
    first, second = d.ask(c), d.ask(c)
    assert isinstance(first, Granted) and isinstance(second, Granted)
    d.settle(first, 4)
    assert d.at(1).ask(chain("n", 4)) == Declined(DeclineReason.FULL)
    assert d.index.close(S, d.now).victims == () and d.listed(c) == 4
    done = d.settle(second, 4)
    assert (done.outcome, done.already, done.losers) == ("ok", (0, 1, 2, 3), ())
    assert d.at(6).ask(chain("n", 8)).victims != ()
    d.sound()


def test_the_last_of_two_grants_to_end_says_what_must_be_deleted(drive: Drive) -> None:
    d, c = drive(), chain("c", 4)
    first, second = d.ask(c), d.ask(c[:3])
    assert isinstance(first, Granted) and isinstance(second, Granted)
    assert d.settle(first, 1).losers[0].hash == c[3], "only the first had it"
    late = d.settle(second, 2)
    assert (late.already, [v.hash for v in late.losers]) == ((0,), [c[2]])
    assert d.listed(c) == 2
    d.sound()


def test_the_block_that_a_grant_follows_stays(drive: Drive) -> None:
    d = drive(blocks=20, high_water=1.0)
    c = chain("c", 6)
    d.save(c[:3], session=S)
    granted = d.ask(c, 3, S)
    assert isinstance(granted, Granted)
    for i in range(5):
        d.at(1).save(chain(f"x{i}", 8))
    assert d.index.close(S, d.now).blocks == 0, "the grant's parent is needed"
    assert d.listed(c) == 3
    assert d.settle(granted, 3, S, generation=Generation(0)).outcome == "stale_generation"
    d.sound()


def test_namespaces_see_nothing_of_each_other(drive: Drive) -> None:
    d, c = drive(), chain("c", 5)
    d.save(c, session=S)
    d.namespace = OTHER_NS
    assert d.listed(c) == 0 and d.depth(c) == 0
    assert d.index.recall(OTHER_NS, S, d.now).boundaries == ()
    assert d.ask(c, 3) == Declined(DeclineReason.MISSING_PARENT)
    d.save(c[:2], session=S)
    assert d.listed(c) == 2
    d.namespace = NS
    assert d.listed(c) == 5
    assert d.index.close(S, d.now).blocks == 7  # a session is one over its namespaces
    d.sound()


def test_boundaries_are_the_newest_and_few_bytes(drive: Drive) -> None:
    d, c = drive(), chain("c", 100)
    d.save(c, session=S, turn_end=False)
    for depth in range(1, 101):
        touch = CommitRequest(
            namespace=NS, session=S, generation=d.generation(S), parent=c[-1], start=100,
            turn_end=TurnEnd((Boundary(depth, c[depth - 1]), Boundary(depth, c[depth - 1]))),
        )  # fmt: skip
        d.index.commit(touch, d.now)
    found = d.index.recall(NS, S, d.now).boundaries
    assert [b.depth for b in found] == list(range(100, 36, -1))
    assert all(c[b.depth - 1] == b.hash for b in found)
    d.sound()


def test_the_turn_log_tells_returns_and_ends(drive: Drive) -> None:
    d, c = drive(), chain("c", 12)
    d.save(c[:4], session=S)
    d.at(30).save(c[:8], 4, S)
    d.at(60).save(chain("b", 3, c[:6]), 6, S)
    d.at(5).index.close(S, d.now)
    last, events = d.index.turns()
    assert last == 4
    first, second, third, ended = events
    assert (first.previous, second.previous, second.gap_ms) == (-1, first.cls, 30_000)  # type: ignore[union-attr]
    assert (second.kept, third.kept) == (1.0, 0.75)  # type: ignore[union-attr]
    assert ended.last_use_ms == third.at_ms  # type: ignore[union-attr]
    assert d.index.turns(2, 1) == (3, (third,))
    assert d.index.turns(4) == (4, ())


def test_a_declined_conversation_is_counted_by_its_first_block(drive: Drive) -> None:
    d, c = drive(), chain("c", 9)
    for _ in range(2):
        request = CommitRequest(namespace=NS, turn_end=TurnEnd((Boundary(9, c[-1]),)), beyond=c[0])
        assert d.at(10).index.commit(request, d.now).outcome == "ok"
    events = d.index.turns()[1]
    assert [e.previous >= 0 for e in events] == [False, True]  # type: ignore[union-attr]


def test_awaited_until_committed_or_abandoned(drive: Drive) -> None:
    d, c, other = drive(), chain("c", 3), chain("o", 3)
    assert d.index.awaited(NS, c[-1], d.now) and d.index.awaited(NS, other[-1], d.now)
    d.save(c)
    d.index.abandon(NS, other[-1], d.now)
    assert not d.index.awaited(NS, c[-1], d.now) and not d.index.awaited(NS, other[-1], d.now)
    d.at(120)
    assert d.index.awaited(NS, other[-1], d.now)


def test_one_engine_leads(drive: Drive) -> None:
    d = drive()
    assert d.index.lead("x", 10.0, d.now) and not d.index.lead("y", 10.0, d.now)
    assert d.index.lead("x", 10.0, d.now)
    d.at(11)
    assert d.index.lead("y", 10.0, d.now) and not d.index.lead("x", 10.0, d.now)


def test_time_never_goes_back(drive: Drive) -> None:
    d, c = drive(), chain("c", 3)
    d.save(c, session=S)
    late = d.index.acquire(NS, [(c[-1], 3)], 1.0, S, d.now)
    assert d.index.acquire(NS, [(c[-1], 3)], 1.0, S, d.now - 500_000) == late


def test_breaches_of_our_own_callers_are_value_errors(drive: Drive) -> None:
    d, c = drive(), chain("c", 200)
    with pytest.raises(ValueError, match="at most 128"):
        d.index.probe(NS, c)
    with pytest.raises(ValueError, match="at most 16"):
        d.index.acquire(NS, [(h, i) for i, h in enumerate(c[:17])], 0.0, S)
    good = PrepareRequest(namespace=NS, hashes=c[:2], nodes=(A,), object_bytes=1)
    for bad in (
        PrepareRequest(namespace=NS, hashes=(), nodes=(A,), object_bytes=1),
        PrepareRequest(namespace=NS, hashes=c[:2], nodes=(A,), object_bytes=0),
        PrepareRequest(namespace=NS, hashes=c[:2], nodes=(A,), object_bytes=1, start=3),
        PrepareRequest(namespace=NS, hashes=c[:2], nodes=(A,), object_bytes=1, parent=c[5]),
        PrepareRequest(namespace=NS, hashes=(c[0], NO_HASH), nodes=(A,), object_bytes=1),
    ):
        with pytest.raises(ValueError):
            d.index.prepare(bad, d.now)
    assert isinstance(d.index.prepare(good, d.now), Granted)


def test_two_engines_see_one_index(drive: Drive) -> None:
    one, two = drive(engine="one"), drive(engine="two")
    c = chain("c", 8)
    assert one.index.identity() == two.index.identity()
    one.save(c[:4], session=S)
    two.save(c, 4, S)
    state = one.index.session(S)
    assert state is not None and (state.blocks, state.turns) == (8, 2)
    assert state.engines == ("two", "one")
    one.sound()


def test_hashes_may_hold_any_byte(drive: Drive) -> None:
    """Zero bytes, separators and digits of our own records among them."""
    d = drive()
    odd = [b"\0" * 8, b"|" * 8, b";" * 8, b"12 34;|\0", b"\xff" * 8, b"\n" * 8, b"0:1 2,3|"]
    d.namespace = Namespace((b"|;\0 12,:" * 2)[:16])
    for i, block in enumerate(odd):
        session = SessionKey(b"\0|;" + bytes([i]) * 13)
        c = tuple(BlockHash(h[:8]) for h in (block, *chain(str(i), 3)))
        d.at(1).save(c, session=session)
        assert d.listed(c) == 4 and d.depth(c) == 4
        assert d.index.recall(d.namespace, session, d.now).boundaries[0].hash == c[-1]
        d.sound()
        closed = d.index.close(session, d.now)
        assert closed.blocks == 4 and {v.hash for v in closed.victims} == set(c)
        d.index.freed(closed.victims, d.now)
    d.sound()
