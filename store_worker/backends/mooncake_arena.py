"""Registered staging memory, handed out in pieces.

A piece that belongs to a call which has not returned is simply not given back: nobody else can
get it. Thread-safe.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterator

from connector.clock import Clock

ALIGN = 4096


class Extent:
    """A piece of an arena: `view` and the address of its first byte, until `release`."""

    __slots__ = ("_arena", "address", "offset", "size", "view")

    def __init__(self, arena: Arena, offset: int, size: int) -> None:
        self._arena: Arena | None = arena
        self.offset, self.size = offset, size
        self.address = arena.address + offset
        self.view = arena.view[offset : offset + size]

    def release(self) -> None:
        """Give it back; later calls do nothing."""
        arena, self._arena = self._arena, None
        if arena is not None:
            arena.give_back(self.offset, self.size)


class Arena:
    """Anonymous memory of a fixed size, allocated first fit. Pages are touched when first used."""

    def __init__(self, size: int, clock: Clock) -> None:
        self.size = -(-size // ALIGN) * ALIGN
        self._map = mmap.mmap(-1, self.size)
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._clock = clock
        self._free: list[tuple[int, int]] = [(0, self.size)]  # (offset, size), by offset
        self._freed = threading.Condition()  # also the lock of _free

    def take(self, size: int, deadline: float) -> Extent | None:
        """A piece of at least `size` bytes, waiting for one if need be; None at the deadline, or
        at once if the arena is smaller than that."""
        need = max(ALIGN, -(-size // ALIGN) * ALIGN)
        if need > self.size:
            return None
        with self._freed:
            while True:
                offset = self._find(need)
                if offset is not None:
                    return Extent(self, offset, need)
                left_s = deadline - self._clock.now()
                if left_s <= 0:
                    return None
                self._freed.wait(left_s)

    def _find(self, need: int) -> int | None:
        for index, (offset, size) in enumerate(self._free):
            if size >= need:
                rest = [(offset + need, size - need)] if size > need else []
                self._free[index : index + 1] = rest
                return offset
        return None

    def give_back(self, offset: int, size: int) -> None:
        """See `Extent.release`."""
        with self._freed:
            self._free = list(_joined(sorted([*self._free, (offset, size)])))
            self._freed.notify_all()

    def free_bytes(self) -> int:
        """What is not handed out."""
        with self._freed:
            return sum(size for _, size in self._free)


def _joined(pieces: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Neighbours made one."""
    at, length = pieces[0]
    for offset, size in pieces[1:]:
        if offset == at + length:
            length += size
        else:
            yield at, length
            at, length = offset, size
    yield at, length
