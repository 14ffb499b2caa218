"""Saves give way when the engine is short of blocks, and only then."""

from __future__ import annotations

import pytest

from connector.ids import RequestId
from connector.lookup import AbortOp, CommitOp
from connector.meta import SaveMeta
from tests.unit.core_kit import FakeRequest, Kit


def request(name: str, tokens: int = 22) -> FakeRequest:
    return FakeRequest(name, num_prompt_tokens=tokens, num_tokens=tokens, salt=name)


def saving(kit: Kit, name: str = "a") -> SaveMeta:
    """A request has ended, and its save is with the workers."""
    r = request(name)
    kit.arrive(r)
    kit.hit(0)
    kit.match(r)
    kit.allocate(r, 6, 0)
    kit.step(r, 0, r.num_tokens)
    kit.finish(r, 20)
    kit.grant()
    _, (save,) = kit.step()
    return save


def waiting(kit: Kit, name: str = "b") -> FakeRequest:
    """A request has its answer, and the engine has no blocks for it."""
    r = request(name)
    kit.arrive(r)
    kit.hit(0)
    kit.match(r)
    return r


def test_a_request_that_finds_no_room_is_not_kept_waiting_by_a_save() -> None:
    kit = Kit()
    save = saving(kit)
    waiting(kit)
    assert kit.pool.refs
    kit.step()
    assert not kit.pool.refs, "the blocks are still held"
    assert kit.core.take_stats()["saves_gave_way"] == 1
    # What the workers read meanwhile is not committed, whatever they say.
    kit.report(save)
    kit.core.poll()
    assert kit.index.take(AbortOp).job == save.job
    assert not kit.index.has(CommitOp)


def test_a_save_that_was_only_prepared_ends_at_once() -> None:
    kit = Kit()
    r = request("a")
    kit.arrive(r)
    kit.hit(0)
    kit.match(r)
    kit.step(r, 0, r.num_tokens)
    kit.finish(r, 20)
    waiting(kit)
    kit.step()
    assert not kit.pool.refs and kit.core.open_jobs() == 1
    op = kit.grant()
    kit.core.poll()
    assert kit.index.take(AbortOp).job == op.job and kit.idle()


def test_the_newest_save_goes_first() -> None:
    kit = Kit()
    first = saving(kit, "a")
    saving(kit, "c")
    waiting(kit)
    kit.step()
    assert set(kit.pool.refs) == set(first.blocks) and sum(kit.pool.refs.values()) == 5
    kit.report(first)
    assert kit.commit().saved == 5


@pytest.mark.parametrize("what", ["answered", "running", "loading", "placed", "gone"])
def test_otherwise_saves_stay(what: str) -> None:
    kit = Kit()
    saving(kit)
    if what == "answered":
        r = request("b")
        kit.arrive(r)
        assert kit.match(r) is None
        kit.step()
    else:
        b = waiting(kit)
        if what == "running":
            other = request("c")
            kit.arrive(other)
            kit.hit(0)
            kit.step(other, 0, 3)
        elif what == "loading":
            other = request("c")
            kit.arrive(other)
            kit.hit(3)
            kit.allocate(other, 3, kit.match(other) or 0)
            kit.step()
        elif what == "placed":
            kit.allocate(b, 6, 0)
            kit.step()
        else:
            kit.finish(b, 0)
            kit.step()
    assert sum(kit.pool.refs.values()) == 5
    assert "saves_gave_way" not in kit.core.take_stats()


def test_a_running_request_that_needs_the_last_block() -> None:
    kit = Kit()
    saving(kit)
    b = waiting(kit)
    kit.allocate(b, 6, 0)
    kit.pool.share = 0.0
    kit.step()
    assert not kit.pool.refs


@pytest.mark.parametrize("ended", [True, False])
def test_a_preemption_takes_saves_of_ended_requests_only(ended: bool) -> None:
    kit = Kit()
    r = request("a")
    kit.arrive(r)
    kit.hit(0)
    kit.match(r)
    kit.step(r, 0, r.num_tokens)
    if ended:
        kit.finish(r, 20)
    kit.core.on_preempted(RequestId("a" if not ended else "other"))
    kit.step()
    assert sum(kit.pool.refs.values()) == (0 if ended else 5)


def test_when_stuck_a_preempted_requests_save_goes_too_and_is_planned_again() -> None:
    kit = Kit()
    r = request("a")
    kit.arrive(r)
    kit.hit(0)
    kit.match(r)
    kit.step(r, 0, r.num_tokens)
    kit.grant()
    _, (save,) = kit.step()
    kit.core.on_preempted(RequestId("a"))
    kit.step()
    assert kit.pool.refs
    kit.hit(0)
    kit.match(r)
    kit.step()
    assert not kit.pool.refs
    kit.report(save)
    kit.clock.advance(2.0)
    kit.allocate(r, 6, 0)
    kit.step(r, 0, r.num_tokens)
    assert len(kit.grant().hashes) == 5
