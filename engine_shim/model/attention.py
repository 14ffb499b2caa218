"""Rotary embedding, the paged KV cache of one layer, and attention over it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Span:
    """One request's part of a forward pass.

    rows: its rows in the batch, one per token. start: position of the first of them.
    table: int64 [blocks], the cache blocks that cover positions 0 to start + len(rows) - 1.
    mask: bool [rows, context], True where a row may look; None where no mask is needed (a single
    row) or where it is plainly causal (start == 0).
    """

    rows: slice
    start: int
    table: Tensor
    mask: Tensor | None

    @property
    def count(self) -> int:
        """Tokens computed."""
        return self.rows.stop - self.rows.start

    @property
    def context(self) -> int:
        """Tokens looked at by the last row."""
        return self.start + self.count


@dataclass(frozen=True)
class Batch:
    """A forward pass: positions, block_index, offset are int64 [tokens], in order of rows."""

    spans: tuple[Span, ...]
    positions: Tensor
    block_index: Tensor
    offset: Tensor


def make_batch(
    parts: list[tuple[int, int, tuple[int, ...]]], block_size: int, device: torch.device
) -> Batch:
    """parts: (start, count, block table) of each request, in order of rows."""
    spans, positions, blocks, row = [], [], [], 0
    for start, count, table in parts:
        end = start + count
        ids = torch.tensor(table[: -(-end // block_size)], dtype=torch.int64)
        where = torch.arange(start, end)
        positions.append(where)
        blocks.append(ids[where // block_size])
        mask = None
        if count > 1 and start > 0:
            mask = torch.arange(end)[None, :] <= where[:, None]
            mask = mask.to(device)
        spans.append(Span(slice(row, row + count), start, ids.to(device), mask))
        row += count
    position = torch.cat(positions)
    return Batch(
        tuple(spans),
        position.to(device),
        torch.cat(blocks).to(device),
        (position % block_size).to(device),
    )


def rope_tables(
    length: int, head_dim: int, theta: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [length, head_dim / 2]."""
    rates = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * rates[None, :]
    return angles.cos().float().to(device), angles.sin().float().to(device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [tokens, heads, head_dim]; cos, sin: [tokens, head_dim / 2]. Halves are paired."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


def write_cache(cache: Tensor, batch: Batch, key: Tensor, value: Tensor) -> None:
    """cache: [blocks, block_size, 2, heads, dim]; key, value: [tokens, heads, dim]."""
    cache[batch.block_index, batch.offset] = torch.stack((key, value), dim=1)


def attend(cache: Tensor, batch: Batch, query: Tensor) -> Tensor:
    """query: [tokens, q heads, dim], of positions whose KV is in `cache` already; same shape."""
    out = torch.empty_like(query)
    for span in batch.spans:
        out[span.rows] = _attend_span(cache, span, query[span.rows])
    return out


def _attend_span(cache: Tensor, span: Span, query: Tensor) -> Tensor:
    # [context, 2, kv heads, dim]: one copy of the blocks, K and V are strided views of it.
    held = cache.index_select(0, span.table).flatten(0, 1)[: span.context]
    key, value = held[:, 0].transpose(0, 1), held[:, 1].transpose(0, 1)
    count, heads, dim = query.shape
    groups = heads // key.shape[0]
    if count == 1:
        # All query heads of one KV head see the same keys: rows of one attention.
        rows = query.view(key.shape[0], groups, dim)
        return functional.scaled_dot_product_attention(
            rows[None], key[None], value[None]
        )[0].reshape(1, heads, dim)
    mixed = functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key[None],
        value[None],
        attn_mask=span.mask,
        is_causal=span.mask is None,
        enable_gqa=groups > 1,
    )
    return mixed[0].transpose(0, 1)
