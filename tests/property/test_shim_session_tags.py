"""Random insert, tag, close, reopen and evict on block pool and session cache.

After every rule the books are checked, and no block of a live session's chain or of a running
request was freed: a held chain is intact unless the pool ran out of everything else.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
)

from engine_shim.block_pool import BlockPool
from engine_shim.hashing import ROOT, extend_chain
from engine_shim.session_cache import Session, SessionCache

SIZE = 2
BLOCKS = 24
TOKENS = st.lists(st.integers(0, 1), min_size=SIZE, max_size=16)
NAMES = st.sampled_from(("a", "b", "c"))


@dataclass(eq=False)
class Turn:
    """A request that holds blocks."""

    hashes: list[bytes]
    blocks: list[int]
    session: Session | None


class TagMachine(RuleBasedStateMachine):
    turns = Bundle("turns")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS, SIZE)
        self.cache = SessionCache(self.pool, enabled=True)
        self.running: set[Turn] = set()
        self.touched: list[int] = []

    @rule(target=turns, tokens=TOKENS, name=st.none() | NAMES)
    def begin(self, tokens: list[int], name: str | None):  # type: ignore[no-untyped-def]
        """A turn is admitted: prefix hits, then new blocks, which are computed and cached."""
        hashes: list[bytes] = []
        extend_chain(hashes, tokens, SIZE)
        hits = self.pool.match(hashes)
        self.pool.touch(hits)
        kept = self._live_chains()
        evicted, before = self.pool.num_evicted, len(self._evictable())
        new = self.pool.allocate(len(hashes) - len(hits))
        if new is None:
            self.pool.free(reversed(hits))
            return multiple()
        # Sessions' blocks go only when nothing else is left.
        if len(new) <= before:
            assert self._live_chains() == kept, evicted
        turn = Turn(hashes, hits + new, self.cache.begin(name, None))
        for index, block in enumerate(turn.blocks):
            parent = hashes[index - 1] if index else ROOT
            if not self.pool.register(parent, hashes[index], block):
                break
        self.running.add(turn)
        return turn

    @rule(turn=consumes(turns), tag=st.booleans())
    def end(self, turn: Turn, tag: bool) -> None:
        self.running.discard(turn)
        self.pool.free(reversed(turn.blocks))
        if turn.session is None:
            return
        closed = turn.session.closed
        depth = len(self.pool.match(turn.hashes))
        self.cache.end(turn.session, turn.hashes[depth - 1] if depth else None, tag)
        if closed and not turn.session.running:
            assert not turn.session.leaves

    @rule(name=NAMES)
    def close(self, name: str) -> None:
        session = self.cache.session(name, None)
        others = self._live_chains(but=session)
        cached = self.pool.num_cached
        result = self.cache.close(name, None)
        assert result.existed == (session is not None)
        assert result.freed_tokens == (cached - self.pool.num_cached) * SIZE
        assert self._live_chains() == others
        assert self.cache.session(name, None) is None
        if session is not None and session.running:
            assert result.pending and result.freed_tokens == 0

    @rule(count=st.integers(1, 6))
    def evict(self, count: int) -> None:
        """Someone takes blocks, writes to them and gives them back."""
        taken = self.pool.allocate(count)
        if taken is not None:
            self.pool.free(taken)

    @rule(data=st.data())
    def connector_touches(self, data: st.DataObject) -> None:
        block = data.draw(st.integers(0, BLOCKS - 1))
        self.pool.touch([block])
        self.touched.append(block)

    @rule()
    def connector_frees(self) -> None:
        if self.touched:
            self.pool.free([self.touched.pop()])

    @rule()
    def reset(self) -> None:
        idle = self.pool.num_free == BLOCKS
        assert self.pool.reset_prefix_cache() == idle

    def _live_chains(self, but: Session | None = None) -> dict[bytes, tuple[int, ...]]:
        """Blocks of every node on the chain of an open session's leaf."""
        found = {}
        for name in "abc":
            session = self.cache.session(name, None)
            for leaf in session.leaves if session is not None and session is not but else ():
                node = leaf
                while node is not None:
                    found[node.block_hash] = tuple(node.block_ids)
                    node = node.parent  # type: ignore[assignment]
        return found

    def _evictable(self) -> list[int]:
        """Free blocks that are on no session's chain."""
        held = {block for blocks in self._live_chains().values() for block in blocks}
        held |= {b for t in self._closed_leaves() for b in t}
        return [b for b in range(BLOCKS) if not self.pool.refs(b) and b not in held]

    def _closed_leaves(self) -> list[tuple[int, ...]]:
        """Chains of sessions that were closed while a turn runs: held until it ends."""
        found = []
        for turn in self.running:
            if turn.session is not None:
                for leaf in turn.session.leaves:
                    node = leaf
                    while node is not None:
                        found.append(tuple(node.block_ids))
                        node = node.parent  # type: ignore[assignment]
        return found

    @invariant()
    def books_are_in_order(self) -> None:
        assert self.pool.check_integrity() == []
        assert self.cache.check_integrity() == []

    @invariant()
    def running_turns_keep_their_blocks(self) -> None:
        for turn in self.running:
            for block in turn.blocks:
                assert self.pool.refs(block) > 0
            depth = len(self.pool.match(turn.hashes))
            # What is cached of a running chain is a prefix of it: no hole.
            assert all(self.pool.node(h) is not None for h in turn.hashes[:depth])


TestTags = TagMachine.TestCase
TestTags.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True
)
