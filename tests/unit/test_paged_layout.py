"""Any layout of an engine's cache, described as regions; the bytes are the tensors' own."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.errors import UnsupportedError
from connector.ids import BlockId
from store_worker.paged.layout import PagedCache, Region, paged_cache

BLOCKS, HEADS, TOKENS, SIZE, LAYERS = 10, 2, 8, 16, 4


def numbered(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(count, dtype=torch.int64).view(shape).to(dtype)


def payload(cache: PagedCache, block: int) -> bytes:
    return b"".join(cache.parts(BlockId(block)))


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def per_layer() -> tuple[list[torch.Tensor], Callable[[int], bytes]]:
    """vLLM on CPU: [blocks, heads, tokens, 2 * size] per layer, all views of one allocation."""
    shape = (BLOCKS, HEADS, TOKENS, 2 * SIZE)
    one = numbered(LAYERS * torch.Size(shape).numel())
    tensors = [part.view(shape) for part in one.chunk(LAYERS)]
    return tensors, lambda b: b"".join(raw(t[b]) for t in tensors)


def apart() -> tuple[list[torch.Tensor], Callable[[int], bytes]]:
    """K and V apart: [2, blocks, tokens, heads, size]."""
    tensors = [numbered(2, BLOCKS, TOKENS, HEADS, SIZE) + i for i in range(LAYERS)]
    return tensors, lambda b: b"".join(raw(t[kv, b]) for t in tensors for kv in (0, 1))


def apart_inside() -> tuple[list[torch.Tensor], Callable[[int], bytes]]:
    """[2, blocks, ...] to the eye, but K and V of a block side by side in memory."""
    memory = [numbered(BLOCKS, 2, TOKENS, HEADS, SIZE) + i for i in range(LAYERS)]
    return [t.transpose(0, 1) for t in memory], lambda b: b"".join(raw(t[b]) for t in memory)


def apart_outside() -> tuple[list[torch.Tensor], Callable[[int], bytes]]:
    """[blocks, 2, ...] to the eye, but all K before all V in memory."""
    memory = [numbered(2, BLOCKS, TOKENS, HEADS, SIZE) + i for i in range(LAYERS)]
    return [t.transpose(0, 1) for t in memory], lambda b: b"".join(
        raw(t[kv, b]) for t in memory for kv in (0, 1)
    )


def heads_before_tokens() -> tuple[list[torch.Tensor], Callable[[int], bytes]]:
    """[blocks, tokens, heads, ...] to the eye, heads before tokens in memory."""
    memory = [numbered(BLOCKS, HEADS, TOKENS, SIZE) + i for i in range(LAYERS)]
    return [t.transpose(1, 2) for t in memory], lambda b: b"".join(raw(t[b]) for t in memory)


def block_major() -> tuple[list[torch.Tensor], Callable[[int], bytes]]:
    """All layers of a block side by side: one region in the end."""
    memory = numbered(BLOCKS, LAYERS, HEADS, TOKENS, SIZE)
    return list(memory.unbind(1)), lambda b: raw(memory[b])


def latent() -> tuple[list[torch.Tensor], Callable[[int], bytes]]:
    """MLA: [blocks, tokens, size], half precision."""
    tensors = [numbered(BLOCKS, TOKENS, 72, dtype=torch.bfloat16) for _ in range(LAYERS)]
    return tensors, lambda b: b"".join(raw(t[b]) for t in tensors)


def kernel_blocks() -> tuple[list[torch.Tensor], Callable[[int], bytes]]:
    """A page is two of the kernel's blocks."""
    tensors = [numbered(2 * BLOCKS, TOKENS, SIZE) + i for i in range(LAYERS)]
    return tensors, lambda b: b"".join(raw(t[2 * b : 2 * b + 2]) for t in tensors)


# (builder, regions that must remain)
LAYOUTS = [
    (per_layer, LAYERS),
    (apart, 2 * LAYERS),
    (apart_inside, LAYERS),
    (apart_outside, 2 * LAYERS),
    (heads_before_tokens, LAYERS),
    (block_major, 1),
    (latent, LAYERS),
    (kernel_blocks, LAYERS),
]


@pytest.mark.parametrize(("build", "regions"), LAYOUTS)
def test_a_block_is_its_own_bytes(build: Callable, regions: int) -> None:
    tensors, want = build()
    cache = paged_cache(tensors, BLOCKS)
    assert len(cache.regions) == regions
    for block in range(BLOCKS):
        assert payload(cache, block) == want(block)
        assert cache.block_bytes == len(want(block))
    views = [cache.blocks_view(region) for region in cache.regions]
    assert b"".join(raw(view[3]) for view in views) == want(3)


@pytest.mark.parametrize(("build", "regions"), LAYOUTS)
def test_writing_a_block_changes_that_block_alone(build: Callable, regions: int) -> None:
    tensors, want = build()
    cache = paged_cache(tensors, BLOCKS)
    before = [want(block) for block in range(BLOCKS)]
    for part in cache.parts(BlockId(4)):
        part[:] = b"\xa5" * len(part)
    for block in range(BLOCKS):
        assert want(block) == (b"\xa5" * len(before[4]) if block == 4 else before[block])


def test_the_layout_text_tells_orders_apart() -> None:
    texts = {
        build.__name__: paged_cache(build()[0], BLOCKS).layout for build, _ in LAYOUTS
    }
    # Two views of one memory order have the same payload, so they may and do share.
    assert texts.pop("apart_inside") == texts["apart"]
    assert texts.pop("apart_outside") == texts["apart"]
    assert len(set(texts.values())) == len(texts), texts
    assert texts["per_layer"] == "4x float32[1;0:2,1:8,2:32]"


def test_element_types_are_told_apart() -> None:
    shapes = [numbered(BLOCKS, 64, dtype=t) for t in (torch.float16, torch.bfloat16)]
    assert len({paged_cache([t], BLOCKS).layout for t in shapes}) == 2


def test_many_different_layers_become_a_digest() -> None:
    tensors = [numbered(BLOCKS, TOKENS, 3 + i % 17) for i in range(60)]
    assert paged_cache(tensors, BLOCKS).layout.startswith("sha256:")


def test_views_outlive_the_tensors() -> None:
    tensors, want = per_layer()
    right = want(7)
    parts = paged_cache(tensors, BLOCKS).parts(BlockId(7))
    del tensors, want
    gc.collect()
    torch.full((1 << 20,), 9.0)
    assert b"".join(parts) == right


def test_layers_that_share_their_memory_count_once() -> None:
    one, two = numbered(BLOCKS, 64), numbered(BLOCKS, 64)
    cache = paged_cache({"a": one, "b": two, "c": one}, BLOCKS)
    assert len(cache.regions) == 2
    assert payload(cache, 1) == raw(one[1]) + raw(two[1])


def test_a_part_of_a_larger_allocation() -> None:
    whole = numbered(1000 + BLOCKS * 64)
    tensor = whole[1000:].view(BLOCKS, 64)
    cache = paged_cache([tensor], BLOCKS)
    assert cache.regions == (Region(0, 4000, 256, 256),)
    assert payload(cache, 9) == raw(tensor[9])


def test_padding_between_blocks() -> None:
    memory = numbered(BLOCKS, 80)
    cache = paged_cache([memory[:, :64]], BLOCKS)
    assert payload(cache, 2) == raw(memory[2, :64])


@pytest.mark.parametrize(
    ("tensor", "blocks", "message"),
    [
        (numbered(BLOCKS, TOKENS, 20)[:, :, :16], BLOCKS, "not a few runs"),
        (numbered(BLOCKS, 1, 16).expand(BLOCKS, TOKENS, 16), BLOCKS, "not a few runs"),
        (numbered(1, TOKENS, 16).expand(BLOCKS, TOKENS, 16), BLOCKS, "not a few runs"),
        (numbered(32, BLOCKS, 4).permute(1, 0, 2), BLOCKS, "not a few runs"),
        (numbered(7, 64), BLOCKS, "which axis"),
        (numbered(2, 2, 64), 2, "which axis"),
        (numbered(4, 3, 10, 64), BLOCKS, "which axis"),
    ],
)
def test_what_can_not_be_moved_is_refused(tensor: torch.Tensor, blocks: int, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        paged_cache([tensor], blocks)


def test_partial_overlap_is_refused() -> None:
    memory = numbered(BLOCKS, 96)
    with pytest.raises(UnsupportedError, match="overlap"):
        paged_cache([memory[:, :64], memory[:, 32:]], BLOCKS)


def test_no_tensors_or_blocks() -> None:
    for tensors, blocks in (([], 4), ([numbered(4, 4)], 0)):
        with pytest.raises(UnsupportedError):
            paged_cache(tensors, blocks)


def test_the_axis_can_be_given() -> None:
    tensor = numbered(2, 2, 64)
    assert payload(paged_cache([tensor], 2, 0), 1) == raw(tensor[1])
    assert payload(paged_cache([tensor], 2, 1), 1) == raw(tensor[:, 1])
    assert payload(paged_cache([tensor], 2, -2), 1) == raw(tensor[:, 1])
    with pytest.raises(UnsupportedError, match="does not count"):
        paged_cache([tensor], 2, 3)
    with pytest.raises(UnsupportedError, match="does not count"):
        paged_cache([tensor], 3, 0)


def test_one_block() -> None:
    tensor = numbered(2, 1, 64)
    assert payload(paged_cache([tensor], 1, 1), 0) == raw(tensor)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_order_of_the_axes(data: st.DataObject) -> None:
    """Where it is not refused, the blocks are apart and together they are the tensor."""
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    blocks = data.draw(st.sampled_from([5, 7]))
    logical = [*sizes, blocks]
    order = data.draw(st.permutations(range(len(logical))))
    memory = numbered(*(logical[axis] for axis in order), dtype=torch.int32)
    tensor = memory.permute([order.index(axis) for axis in range(len(logical))])
    view = data.draw(st.permutations(range(len(logical))))
    tensor = tensor.permute(view)
    try:
        cache = paged_cache([tensor], blocks, tensor.shape.index(blocks))
    except UnsupportedError:
        assert order[0] != len(sizes), "with the block axis outermost nothing may be refused"
        return
    seen = [payload(cache, block) for block in range(blocks)]
    for block, found in enumerate(seen):
        axis = tensor.shape.index(blocks)
        want = tensor.select(axis, block).flatten().tolist()
        assert sorted(memoryview(found).cast("i")) == sorted(want)
