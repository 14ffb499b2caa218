"""The engine's paged cache as regions of raw storage: `[num_blocks, block_bytes]` each.

An object's payload is the concatenation of a block's regions. Whatever the shape of the engine's
tensors (one per layer or one for all, K and V together or apart, any order of the axes), a region
is described by where its first block lies, how far apart two blocks are, and how many bytes of a
block are one run. Nothing is copied; the tensors are kept alive.

A `PagedCache` is immutable and may be read from any thread. What its pages hold is the engine's.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from connector.errors import UnsupportedError
from connector.ids import BlockId

PIECES_MAX = 16
"""Regions of one tensor; more would mean that a block lies in many small pieces."""


@dataclass(frozen=True)
class Region:
    """Block b's bytes are `storage[offset + b * stride :][:block_bytes]`.

    storage: index into `PagedCache.storages`. All in bytes.
    """

    storage: int
    offset: int
    stride: int
    block_bytes: int


class PagedCache:
    """All regions of a cache, in the order of the payload."""

    def __init__(
        self, storages: Sequence[torch.Tensor], regions: Sequence[Region], num_blocks: int,
        layout: str,
    ) -> None:
        """storages: 1-D uint8 tensors over whole allocations. Use `paged_cache` to make one."""
        self.storages = tuple(storages)
        self.regions = tuple(regions)
        self.num_blocks = num_blocks
        self.layout = layout
        self.block_bytes = sum(region.block_bytes for region in regions)
        self.device = self.storages[0].device
        self._views = None
        if self.device.type == "cpu":
            # numpy's view holds the tensor, a memoryview of it holds numpy's.
            whole = [storage.numpy().data for storage in self.storages]
            self._views = [(whole[r.storage], r.offset, r.stride, r.block_bytes) for r in regions]

    def parts(self, block: BlockId) -> list[memoryview]:
        """A block's regions as writable memory of the cache itself, in payload order.

        CPU caches only. A view is good as long as it is kept, also when the engine has dropped the
        tensors; the page may be the engine's again by then.
        """
        assert self._views is not None, f"no host memory on {self.device}"
        assert 0 <= block < self.num_blocks, (block, self.num_blocks)
        return [
            view[offset + block * stride : offset + block * stride + size]
            for view, offset, stride, size in self._views
        ]

    def blocks_view(self, region: Region) -> torch.Tensor:
        """uint8 `[num_blocks, block_bytes]` over a region's memory, on the cache's device."""
        return self.storages[region.storage].as_strided(
            (self.num_blocks, region.block_bytes), (region.stride, 1), region.offset
        )


def paged_cache(
    tensors: Mapping[str, torch.Tensor] | Sequence[torch.Tensor],
    num_blocks: int,
    block_axis: int | None = None,
) -> PagedCache:
    """Describe an engine's cache tensors, in the order given (one per layer, or fewer).

    num_blocks: pages of the cache. block_axis: which axis counts them; None: found by its size,
    which may be a multiple of `num_blocks` (then a page is that many consecutive kernel blocks).
    Tensors that are the same memory (layers that share their KV) count once.
    Raises UnsupportedError if a block can't be moved as a few runs of bytes.
    """
    named = list(tensors.items()) if isinstance(tensors, Mapping) else [
        (f"tensor {index}", tensor) for index, tensor in enumerate(tensors)
    ]
    if not named or num_blocks < 1:
        raise UnsupportedError(f"a cache of {len(named)} tensors and {num_blocks} blocks")
    allocations: dict[int, int] = {}
    storages: list[torch.Tensor] = []
    regions: list[Region] = []
    shapes: list[str] = []
    for name, tensor in named:
        raw = tensor.untyped_storage()
        where = allocations.setdefault(raw.data_ptr(), len(storages))
        if where == len(storages):
            storages.append(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(raw))
        found, shape = _regions_of(name, tensor, num_blocks, block_axis)
        shapes.append(shape)
        for offset, stride, run in found:
            region = Region(where, offset, stride, run)
            if region not in regions:
                regions.append(region)
    _check_apart(regions)
    if len({storage.device for storage in storages}) > 1:
        raise UnsupportedError("the cache's tensors are on several devices; use one per rank")
    return PagedCache(storages, _merged(regions), num_blocks, _layout_text(shapes))


def _regions_of(
    name: str, tensor: torch.Tensor, num_blocks: int, block_axis: int | None
) -> tuple[list[tuple[int, int, int]], str]:
    """([(byte offset, byte stride, run bytes)], description) of one tensor."""
    axis = _block_axis(name, tensor, num_blocks, block_axis)
    item = tensor.element_size()
    axes = [
        (int(size), stride * item)
        for index, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))
        if index != axis and size != 1
    ]
    per_page = int(tensor.shape[axis]) // num_blocks
    stride = int(tensor.stride(axis)) * item
    if per_page > 1:
        axes.append((per_page, stride))
        stride *= per_page
    # An axis with steps wider than a block's lies outside of the block: one region per index.
    # Both in the order of memory, which is what `_shape_text` says of the payload's order.
    axes.sort(key=lambda a: -a[1])
    outer = [a for a in axes if num_blocks > 1 and a[1] > stride]
    run, dense = item, True
    for size, step in reversed(axes[len(outer) :]):
        dense = dense and step == run
        run *= size
    pieces = 1
    for size, _ in outer:
        pieces *= size
    if not dense or pieces > PIECES_MAX or (num_blocks > 1 and run > stride):
        raise UnsupportedError(_not_dense(name, tensor, axis))
    start = int(tensor.storage_offset()) * item
    offsets = [
        start + sum(i * step for i, (_, step) in zip(index, outer, strict=True))
        for index in itertools.product(*(range(size) for size, _ in outer))
    ]
    shape = _shape_text(tensor, axis, per_page)
    return [(offset, stride if num_blocks > 1 else run, run) for offset in offsets], shape


def _block_axis(name: str, tensor: torch.Tensor, num_blocks: int, given: int | None) -> int:
    """The axis that counts the blocks. Raises UnsupportedError if that can't be told."""
    shape = tuple(tensor.shape)
    if given is not None:
        if not -len(shape) <= given < len(shape) or shape[given] % num_blocks or not shape[given]:
            raise UnsupportedError(
                f"{name}: axis {given} of {shape} does not count {num_blocks} blocks"
            )
        return given % len(shape)
    exact = [axis for axis, size in enumerate(shape) if size == num_blocks]
    if exact and exact[0] in (0, 1) and not (exact[:2] == [0, 1] and num_blocks == 2):
        # K and V apart is an axis of size 2 in front, so of two equal axes the first is meant.
        return exact[0]
    multiple = [axis for axis in (0, 1) if axis < len(shape) and shape[axis] > num_blocks > 1
                and shape[axis] % num_blocks == 0]
    if not exact and len(multiple) == 1:
        return multiple[0]
    raise UnsupportedError(
        f"{name}: which axis of {shape} counts the {num_blocks} blocks? Give block_axis"
    )


def _not_dense(name: str, tensor: torch.Tensor, axis: int) -> str:
    return (
        f"{name}: a block of shape {tuple(tensor.shape)}, strides {tensor.stride()}, block axis "
        f"{axis}, is not a few runs of bytes; allocate the cache so that the axes of one block are "
        f"contiguous (for vLLM: a layout with the block axis outside, such as LBHNC or BLHNC)"
    )


def _shape_text(tensor: torch.Tensor, axis: int, per_page: int) -> str:
    """What decides the order of bytes within a block: element type, sizes in order of memory."""
    order = sorted(
        (a for a in range(tensor.dim()) if a != axis and tensor.shape[a] != 1),
        key=tensor.stride,
        reverse=True,
    )
    sizes = [f"{a - (a > axis)}:{tensor.shape[a]}" for a in order]
    return f"{str(tensor.dtype).removeprefix('torch.')}[{per_page};{','.join(sizes)}]"


def _layout_text(shapes: Sequence[str]) -> str:
    """Equal runs folded: `4x float32[1;0:2,1:16,2:64]`; a digest where layers differ wildly."""
    runs = [(shape, len(list(group))) for shape, group in itertools.groupby(shapes)]
    text = " ".join(f"{count}x {shape}" for shape, count in runs)
    return text if len(text) <= 200 else "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _merged(regions: Sequence[Region]) -> list[Region]:
    """Neighbours in payload order that are neighbours in memory become one."""
    merged: list[Region] = []
    for region in regions:
        last = merged[-1] if merged else None
        if (
            last is not None
            and (last.storage, last.stride) == (region.storage, region.stride)
            and last.offset + last.block_bytes == region.offset
            and last.block_bytes + region.block_bytes <= region.stride
        ):
            both = last.block_bytes + region.block_bytes
            merged[-1] = Region(last.storage, last.offset, last.stride, both)
        else:
            merged.append(region)
    return merged


def _check_apart(regions: Sequence[Region]) -> None:
    """Two regions that overlap in part would be written twice. Raises UnsupportedError."""
    groups: dict[tuple[int, int], list[Region]] = {}
    for region in regions:
        groups.setdefault((region.storage, region.stride), []).append(region)
    for same in groups.values():
        ordered = sorted(same, key=lambda r: r.offset)
        for first, second in itertools.pairwise(ordered):
            if first.offset + first.block_bytes > second.offset:
                raise UnsupportedError(
                    f"two cache tensors overlap in part ({first}, {second}); give each layer "
                    f"memory of its own, or the same tensor"
                )
