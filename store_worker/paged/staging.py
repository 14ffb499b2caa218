"""A fixed ring of host buffers between a device cache and the sockets.

Made once, of a size that the config gives, and never grown: whoever needs a slot takes the next one
and waits until the copies that used it last have ended.

Thread: a ring belongs to one load or save thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from connector.errors import UnsupportedError

SLOTS = 2
"""One is on the wire while the other is copied from or to the device."""


class Slot(NamedTuple):
    """`rows` blocks of host memory, and the same on the device for the batched copies.

    host, device: uint8 `[rows * block_bytes]`. view: the host memory as bytes.
    """

    host: torch.Tensor
    device: torch.Tensor
    view: memoryview


def slot_rows(block_bytes: int, ring_bytes: int) -> int:
    """Blocks that fit into one slot. Raises UnsupportedError, with the remedy, if none does."""
    rows = ring_bytes // (SLOTS * block_bytes)
    if rows < 1:
        raise UnsupportedError(
            f"staging of {ring_bytes} bytes holds no {SLOTS} blocks of {block_bytes} bytes; "
            f"raise staging_bytes to at least {SLOTS * block_bytes} per io thread"
        )
    return rows


class StagingRing:
    """`SLOTS` slots of `rows` blocks each."""

    def __init__(self, block_bytes: int, ring_bytes: int, device: torch.device) -> None:
        """ring_bytes: host memory for all slots; as much again is used on the device.

        Host memory is pinned for a CUDA device. Raises UnsupportedError if no block fits.
        """
        self.rows = slot_rows(block_bytes, ring_bytes)
        self._slots = [_slot(self.rows * block_bytes, device) for _ in range(SLOTS)]
        self._busy: list[Callable[[], None] | None] = [None] * SLOTS
        self._next = 0

    def take(self) -> tuple[int, Slot]:
        """The next slot, once its last copies have ended."""
        number = self._next
        self._next = (number + 1) % SLOTS
        self.settle(number)
        return number, self._slots[number]

    def busy(self, number: int, wait: Callable[[], None]) -> None:
        """Copies that use the slot are under way; `wait` returns when they have ended."""
        self._busy[number] = wait

    def settle(self, number: int) -> None:
        """Wait for one slot's copies."""
        wait, self._busy[number] = self._busy[number], None
        if wait is not None:
            wait()

    def settle_all(self) -> None:
        """Wait for every slot's copies."""
        for number in range(SLOTS):
            self.settle(number)


def _slot(size: int, device: torch.device) -> Slot:
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return Slot(host, torch.empty(size, dtype=torch.uint8, device=device), host.numpy().data)
