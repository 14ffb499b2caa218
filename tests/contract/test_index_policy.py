"""What the index makes of a policy's table, on the reference and on real servers."""

from __future__ import annotations

from connector.ids import Generation
from connector.indexmsg import Boundary, CommitRequest, Declined, DeclineReason, TurnEnd
from store_worker.index import search
from store_worker.policy import LRU_TABLE, NUM_CLASSES, ReturnPolicy, ScoreTable, Turn, class_of
from tests.contract.index_fixtures import Drive, drive, index_servers  # noqa: F401
from tests.index_kit import NS, chain, key

ROOM_TRIES = 4


def flat_table(scores: dict[int, float]) -> ScoreTable:
    """The same score at any idle time; classes that are not named have none."""
    rows = tuple((scores.get(cls, 0.0),) for cls in range(NUM_CLASSES))
    return ScoreTable(LRU_TABLE.times_min, LRU_TABLE.tokens_min, (0,), rows)


def test_a_shared_part_outlives_its_last_conversation(drive: Drive) -> None:  # noqa: F811
    d = drive(blocks=11, high_water=1.0)
    scores = {(1, 0): 1.0, (2, 0): 1.0, (4, 0): 5.0, (1_000_000, 0): 7.0, (1, 100_000): 9.0}
    d.index.set_scores(flat_table({class_of(*of): score for of, score in scores.items()}))
    shared = chain("system prompt", 2)
    children = [chain(f"user {i}", 1, shared) for i in range(8)]
    for child in children:
        d.at(1).save(child)
    for child in children:
        d.at(1).touch(child)  # now that the shared part is known, each is its own conversation
    other = chain("other", 1)
    d.at(1).save(other)
    for _ in range(3):
        d.at(1).touch(other)
    d.at(1).save(chain("newcomer", 8), new_tokens=100_000, must=True)
    assert [d.listed(child) for child in children] == [2] * 8, "the conversations went first"
    d.at(1).save(chain("second newcomer", 1), new_tokens=100_000, must=True)
    assert d.listed(other) == 0, "then what was used four times"
    assert d.listed(shared) == 2, "the shared part is worth more than its last user"
    d.at(1).save(chain("third newcomer", 1), new_tokens=100_000, must=True)
    assert d.listed(shared) == 1, "but not more than what is worth more than any shared part"
    d.at(1).save(chain("fourth newcomer", 1), new_tokens=100_000, must=True)
    assert d.listed(shared) == 0
    d.sound()


def test_what_is_logged_is_what_a_policy_learns_from(drive: Drive) -> None:  # noqa: F811
    d = drive(blocks=100)
    session = key("s")
    first = chain("a", 4)
    d.save(first, session=session, new_tokens=3000)
    at = d.now
    d.at(60).save(chain("b", 2, first), start=4, session=session, new_tokens=500)
    _, events = d.index.turns()
    assert list(events) == [
        Turn(at, class_of(1, 3000)),
        Turn(at + 60_000, class_of(2, 500), class_of(1, 3000), 60_000, 1.0),
    ]


def test_a_learnt_table_declines_what_never_returns(drive: Drive) -> None:  # noqa: F811
    policy = ReturnPolicy()
    for i in range(400):
        at = i * 1_000
        policy.observe(Turn(at, class_of(1, 50_000)))  # large first turns: none comes back
        policy.observe(Turn(at, class_of(1, 100)))  # small ones do, after 30 s
        if i >= 30:
            policy.observe(Turn(at, class_of(2, 100), class_of(1, 100), 30_000))
    d = drive(blocks=4, high_water=1.0)
    d.index.set_scores(policy.fit(400_000))
    small = chain("small", 4)
    d.save(small, new_tokens=100)
    d.at(10)
    answers = [d.ask(chain("large", 2), new_tokens=50_000) for _ in range(ROOM_TRIES)]
    assert all(isinstance(a, Declined) for a in answers)
    assert {a.reason for a in answers if isinstance(a, Declined)} == {DeclineReason.NOT_WORTH}
    assert d.listed(small) == 4
    d.save(chain("large", 2), new_tokens=50_000, must=True)
    assert d.listed(small) == 2, "a hand-off is never declined"
    d.sound()


def test_a_turn_that_was_declined_is_known_for_one(drive: Drive) -> None:  # noqa: F811
    d = drive(blocks=100)
    session, first = key("s"), chain("a", 4)
    longer = chain("b", 2, first)
    told = TurnEnd((Boundary(4, first[3]), Boundary(3, first[2])), 3000)
    touch = CommitRequest(
        namespace=NS, session=session, generation=Generation(0), turn_end=told, beyond=first[0]
    )
    at = d.now
    assert d.index.commit(touch, d.now).outcome == "ok"
    d.at(60).save(longer, session=session, new_tokens=500)
    _, events = d.index.turns()
    assert [(e.cls, e.previous, e.gap_ms) for e in events if isinstance(e, Turn)] == [
        (class_of(1, 3000), -1, 0),
        (class_of(2, 500), class_of(1, 3000), d.now - at),
    ]
    other = key("declined twice")
    again = CommitRequest(namespace=NS, session=other, turn_end=told, beyond=first[0])
    assert d.index.commit(again, d.now).outcome == "ok"
    d.index.forget(NS, longer, d.nodes[0], d.now)
    found = search.find(d.index, NS, other, longer, 0.0)
    assert (found.acquired.depth, found.turn_start) == (0, 4), "what it had, not what is stored"
