"""Pure decisions of the scheduler half: what to promise, what to load, what to save.

Core module. No state, no I/O; everything that is decided here is done elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from connector.ids import NodeId
from connector.indexmsg import Boundary, RunSlice, TurnEnd
from connector.meta import Placed
from connector.tracker import RequestTracker


class Engine(NamedTuple):
    """What the core must know of the engine it is attached to.

    tokens_per_block: tokens of one cache page. ranks: worker ranks that each hold a part of every
    block. object_bytes: bytes of one rank's object (payload and header). num_blocks: cache pages.
    """

    tokens_per_block: int
    ranks: int
    object_bytes: int
    num_blocks: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all ranks."""
        return self.object_bytes * self.ranks


def usable_depth(tracker: RequestTracker, engine: Engine, now: float) -> int:
    """Depth up to which a load could be promised now.

    Whole blocks, at most num_tokens - 1 tokens (one token must be left to compute), nothing at or
    beyond a block that failed before, nothing whose lease has run out.
    """
    if now >= tracker.lease_until:
        return 0
    limit = (tracker.request.num_tokens - 1) // engine.tokens_per_block
    return max(0, min(tracker.known, tracker.usable_max, limit, sliced_depth(tracker.slices)))


def sliced_depth(slices: Sequence[RunSlice]) -> int:
    """Depth that the slices cover."""
    return slices[-1].stop if slices else 0


def place(slices: Sequence[RunSlice], start: int, stop: int) -> tuple[Placed, ...]:
    """Where the blocks (start, stop] lie. The slices must cover them."""
    placed: list[Placed] = []
    for piece in slices:
        count = min(piece.stop, stop) - max(piece.start, start)
        if count > 0:
            placed.append(Placed(node=piece.node, count=count, incarnation=piece.incarnation))
    assert sum(p.count for p in placed) == stop - start, "slices don't cover the load"
    return tuple(placed)


def nodes_of(placed: Sequence[Placed]) -> frozenset[NodeId]:
    """The nodes a job talks to."""
    return frozenset(piece.node for piece in placed)


def complete_depth(tracker: RequestTracker, tokens: int, engine: Engine) -> int:
    """Blocks whose KV exists once `tokens` tokens are computed, and whose hash is known.

    The hash list alone proves nothing: a generated block's hash is there before its last KV.
    """
    return min(
        tokens // engine.tokens_per_block, len(tracker.request.block_hashes), len(tracker.blocks)
    )


def next_save(tracker: RequestTracker, complete: int, blocks_max: int) -> tuple[int, int] | None:
    """The next piece (start, stop] to save, or None."""
    if not tracker.saving or not tracker.identified or complete <= tracker.planned:
        return None
    return tracker.planned, min(complete, tracker.planned + blocks_max)


def new_tokens(tracker: RequestTracker, engine: Engine) -> int:
    """Tokens of the prompt past what the session's turn before had (in a first turn, past what
    others have stored). Whether they had to be computed again does not matter: a policy's class
    says what a conversation is like, not what the store made of it."""
    return max(0, tracker.request.num_prompt_tokens - tracker.turn_start * engine.tokens_per_block)


def turn_end(tracker: RequestTracker, depth: int, engine: Engine) -> TurnEnd:
    """Boundaries to remember: the last whole block of the prompt and of the reply, and the one
    before each, as far as `depth` blocks are in the store; those of the prompt also if the policy
    declined it, so that the next turn is known for one."""
    prompt = tracker.request.num_prompt_tokens // engine.tokens_per_block
    prompt = min(prompt, len(tracker.request.block_hashes))
    reach = max(depth, prompt) if tracker.declined else depth
    marks = {d for end in (prompt, depth) for d in (end, end - 1) if 0 < d <= reach}
    return TurnEnd(
        boundaries=tuple(
            Boundary(depth=d, hash=tracker.hash_at(d)) for d in sorted(marks, reverse=True)
        ),
        new_tokens=new_tokens(tracker, engine),
    )


def worth_loading(
    load_bytes: int, tokens: int, bytes_per_s: float | None, tokens_per_s: float | None
) -> bool:
    """False if the load would clearly take longer than computing the tokens.

    Sketch: load_bytes / bytes_per_s against tokens / tokens_per_s, both measured online (None:
    not yet). "Clearly" = over twice as long and over 20 ms more, so that noise on a loaded machine
    never throws a good hit away.
    """
    if bytes_per_s is None or tokens_per_s is None:
        return True
    load_s = load_bytes / bytes_per_s
    compute_s = tokens / tokens_per_s
    return not (load_s > 2 * compute_s and load_s - compute_s > 0.02)
