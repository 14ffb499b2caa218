"""The block pool: references, the prefix tree, the order of reuse."""

from __future__ import annotations

from engine_shim.block_pool import BlockPool
from engine_shim.hashing import ROOT, extend_chain


def hashes_of(tokens: list[int], size: int = 4) -> list[bytes]:
    chain: list[bytes] = []
    extend_chain(chain, tokens, size)
    return chain


class Chain:
    """One request's blocks, registered in the pool."""

    def __init__(self, pool: BlockPool, tokens: list[int]) -> None:
        self.hashes = hashes_of(tokens)
        hits = pool.match(self.hashes)
        pool.touch(hits)
        new = pool.allocate(len(self.hashes) - len(hits))
        assert new is not None
        self.blocks = hits + new
        for index, block in enumerate(self.blocks):
            parent = self.hashes[index - 1] if index else ROOT
            assert pool.register(parent, self.hashes[index], block)


def clean(pool: BlockPool) -> bool:
    return pool.check_integrity() == []


def test_allocate_until_empty() -> None:
    pool = BlockPool(4, 4)
    taken = pool.allocate(3)
    assert taken is not None and len(set(taken)) == 3
    assert pool.allocate(2) is None
    assert pool.num_free == 1
    pool.free(taken)
    assert pool.num_free == 4 and clean(pool)


def test_references_add_up() -> None:
    pool = BlockPool(4, 4)
    (block,) = pool.allocate(1) or []
    pool.touch([block, block])
    for left in (2, 1, 0):
        assert pool.refs(block) == left + 1
        pool.free([block])
    assert pool.num_free == 4


def test_touched_free_block_leaves_the_queue() -> None:
    pool = BlockPool(2, 4)
    chain = Chain(pool, list(range(8)))
    pool.free(reversed(chain.blocks))
    pool.touch(chain.blocks[:1])
    taken = pool.allocate(1)
    assert taken == chain.blocks[1:] and pool.allocate(1) is None
    assert pool.match(chain.hashes) == chain.blocks[:1] and clean(pool)


def test_match_is_the_longest_cached_prefix() -> None:
    pool = BlockPool(8, 4)
    chain = Chain(pool, list(range(12)))
    other = hashes_of([*range(8), 99, 99, 99, 99])
    assert pool.match(other) == chain.blocks[:2]
    assert pool.match(hashes_of([5] * 8)) == []


def test_equal_blocks_share_a_node() -> None:
    pool = BlockPool(8, 4)
    tokens = list(range(8))
    first, second = pool.allocate(2) or [], pool.allocate(2) or []
    chain = hashes_of(tokens)
    for blocks in (first, second):
        assert pool.register(ROOT, chain[0], blocks[0])
        assert pool.register(chain[0], chain[1], blocks[1])
    assert pool.num_cached == 2
    pool.free(reversed(first))
    # The copies of the second request go on when those of the first are reused.
    assert pool.allocate(6) is not None
    assert pool.match(chain) == second and clean(pool)


def test_orphan_is_not_registered() -> None:
    pool = BlockPool(4, 4)
    blocks = pool.allocate(2) or []
    chain = hashes_of(list(range(8)))
    assert not pool.register(chain[0], chain[1], blocks[1])
    assert pool.num_cached == 0 and clean(pool)


def test_leaf_is_reused_before_its_parent() -> None:
    pool = BlockPool(3, 4)
    chain = Chain(pool, list(range(12)))
    pool.free(reversed(chain.blocks))
    assert pool.allocate(1) == [chain.blocks[2]]
    assert pool.match(chain.hashes) == chain.blocks[:2]
    assert pool.allocate(1) == [chain.blocks[1]] and clean(pool)


def test_parent_that_goes_takes_its_children_along() -> None:
    pool = BlockPool(3, 4)
    chain = Chain(pool, list(range(12)))
    pool.free(reversed(chain.blocks))
    # As a connector does for a save: the child becomes younger than its parent.
    pool.touch(chain.blocks[2:])
    assert pool.allocate(2) is not None
    assert pool.num_cached == 0
    pool.free(chain.blocks[2:])
    assert pool.num_free == 1 and clean(pool)


def test_held_blocks_go_last() -> None:
    pool = BlockPool(8, 4)
    old = Chain(pool, [1] * 16)
    pool.free(reversed(old.blocks))
    young = Chain(pool, [2] * 16)
    pool.free(reversed(young.blocks))
    leaf = pool.node(old.hashes[-1])
    assert leaf is not None
    pool.tag(leaf)
    assert pool.allocate(4) == list(reversed(young.blocks))
    assert pool.match(old.hashes) == old.blocks and clean(pool)
    pool.untag(leaf)
    assert pool.num_held == 0 and clean(pool)


def test_release_upward_stops_where_someone_needs_it() -> None:
    pool = BlockPool(16, 4)
    trunk = Chain(pool, [1] * 8)
    left, right = Chain(pool, [1] * 8 + [2] * 8), Chain(pool, [1] * 8 + [3] * 4)
    for chain in (trunk, left, right):
        pool.free(reversed(chain.blocks))
    leaf = pool.node(left.hashes[-1])
    assert leaf is not None
    assert pool.release_upward(leaf) == 2  # up to the trunk, which `right` needs
    assert pool.match(right.hashes) == right.blocks
    assert pool.release_upward(leaf) == 0  # not cached any more
    pool.touch(right.blocks[-1:])
    other = pool.node(right.hashes[-1])
    assert other is not None and pool.release_upward(other) == 0  # in use
    assert clean(pool)


def test_reset() -> None:
    pool = BlockPool(8, 4)
    chain = Chain(pool, [1] * 16)
    assert not pool.reset_prefix_cache() and pool.num_cached == 4
    pool.free(reversed(chain.blocks))
    assert pool.reset_prefix_cache() and pool.num_cached == 0
    assert pool.num_free == 8 and clean(pool)


def test_integrity_check_can_fail() -> None:
    pool = BlockPool(8, 4)
    chain = Chain(pool, [1] * 16)
    node = pool.node(chain.hashes[1])
    assert node is not None
    node.held = 3
    assert any("held 3" in fault for fault in pool.check_integrity())
    node.held = 0
    node.block_ids.clear()
    faults = pool.check_integrity()
    assert any("no block" in fault for fault in faults)
    assert any("does not list it" in fault for fault in faults)
