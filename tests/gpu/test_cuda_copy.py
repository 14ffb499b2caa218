"""Gather and scatter on a CUDA device: right bytes, and never before the forward pass is done."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from connector.clock import SystemClock
from connector.config import parse_config
from connector.ids import BlockId, JobId, Namespace, RequestId
from connector.meta import BlockOutcome, JobResult, LoadMeta, Placed, SaveMeta, StepMeta
from store_worker.backends.factory import node_id
from store_worker.paged.copy import StagedMover, fence
from store_worker.paged.layout import PagedCache, paged_cache
from store_worker.worker import StoreWorker
from tests.servers import Server
from tests.waiting import eventually

NO_DEVICE = not torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NO_DEVICE, reason="needs a CUDA device; torch sees none"),
]

BLOCKS = 64
CYCLES = 1_000_000_000  # about half a second of a device's clock


def tensors_of(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (2, BLOCKS, 16, 8, 64)
    return [
        torch.randint(0, 100, shape, generator=generator).to(dtype).cuda() for _ in range(4)
    ]


def page(tensors: list[torch.Tensor], block: int) -> bytes:
    parts = [t[kv, block].cpu() for t in tensors for kv in (0, 1)]
    return b"".join(part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts)


def read(cache: PagedCache, blocks: list[int], rows: int) -> list[bytes]:
    mover = StagedMover(cache, 2 * rows * cache.block_bytes)
    found = [
        b"".join(parts)
        for batch in mover.read([BlockId(b) for b in blocks], fence(cache))
        for parts in batch.parts
    ]
    mover.finish()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_gather(dtype: torch.dtype, rows: int) -> None:
    tensors = tensors_of(dtype)
    cache = paged_cache(tensors, BLOCKS)
    blocks = [5, 63, 0, 17, 5, 40, 41, 42]
    assert read(cache, blocks, rows) == [page(tensors, block) for block in blocks]


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_scatter(rows: int) -> None:
    tensors = tensors_of(torch.bfloat16)
    cache = paged_cache(tensors, BLOCKS)
    before = [page(tensors, block) for block in range(BLOCKS)]
    mover = StagedMover(cache, 2 * rows * cache.block_bytes)
    blocks = [9, 1, 33, 62, 8, 7, 6]
    for landing in mover.write([BlockId(b) for b in blocks], fence(cache)):
        for index, parts in enumerate(landing.parts, landing.start):
            for part in parts:
                part[:] = bytes([index + 1]) * len(part)
        landing.keep([i for i in range(len(landing.parts)) if landing.start + i != 2])
    mover.finish()
    kept = {block: index for index, block in enumerate(blocks) if index != 2}
    for block in range(BLOCKS):
        want = bytes([kept[block] + 1]) * cache.block_bytes if block in kept else before[block]
        assert page(tensors, block) == want


def test_fault_3_a_gather_waits_for_the_forward_pass() -> None:
    tensors = tensors_of(torch.float32)
    cache = paged_cache(tensors, BLOCKS)
    torch.cuda._sleep(CYCLES)
    for tensor in tensors:
        tensor.fill_(7.0)
    found = read(cache, [3, 4], 8)  # launched while the fill still waits
    want = torch.full((cache.block_bytes // 4,), 7.0).numpy().tobytes()
    assert found == [want, want]


def test_a_scatter_waits_for_what_was_launched_before() -> None:
    tensors = tensors_of(torch.float32)
    cache = paged_cache(tensors, BLOCKS)
    mover = StagedMover(cache, 16 * cache.block_bytes)
    torch.cuda._sleep(CYCLES)
    for tensor in tensors:
        tensor.fill_(7.0)
    for landing in mover.write([BlockId(3)], fence(cache)):
        for part in landing.parts[0]:
            part[:] = b"\1" * len(part)
        landing.keep([0])
    mover.finish()
    assert page(tensors, 3) == b"\1" * cache.block_bytes


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(memory="1gb") as running:
        yield running


@pytest.mark.parametrize("checksums", [True, False])
def test_a_worker_saves_and_loads_device_pages(server: Server, checksums: bool) -> None:
    tensors = tensors_of(torch.bfloat16)
    right = [page(tensors, block) for block in range(30)]
    clock, name = SystemClock(), node_id(server.url)
    config = parse_config(
        {"store": server.url, "checksums": checksums, "staging_bytes": 64 << 20}
    )
    worker = StoreWorker(config, 0, paged_cache(tensors, BLOCKS), clock, {name: server.url})

    def common(blocks: range) -> dict:
        return {
            "job": JobId(blocks.start), "request": RequestId("r"), "store": bytes(8),
            "hashes": tuple((i + 1).to_bytes(32, "big") for i in range(len(blocks))),
            "blocks": tuple(blocks), "placed": (Placed(name, len(blocks)),),
            "deadline_s": 20.0, "namespace": Namespace(bytes(16)),
        }  # fmt: skip

    def result() -> JobResult:
        return eventually(lambda: worker.poll().results, 30.0)[0]

    worker.submit(StepMeta(saves=(SaveMeta(**common(range(30))),)))
    assert set(result().outcomes) == {BlockOutcome.OK}
    worker.submit(StepMeta(loads=(LoadMeta(**common(range(34, 64))),)))
    assert set(result().outcomes) == {BlockOutcome.OK}
    assert [page(tensors, block) for block in range(34, 64)] == right
    assert worker.close(5.0)
