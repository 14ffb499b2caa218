"""What a turn tells the policy: how much was new, and that it was there even if declined."""

from __future__ import annotations

import pytest

from connector.ids import NO_HASH
from connector.indexmsg import DeclineReason
from connector.lookup import CommitOp, LookupOutcome, PrepareOp
from tests.unit.core_kit import B, FakeRequest, Kit


def request(prompt_tokens: int) -> FakeRequest:
    return FakeRequest("r", prompt_tokens, prompt_tokens)


def started(kit: Kit, r: FakeRequest, hit: int = 0, turn_start: int = 0) -> None:
    """Looked up, allocated, loaded, and its whole prompt computed in one step."""
    kit.arrive(r)
    kit.hit(hit, turn_start=turn_start)
    matched = kit.match(r) or 0
    kit.allocate(r, -(-r.num_tokens // B), matched)
    if matched:
        (load,), _ = kit.step()
        kit.report(load)
    kit.step(r, matched, r.num_tokens - matched)


def decline(kit: Kit, reason: DeclineReason) -> PrepareOp:
    op: PrepareOp = kit.grant(declined=reason, grant=0)
    kit.core.poll()
    return op


@pytest.mark.parametrize(("hit", "turn_start"), [(0, 0), (0, 4), (4, 4), (2, 4)])
def test_new_tokens_are_of_the_prompt_whatever_was_still_stored(hit: int, turn_start: int) -> None:
    kit, r = Kit(), request(26)
    started(kit, r, hit, turn_start)
    op = kit.index.take(PrepareOp)
    assert op.new_tokens == 26 - turn_start * B


def test_generated_tokens_are_not_new_tokens_of_the_prompt() -> None:
    kit, r = Kit(), request(8)
    started(kit, r)
    r.num_tokens = 17
    kit.step(r, 8, 8)
    kit.finish(r, 16)
    assert {op.new_tokens for op in kit.index.posted if isinstance(op, PrepareOp)} == {8}


@pytest.mark.parametrize("hit", [0, 2])
def test_a_declined_turn_is_told_all_the_same(hit: int) -> None:
    kit, r = Kit(), request(26)
    started(kit, r, hit, turn_start=hit)
    decline(kit, DeclineReason.NOT_WORTH)
    kit.finish(r, 26)
    op = kit.index.take(CommitOp)
    assert (op.grant, op.saved, op.start) == (0, 0, hit)
    assert op.parent == (r.block_hashes[hit - 1] if hit else NO_HASH)
    assert op.beyond == r.block_hashes[hit], "names the conversation when nothing of it is stored"
    assert op.turn_end is not None
    assert op.turn_end.new_tokens == 26 - hit * B
    assert [b.depth for b in op.turn_end.boundaries] == [6, 5, *range(hit, 0, -1)]
    assert all(b.hash == r.block_hashes[b.depth - 1] for b in op.turn_end.boundaries)
    assert kit.idle()


@pytest.mark.parametrize("reason", [DeclineReason.STALE_GENERATION, DeclineReason.QUOTA])
def test_other_declines_tell_nothing_of_what_is_not_stored(reason: DeclineReason) -> None:
    kit, r = Kit(), request(26)
    started(kit, r)
    decline(kit, reason)
    kit.index.full = True
    kit.finish(r, 26)
    kit.index.full = False
    assert not kit.index.has(CommitOp)


def test_a_reply_without_the_field_is_a_first_turn() -> None:
    kit, r = Kit(), request(12)
    kit.arrive(r)
    kit.hit(0, outcome=LookupOutcome.MISS)
    assert kit.match(r) == 0
    kit.allocate(r, 3, 0)
    kit.step(r, 0, 12)
    assert kit.index.take(PrepareOp).new_tokens == 12
