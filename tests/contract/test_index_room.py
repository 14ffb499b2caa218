"""The index contract: room, victims, placement, copies. Over all kinds of index."""

from __future__ import annotations

import msgspec

from connector.ids import NO_SESSION, NodeId
from connector.indexmsg import (
    Boundary,
    CommitRequest,
    Declined,
    DeclineReason,
    Granted,
    TurnEnd,
)
from store_worker.policy import NUM_CLASSES, TIMES_MIN, TOKENS_MIN, ScoreTable
from tests.contract.index_fixtures import Drive, drive, index_servers
from tests.index_kit import BLOCK, INC, NS, A, B, Driver, chain, key

__all__ = ["drive", "index_servers"]
S, T = key("s"), key("t")
C = NodeId("c:3")


def table(scores: dict[int, float], other: float = 1.0) -> ScoreTable:
    """A score per class, whatever the idle time."""
    rows = tuple((scores.get(cls, other),) for cls in range(NUM_CLASSES))
    return ScoreTable(TIMES_MIN, TOKENS_MIN, (0,), rows)


def used(d: Driver, node: NodeId = A) -> int:
    state = next(n for n in d.index.nodes() if n.node == node)
    return state.stored + state.copies + state.granted + state.dying


def test_victims_are_named_and_their_bytes_count_until_they_are_freed(drive: Drive) -> None:
    d = drive(blocks=10, high_water=1.0)
    old = chain("old", 8)
    d.save(old)
    new = chain("new", 6)
    refused = d.at(1).ask(new)
    assert isinstance(refused, Declined) and refused.reason is DeclineReason.ROOM
    assert [v.hash for v in refused.victims] == [*reversed(old[4:])], "from the leaf upward"
    assert d.listed(old) == 4, "a victim is found no more"
    assert used(d) == 8 * BLOCK
    assert d.ask(new) == Declined(DeclineReason.ROOM), "all that is needed is dying already"
    d.index.freed(refused.victims, d.now)
    assert isinstance(d.ask(new), Granted)
    assert used(d) == 10 * BLOCK
    d.sound()


def test_victims_are_named_again_after_five_seconds(drive: Drive) -> None:
    d = drive(blocks=10, high_water=1.0)
    d.save(chain("old", 8))
    refused = d.at(1).ask(chain("new", 6))
    assert d.at(4.9).index.dying(A, d.now) == ()
    again = d.at(0.1).index.dying(A, d.now)
    assert set(again) == set(refused.victims)
    assert d.index.dying(A, d.now) == ()
    third = d.at(5).ask(chain("new", 6))
    assert set(third.victims) == set(refused.victims), "to the next caller too"
    d.sound()


def test_room_is_made_ahead(drive: Drive) -> None:
    d = drive(blocks=100, high_water=0.9)
    for i in range(9):
        d.at(1).save(chain(f"c{i}", 10))
    granted = d.at(1).ask(chain("next", 10))
    assert isinstance(granted, Granted)
    assert {v.hash for v in granted.victims} == set(chain("c0", 10))
    d.sound()


def test_eviction_is_by_last_use_from_the_leaves(drive: Drive) -> None:
    d = drive(blocks=12, high_water=1.0)
    c = chain("c", 6)
    d.save(c)
    d.at(10).save(chain("o", 6))
    d.at(10).index.acquire(NS, [(c[2], 3)], 0.0, NO_SESSION, d.now)  # only the first three
    d.at(10).save(chain("p", 2))
    assert (d.listed(c), d.listed(chain("o", 6))) == (4, 6)
    d.at(10).save(chain("q", 4))
    assert (d.listed(c), d.listed(chain("o", 6))) == (3, 3), "its newer part outlives the other"
    d.sound()


def test_a_parent_inherits_the_use_of_an_evicted_child(drive: Drive) -> None:
    d = drive(blocks=9, high_water=1.0)
    stem = chain("stem", 3)
    d.save(stem)
    d.at(10).save(chain("other", 3))
    d.at(10).save(chain("leaf", 3, stem), 3)
    d.at(10).save(chain("new", 3))  # evicts `other`, the least recently used
    assert (d.listed(chain("leaf", 3, stem)), d.listed(chain("other", 3))) == (6, 0)
    d.at(10).save(chain("last", 6))
    assert d.listed(stem) == 0 and d.listed(chain("new", 3)) == 3
    d.sound()


def test_what_is_leased_stays(drive: Drive) -> None:
    d = drive(blocks=10, high_water=1.0)
    c = chain("c", 8)
    d.save(c)
    d.index.acquire(NS, [(c[5], 6)], 30.0, NO_SESSION, d.now)
    refused = d.at(1).ask(chain("n", 6))
    assert len(refused.victims) == 2 and d.listed(c) == 6
    d.index.freed(refused.victims, d.now)
    assert d.ask(chain("n", 6)) == Declined(DeclineReason.FULL)
    assert isinstance(d.ask(chain("n", 4)), Granted)
    d.at(30)
    assert d.ask(chain("m", 3)).victims != (), "the lease is over"
    d.sound()


def test_a_lease_is_never_shortened(drive: Drive) -> None:
    d = drive(blocks=8, high_water=1.0)
    c = chain("c", 8)
    d.save(c)
    d.index.acquire(NS, [(c[7], 8)], 100.0, NO_SESSION, d.now)
    d.index.acquire(NS, [(c[7], 8)], 1.0, NO_SESSION, d.now)
    assert d.at(50).ask(chain("n", 1)) == Declined(DeclineReason.FULL)


def test_a_save_never_evicts_its_own_parent(drive: Drive) -> None:
    d = drive(blocks=10, high_water=1.0)
    c = chain("c", 12)
    d.save(c[:6])
    d.at(5).save(chain("newer", 4))
    d.at(5).save(c[:10], 6)  # the oldest leaf is what it continues
    assert d.listed(c) == 10 and d.listed(chain("newer", 4)) == 0
    d.sound()


def test_a_save_that_can_never_fit_is_declined_and_evicts_nothing(drive: Drive) -> None:
    d = drive(blocks=10, high_water=1.0)
    d.save(chain("c", 8))
    assert d.ask(chain("big", 11)) == Declined(DeclineReason.FULL)
    assert d.listed(chain("c", 8)) == 8


def test_charges_are_what_the_server_really_uses(drive: Drive) -> None:
    d = drive(blocks=10)
    d.index.set_charge(A, BLOCK, 2 * BLOCK)
    d.save(chain("c", 2), ranks=2)
    assert used(d) == 2 * 2 * 2 * BLOCK
    d.sound()


def test_a_node_without_capacity_is_not_accounted_for(drive: Drive) -> None:
    d = drive(blocks=0)
    for i in range(20):
        granted = d.save(chain(f"c{i}", 10))
        assert granted.victims == ()
    assert d.index.nodes()[0].blocks == 200
    d.sound()


def test_a_save_that_is_not_worth_its_place_is_declined_under_pressure_only(drive: Drive) -> None:
    d = drive(blocks=20, high_water=1.0)
    long = table({}).class_of(1, 40_000)
    d.index.set_scores(table({long: 0.5}))
    d.save(chain("a", 8))
    d.at(1).save(chain("b", 8), new_tokens=40_000)  # there is room
    d.at(1).save(chain("c", 8))
    assert (d.listed(chain("a", 8)), d.listed(chain("b", 8))) == (8, 4), "the worst class goes"
    d.at(1).save(chain("d", 8))  # ends the worst class, then takes the oldest
    assert d.listed(chain("b", 8)) == 0
    answer = d.at(1).ask(chain("e", 8), new_tokens=40_000)
    assert answer == Declined(DeclineReason.NOT_WORTH)
    assert isinstance(d.ask(chain("e", 8), new_tokens=40_000, must=True), Declined | Granted)
    assert d.listed(chain("a", 8)) < 8 or d.listed(chain("c", 8)) < 8, "must makes room"
    d.sound()


def test_both_ends_of_a_list_are_looked_at(drive: Drive) -> None:
    d = drive(blocks=16, high_water=1.0)
    rows = tuple((1.0, 5.0) for _ in range(NUM_CLASSES))  # what was just used is worth less
    d.index.set_scores(ScoreTable(TIMES_MIN, TOKENS_MIN, (0, 60_000), rows))
    d.save(chain("a", 8))
    d.at(100).save(chain("b", 8))
    d.at(1).save(chain("c", 4))
    assert (d.listed(chain("a", 8)), d.listed(chain("b", 8))) == (8, 4)
    d.sound()


def test_times_used_outlive_the_blocks(drive: Drive) -> None:
    d = drive(blocks=8, high_water=1.0)
    c = chain("c", 8)
    d.save(c)
    d.at(5).save(chain("x", 8))
    assert d.listed(c) == 0
    d.at(5).save(c)
    turn = d.index.turns()[1][-1]
    assert (turn.previous, turn.gap_ms) == (table({}).class_of(1, 0), 10_000)  # type: ignore[union-attr]
    assert turn.cls == table({}).class_of(2, 0)


def test_a_session_keeps_its_home(drive: Drive) -> None:
    d = drive(nodes=(A, B))
    c = chain("c", 40)
    first = d.save(c[:10], session=S)
    home = d.index.recall(NS, S, d.now).home
    assert home == first.node
    for at in range(10, 40, 10):
        d.nodes = (B, A) if d.nodes == (A, B) else (A, B)
        assert d.at(70).save(c[: at + 10], at, S).node == home
    found = d.index.acquire(NS, [(c[-1], 40)], 0.0, S, d.now)
    assert [(s.node, s.start, s.stop) for s in found.slices] == [(home, 0, 40)]


def test_sessions_spread_by_what_was_promised_lately(drive: Drive) -> None:
    d = drive(nodes=(A, B))
    for i in range(20):
        d.at(1).save(chain(f"c{i}", 10), session=key(f"s{i}"))
    assert [n.blocks for n in d.index.nodes()] == [100, 100]


def test_a_forced_node_is_taken(drive: Drive) -> None:
    d = drive(nodes=(A, B))
    assert d.save(chain("a", 2), session=S, nodes=(A,)).node == A
    assert d.save(chain("b", 2), session=S, nodes=(B,)).node == B
    assert d.index.recall(NS, S, d.now).home == A


def test_a_full_home_is_left(drive: Drive) -> None:
    d = drive(nodes=(A, B), blocks=10, high_water=1.0)
    c = chain("c", 16)
    d.save(c[:8], session=S, nodes=(A,))
    d.index.acquire(NS, [(c[7], 8)], 60.0, S, d.now)  # all of A is leased
    assert d.save(c, 8, S).node == B
    assert d.index.recall(NS, S, d.now).home == B
    found = d.index.acquire(NS, [(c[-1], 16)], 0.0, S, d.now)
    assert [(s.node, s.start, s.stop) for s in found.slices] == [(A, 0, 8), (B, 8, 16)]
    d.sound()


def test_a_draining_node_takes_no_new_blocks(drive: Drive) -> None:
    d = drive(nodes=(A, B))
    c = chain("c", 8)
    d.save(c[:4], session=S, nodes=(A,))
    d.index.drain(A)
    assert d.save(c, 4, S).node == B and d.depth(c) == 8
    assert d.ask(chain("x", 2), nodes=(A,)) == Declined(DeclineReason.NO_NODE)
    d.index.drain(A, False)
    assert d.save(chain("x", 2), nodes=(A,)).node == A


def test_a_draining_node_is_emptied_by_moving_its_runs(drive: Drive) -> None:
    d = drive(nodes=(A, B), blocks=200)
    c, other = chain("c", 40), chain("o", 10)
    d.save(c, session=S, nodes=(A,))
    d.save(chain("b", 6, c[:20]), 20, T, nodes=(B,))
    d.save(other, nodes=(A,))
    d.index.register_node(C, INC, 200 * BLOCK, d.now)
    assert d.index.moves(A, d.now) == ((), ()), "it is not leaving"
    d.index.drain(A)
    for _ in range(20):
        steps, victims = d.at(1).index.moves(A, d.now)
        assert {(s.source, s.node) for s in steps} <= {(A, B), (A, C)}
        d.index.freed([*victims, *d.index.copied(steps, d.now)], d.now)
        d.sound()
        if not steps:
            break
    state = d.index.nodes()
    assert (state[0].blocks, used(d, A)) == (0, 0)
    assert state[1].blocks + state[2].blocks == 56
    assert d.depth(c) == 40 and d.depth(other) == 10 and d.depth(chain("b", 6, c[:20])) == 26
    assert d.index.close(S, d.now).blocks == 20
    d.sound()


def test_a_shared_part_finds_room_on_a_full_node(drive: Drive) -> None:
    d = drive(nodes=(A, B), blocks=120, high_water=1.0)
    d.save(chain("full", 120), nodes=(B,))
    stem = chain("stem", 5)
    assert share(d, stem) == [], "no room yet"
    for i in range(2):
        victims = d.index.dying(B, d.at(6).now)
        d.index.freed(victims, d.now)
        steps = d.touch(chain("1", 3, stem), key("s1")).copy
        d.index.copied(steps, d.now)
        assert i or steps, "now there is"
    assert d.index.nodes()[1].copies == 5 * BLOCK
    d.sound()


def share(d: Driver, stem: tuple, count: int = 8) -> list:
    """Conversations on one stem; the copies asked for by the last commit."""
    copies: list = []
    for i in range(count):
        c = chain(f"{i}", 3, stem)
        at = len(stem) if i else 0
        answer = d.at(1).ask(c, at, key(f"s{i}"), nodes=(A,))
        assert isinstance(answer, Granted)
        turn = TurnEnd((Boundary(len(c), c[-1]),))
        copies = list(d.settle(answer, len(c) - at - answer.first_missing, key(f"s{i}"), turn).copy)
    return copies


def test_the_shared_part_is_copied_to_every_node(drive: Drive) -> None:
    d = drive(nodes=(A, B))
    stem = chain("stem", 5)
    assert share(d, stem, 7) == []
    steps = share(d, stem, 8)
    assert [(s.hash, s.source, s.node) for s in steps] == [(h, A, B) for h in stem]
    assert d.index.nodes()[1].granted == 5 * BLOCK, "room is reserved"
    assert d.index.copied(steps[:2], d.now) == ()
    assert d.index.copied(steps[2:], d.now) == ()
    state = d.index.nodes()[1]
    assert (state.copies, state.granted) == (5 * BLOCK, 0)
    d.sound()
    session = key("s1")
    c = chain("1", 3, stem)
    d.save(chain("more", 2, c), 8, session, nodes=(B,))
    assert d.index.recall(NS, session, d.now).home == A
    d.index.node_down(A, d.now)
    assert d.depth(stem) == 5, "from the copy"
    assert d.depth(c) == 5
    d.sound()


def test_a_load_takes_the_copy_at_the_sessions_home(drive: Drive) -> None:
    d = drive(nodes=(A, B))
    stem = chain("stem", 5)
    d.index.copied(share(d, stem), d.now)
    c = chain("mine", 4, stem)
    d.save(c, 5, T, nodes=(B,))
    found = d.index.acquire(NS, [(c[-1], 9)], 0.0, T, d.now)
    assert [(s.node, s.start, s.stop) for s in found.slices] == [(B, 0, 9)]
    other = d.index.acquire(NS, [(c[-1], 9)], 0.0, NO_SESSION, d.now)
    assert [(s.node, s.start, s.stop) for s in other.slices] == [(A, 0, 5), (B, 5, 9)]


def test_a_copy_that_nobody_finishes_gives_its_room_back(drive: Drive) -> None:
    d = drive(nodes=(A, B))
    steps = share(d, chain("stem", 5))
    d.at(61)
    victims = [v for _ in range(3) for v in d.index.dying(B, d.now)]
    assert {v.hash for v in victims} == {s.hash for s in steps}
    d.index.freed(victims, d.now)
    assert d.index.nodes()[1].granted == 0
    assert d.index.copied(steps, d.now) == ()
    d.sound()


def test_copies_go_with_their_block(drive: Drive) -> None:
    d = drive(nodes=(A, B), blocks=200)
    stem = chain("stem", 5)
    d.index.copied(share(d, stem), d.now)
    victims: set = set()
    for i in range(8):
        closed = d.index.close(key(f"s{i}"), d.now)
        victims |= {(v.node, v.hash) for v in closed.victims}
    assert {(B, h) for h in stem} <= victims and d.listed(stem) == 0
    assert d.index.nodes()[1].copies == 0
    d.sound()


def test_a_table_of_another_shape_is_refused_while_blocks_are_listed(drive: Drive) -> None:
    d = drive()
    small = ScoreTable((1,), (0,), (0,), ((1.0,),))
    d.index.set_scores(small)
    d.save(chain("c", 2), session=S)
    try:
        d.index.set_scores(table({}))
    except ValueError as error:
        assert "classes" in str(error)
    else:
        raise AssertionError("a table of another number of classes was taken")
    d.index.close(S, d.now)
    d.index.set_scores(table({}))
    d.index.set_scores(msgspec.structs.replace(table({}), serial=2))


def test_an_unknown_node_is_no_node(drive: Drive) -> None:
    d = drive()
    assert d.ask(chain("c", 2), nodes=(C,)) == Declined(DeclineReason.NO_NODE)
    assert d.ask(chain("c", 2), nodes=()) == Declined(DeclineReason.NO_NODE)
    d.index.register_node(C, INC, 5 * BLOCK, d.now)
    assert d.save(chain("c", 2), nodes=(C, B)).node == C


def test_a_touch_of_nothing_is_fine(drive: Drive) -> None:
    d = drive()
    assert d.index.commit(CommitRequest(namespace=NS, session=S), d.now).outcome == "ok"
    d.sound()
