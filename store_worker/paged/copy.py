"""Between cache pages and memory that a socket can read and write.

`Mover` hides the difference: host caches hand out their own pages (`DirectMover`, nothing is
copied), device caches go through a staging ring on a side stream (`StagedMover`). Both give batches
of pages as lists of memoryviews, in payload order.

Thread: a mover belongs to one load or save thread. `fence` is called on the engine's thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

from connector.ids import BlockId
from store_worker.paged.layout import PagedCache, Region
from store_worker.paged.staging import Slot, StagingRing, slot_rows

BATCH_BYTES = 8 << 20
"""Payload of one batch: enough to keep a connection busy, little enough to stop soon."""

LANDING_BYTES = 64 << 20
"""Payload of one landing in a host's own pages, which costs no staging memory: a back end keeps
several calls under way only within one."""


class Event(Protocol):
    """What a fence needs of `torch.cuda.Event`."""

    def synchronize(self) -> None:
        """Wait until it has happened."""


class Fence(NamedTuple):
    """A point in the engine's work: copies wait until it is reached. None: it is already."""

    event: Event | None = None

    def wait(self) -> None:
        """On the calling thread. Copies on a device's stream wait there instead."""
        if self.event is not None:
            self.event.synchronize()


def fence(cache: PagedCache) -> Fence:
    """Everything that the calling thread has launched so far on the cache's device.

    For a save it must be called behind the forward pass that fills the pages, for a load behind
    what may still read their former content. Takes microseconds; waits for nothing.
    """
    if cache.device.type != "cuda":
        return Fence()
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(cache.device))
    return Fence(event)


class Batch(NamedTuple):
    """Pages `start, start + 1, ...` of a job; parts[i]: the bytes of one, in payload order."""

    start: int
    parts: list[list[memoryview]]


class Landing(NamedTuple):
    """A batch to be filled. Call `keep` with the indices (into parts) that are good."""

    start: int
    parts: list[list[memoryview]]
    keep: Callable[[Sequence[int]], None]


class Mover(Protocol):
    """One thread's way into the cache."""

    def read(self, blocks: Sequence[BlockId], after: Fence) -> Iterator[Batch]:
        """The pages' bytes. A batch is good until the next one is asked for."""

    def write(self, blocks: Sequence[BlockId], after: Fence) -> Iterator[Landing]:
        """Memory to fill. Pages that are kept have their bytes once `finish` has returned; what
        a page that is not kept holds then is undefined."""

    def finish(self) -> None:
        """Wait until no copy is under way any more. Call it at the end of each job."""


def check_mover(cache: PagedCache, staging_bytes: int) -> None:
    """Raises UnsupportedError where `open_mover` would, but allocates nothing."""
    if cache.device.type != "cpu":
        slot_rows(cache.block_bytes, staging_bytes)


def open_mover(cache: PagedCache, staging_bytes: int) -> Mover:
    """The right mover for a cache. staging_bytes: for this thread alone."""
    if cache.device.type == "cpu":
        return DirectMover(cache)
    return StagedMover(cache, staging_bytes)


class DirectMover:
    """The pages of a host cache, themselves."""

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache
        self._rows = max(1, BATCH_BYTES // cache.block_bytes)
        self._landing_rows = max(1, LANDING_BYTES // cache.block_bytes)

    def read(self, blocks: Sequence[BlockId], after: Fence) -> Iterator[Batch]:
        after.wait()
        for start in range(0, len(blocks), self._rows):
            yield Batch(start, self._parts(blocks[start : start + self._rows]))

    def write(self, blocks: Sequence[BlockId], after: Fence) -> Iterator[Landing]:
        after.wait()
        rows = self._landing_rows
        for start in range(0, len(blocks), rows):
            yield Landing(start, self._parts(blocks[start : start + rows]), lambda _: None)

    def _parts(self, blocks: Sequence[BlockId]) -> list[list[memoryview]]:
        return [self._cache.parts(block) for block in blocks]

    def finish(self) -> None:
        pass


class StagedMover:
    """Gather and scatter through pinned memory on a stream of its own.

    A slot holds a batch region by region (`[region][row][bytes]`), so that one indexed copy per
    region and one transfer move the whole batch; a page's parts are then one slice per region.
    Works on a CPU device as well, where copies are done when they return (for the tests).
    """

    def __init__(self, cache: PagedCache, staging_bytes: int) -> None:
        self._cache = cache
        self._device = cache.device
        self._stream = (
            torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        )
        # On the side stream: memory that the engine's own stream has just given back may still be
        # in use there.
        with torch.cuda.stream(self._stream):
            self._ring = StagingRing(cache.block_bytes, staging_bytes, self._device)
        self._rows = min(self._ring.rows, max(1, BATCH_BYTES // cache.block_bytes))
        self._dtype = widest_element(cache)
        self._pages = [cache.blocks_view(region).view(self._dtype) for region in cache.regions]

    def read(self, blocks: Sequence[BlockId], after: Fence) -> Iterator[Batch]:
        starts = range(0, len(blocks), self._rows)
        ahead = self._gather(blocks, 0, after) if starts else None
        for start in starts:
            assert ahead is not None
            number, slot, rows = ahead
            following = start + self._rows
            # The next batch is gathered while this one is on the wire.
            ahead = self._gather(blocks, following, after) if following < len(blocks) else None
            self._ring.settle(number)
            yield Batch(start, self._slices(slot, rows))

    def write(self, blocks: Sequence[BlockId], after: Fence) -> Iterator[Landing]:
        for start in range(0, len(blocks), self._rows):
            pages = blocks[start : start + self._rows]
            number, slot = self._ring.take()

            def keep(
                good: Sequence[int], pages: Sequence[BlockId] = pages, number: int = number,
                slot: Slot = slot,
            ) -> None:
                self._scatter(pages, good, number, slot, after)

            yield Landing(start, self._slices(slot, len(pages)), keep)

    def finish(self) -> None:
        self._ring.settle_all()

    def _gather(
        self, blocks: Sequence[BlockId], start: int, after: Fence
    ) -> tuple[int, Slot, int]:
        pages = blocks[start : start + self._rows]
        number, slot = self._ring.take()
        with self._copying(number, after):
            index = self._index(pages)
            for region, at, view in self._layout(len(pages)):
                rows = self._rows_of(slot, at, len(pages), region)
                torch.index_select(view, 0, index, out=rows)
            used = len(pages) * self._cache.block_bytes
            slot.host[:used].copy_(slot.device[:used], non_blocking=True)
        return number, slot, len(pages)

    def _scatter(
        self, pages: Sequence[BlockId], good: Sequence[int], number: int, slot: Slot, after: Fence
    ) -> None:
        if not good:
            return
        whole = len(good) == len(pages)
        with self._copying(number, after):
            used = len(pages) * self._cache.block_bytes
            slot.device[:used].copy_(slot.host[:used], non_blocking=True)
            index = self._index([pages[i] for i in good])
            rows_kept = None if whole else self._index(good)
            for region, at, view in self._layout(len(pages)):
                rows = self._rows_of(slot, at, len(pages), region)
                if rows_kept is not None:
                    rows = rows.index_select(0, rows_kept)
                view.index_copy_(0, index, rows)

    def _rows_of(self, slot: Slot, at: int, rows: int, region: Region) -> torch.Tensor:
        """A region's part of a slot on the device, one row per page."""
        part = slot.device[at : at + rows * region.block_bytes]
        return part.view(self._dtype).view(rows, -1)

    def _layout(self, rows: int) -> Iterator[tuple[Region, int, torch.Tensor]]:
        """Each region with its place in a slot of `rows` pages, and its pages."""
        at = 0
        for region, view in zip(self._cache.regions, self._pages, strict=True):
            yield region, at, view
            at += rows * region.block_bytes

    def _slices(self, slot: Slot, rows: int) -> list[list[memoryview]]:
        places = [(at, region.block_bytes) for region, at, _ in self._layout(rows)]
        return [
            [slot.view[at + row * size : at + (row + 1) * size] for at, size in places]
            for row in range(rows)
        ]

    def _index(self, rows: Sequence[int]) -> torch.Tensor:
        return torch.tensor(rows, dtype=torch.int64, device=self._device)

    @contextlib.contextmanager
    def _copying(self, number: int, after: Fence) -> Iterator[None]:
        """On the side stream, behind the fence; the slot is busy until the copies have ended."""
        if self._stream is None:
            after.wait()
            yield
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            if isinstance(after.event, torch.cuda.Event):
                self._stream.wait_event(after.event)
            else:
                after.wait()
            try:
                yield
            finally:
                done = torch.cuda.Event()
                done.record(self._stream)
                self._ring.busy(number, done.synchronize)


def widest_element(cache: PagedCache) -> torch.dtype:
    """The widest element in which every page can be copied: fewer, larger accesses."""
    numbers = [n for r in cache.regions for n in (r.offset, r.stride, r.block_bytes)]
    numbers += [storage.numel() for storage in cache.storages]
    for dtype in (torch.int64, torch.int32, torch.int16):
        if not any(number % dtype.itemsize for number in numbers):
            return dtype
    return torch.uint8
