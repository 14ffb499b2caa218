"""Both movers do the same: pages out as bytes, bytes into pages, nothing beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from connector.errors import UnsupportedError
from connector.ids import BlockId
from store_worker.paged import copy
from store_worker.paged.copy import DirectMover, Fence, Mover, StagedMover, check_mover, fence
from store_worker.paged.layout import PagedCache, paged_cache
from store_worker.paged.staging import SLOTS, StagingRing, slot_rows

BLOCKS = 30
NO_FENCE = Fence()


def cache_of(dtype: torch.dtype = torch.float32, tail: int = 24) -> PagedCache:
    generator = torch.Generator().manual_seed(5)
    tensors = [
        torch.randint(-100, 100, (2, BLOCKS, 4, tail), generator=generator).to(dtype)
        for _ in range(3)
    ]
    return paged_cache(tensors, BLOCKS)


def staged(rows: int) -> Callable[[PagedCache], Mover]:
    return lambda cache: StagedMover(cache, SLOTS * rows * cache.block_bytes)


MOVERS = {
    "direct": DirectMover,
    "staged-1": staged(1),
    "staged-4": staged(4),
    "staged-100": staged(100),
}


@pytest.fixture(params=MOVERS)
def make(request: pytest.FixtureRequest) -> Callable[[PagedCache], Mover]:
    return MOVERS[request.param]


def page(cache: PagedCache, block: int) -> bytes:
    return b"".join(cache.parts(BlockId(block)))


def ids(*blocks: int) -> list[BlockId]:
    return [BlockId(block) for block in blocks]


@pytest.mark.parametrize("blocks", [[], [3], [29, 0, 7], list(range(30)), [5, 5]])
def test_read(make: Callable[[PagedCache], Mover], blocks: list[int]) -> None:
    cache = cache_of()
    mover, found = make(cache), []
    for batch in mover.read(ids(*blocks), NO_FENCE):
        assert batch.start == len(found)
        found += [b"".join(parts) for parts in batch.parts]
    mover.finish()
    assert found == [page(cache, block) for block in blocks]


def write(mover: Mover, blocks: Sequence[int], keep: Callable[[int], bool], size: int) -> int:
    """Fill pages with their number in `blocks`, plus one; keep those that `keep` likes."""
    done = 0
    for landing in mover.write(ids(*blocks), NO_FENCE):
        assert landing.start == done
        for i, parts in enumerate(landing.parts, landing.start):
            assert sum(map(len, parts)) == size
            for part in parts:
                part[:] = bytes([i + 1]) * len(part)
        good = [i for i in range(len(landing.parts)) if keep(landing.start + i)]
        landing.keep(good)
        done += len(landing.parts)
    mover.finish()
    return done


@pytest.mark.parametrize("blocks", [[3], [29, 0, 7], list(range(30))])
def test_write_all(make: Callable[[PagedCache], Mover], blocks: list[int]) -> None:
    cache = cache_of()
    before = [page(cache, block) for block in range(BLOCKS)]
    assert write(make(cache), blocks, lambda i: True, cache.block_bytes) == len(blocks)
    for block in range(BLOCKS):
        kept = bytes([blocks.index(block) + 1]) * cache.block_bytes if block in blocks else None
        assert page(cache, block) == (kept or before[block])


def test_write_some(make: Callable[[PagedCache], Mover]) -> None:
    """Kept pages are whole; pages that were not asked for are untouched."""
    cache = cache_of()
    before = [page(cache, block) for block in range(BLOCKS)]
    blocks = [20, 1, 13, 4, 9, 8, 2]
    write(make(cache), blocks, lambda i: i % 3 != 1, cache.block_bytes)
    for index, block in enumerate(blocks):
        if index % 3 != 1:
            assert page(cache, block) == bytes([index + 1]) * cache.block_bytes
    for block in set(range(BLOCKS)) - set(blocks):
        assert page(cache, block) == before[block]


def test_staged_pages_that_are_not_kept_keep_their_content() -> None:
    cache = cache_of()
    before = page(cache, 2)
    write(staged(2)(cache), [1, 2, 3], lambda i: i != 1, cache.block_bytes)
    assert page(cache, 2) == before


class Forward:
    """Stands for the event behind a forward pass, which gives a page its content."""

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache

    def synchronize(self) -> None:
        for part in self._cache.parts(BlockId(6)):
            part[:] = b"F" * len(part)


def test_fault_3_nothing_is_read_before_the_fence_is_reached(
    make: Callable[[PagedCache], Mover],
) -> None:
    cache = cache_of()
    after = Fence(Forward(cache))
    [batch] = list(make(cache).read(ids(6), after))
    assert b"".join(batch.parts[0]) == b"F" * cache.block_bytes


def test_nothing_is_written_before_the_fence_is_reached(
    make: Callable[[PagedCache], Mover],
) -> None:
    """Work that was launched earlier may still write to (or read) the page's former content."""
    cache = cache_of()
    mover = make(cache)
    for landing in mover.write(ids(6), Fence(Forward(cache))):
        for part in landing.parts[0]:
            part[:] = b"L" * len(part)
        landing.keep([0])
    mover.finish()
    assert page(cache, 6) == b"L" * cache.block_bytes


@pytest.mark.parametrize(
    ("dtype", "tail", "wide"),
    [
        (torch.float32, 24, torch.int64),
        (torch.float32, 25, torch.int64),
        (torch.bfloat16, 25, torch.int64),
        (torch.int8, 25, torch.int32),
        (torch.int8, 26, torch.int64),
    ],
)
def test_the_widest_element_is_used(dtype: torch.dtype, tail: int, wide: torch.dtype) -> None:
    cache = cache_of(dtype, tail)
    assert copy.widest_element(cache) == wide
    assert [b"".join(p) for b in staged(4)(cache).read(ids(4, 1), NO_FENCE) for p in b.parts] == [
        page(cache, 4),
        page(cache, 1),
    ]


def test_batches_are_bounded() -> None:
    tensors = [torch.zeros(BLOCKS, 1 << 18)]
    cache = paged_cache(tensors, BLOCKS)
    sizes = [len(b.parts) for b in DirectMover(cache).read(ids(*range(BLOCKS)), NO_FENCE)]
    assert max(sizes) * cache.block_bytes == copy.BATCH_BYTES
    assert sum(sizes) == BLOCKS
    wide = paged_cache([torch.zeros(5, 4 << 20)], 5)
    sizes = [len(b.parts) for b in DirectMover(wide).write(ids(*range(5)), NO_FENCE)]
    assert max(sizes) * wide.block_bytes == copy.LANDING_BYTES and sum(sizes) == 5


def test_a_block_larger_than_a_batch_still_moves() -> None:
    cache = paged_cache([torch.zeros(3, copy.BATCH_BYTES)], 3)
    assert [len(b.parts) for b in DirectMover(cache).read(ids(0, 1, 2), NO_FENCE)] == [1, 1, 1]


def test_too_little_staging_is_refused_with_the_remedy() -> None:
    with pytest.raises(UnsupportedError, match="staging_bytes to at least 2000"):
        slot_rows(1000, 1999)
    assert slot_rows(1000, 5000) == 2


def test_a_host_cache_needs_no_staging() -> None:
    cache = cache_of()
    check_mover(cache, 1)
    assert isinstance(copy.open_mover(cache, 1), DirectMover)
    assert fence(cache) == NO_FENCE


def test_the_ring_waits_for_a_slot_before_it_gives_it_again() -> None:
    ring, ended = StagingRing(100, 1000, torch.device("cpu")), []
    for turn in range(5):
        number, slot = ring.take()
        assert number == turn % SLOTS and len(slot.view) == 500
        assert ended == list(range(max(0, turn - SLOTS + 1)))
        ring.busy(number, lambda turn=turn: ended.append(turn))
    ring.settle_all()
    assert sorted(ended) == [0, 1, 2, 3, 4]
    ring.settle_all()
    assert len(ended) == 5
