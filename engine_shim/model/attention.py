"""Rotary embedding, the paged KV cache of one layer, and attention over it.

A row's result depends on its position and on what is before it, and not on how a prompt was cut
into steps or on who else is in the batch: rows are worked on in tiles at fixed positions, over a
context that always ends at a tile's end, never fewer than `ROWS_MIN` at a time (matrix products of
one row take another path, with another order of summation). So a prefix that was loaded, found in
the cache or computed in pieces gives the same bits, as far as the math library plays along: on
CPUs with MKL and one thread it does, and a test says so.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

TILE = 256
ROWS_MIN = 4


@dataclass(frozen=True)
class Tile:
    """Rows of one request that lie in one tile of positions.

    rows: in the batch. context: keys looked at, a multiple of TILE. mask: float32 [rows + padding,
    context], -inf where a row may not look; its padding brings the rows to a multiple of ROWS_MIN.
    """

    rows: slice
    context: int
    mask: Tensor


@dataclass(frozen=True)
class Span:
    """One request's part of a forward pass.

    table: int64 [blocks], the cache blocks of positions 0 to length - 1. length: the last row's
    position + 1.
    """

    length: int
    table: Tensor
    tiles: tuple[Tile, ...]


@dataclass(frozen=True)
class Batch:
    """A forward pass: positions, block_index, offset are int64 [tokens], in order of rows."""

    spans: tuple[Span, ...]
    positions: Tensor
    block_index: Tensor
    offset: Tensor


class Attention:
    """Masks and scratch memory of one engine. Used by one thread."""

    def __init__(
        self, length_max: int, block_size: int, kv_shape: tuple[int, int], like: Tensor
    ) -> None:
        """kv_shape: (KV heads of a rank, head size). like: gives dtype and device."""
        self._block_size = block_size
        tiles = -(-length_max // TILE)
        blocks = -(-tiles * TILE // block_size)
        self._scratch = like.new_zeros((blocks, block_size, 2, *kv_shape))
        # The mask of the last tile; the one of tile i is its last (i + 1) * TILE columns. Rows
        # that only pad may look at everything.
        future = torch.arange(TILE)[None, :] > torch.arange(TILE + ROWS_MIN)[:, None]
        mask = torch.zeros((TILE + ROWS_MIN, tiles * TILE))
        mask[:, -TILE:].masked_fill_(future, float("-inf"))
        self._mask = mask.to(like)

    def batch(self, parts: list[tuple[int, int, tuple[int, ...]]]) -> Batch:
        """parts: (start, count, block table) of each request, in order of rows."""
        device = self._mask.device
        spans, positions, blocks, row = [], [], [], 0
        for start, count, table in parts:
            end = start + count
            ids = torch.tensor(table[: -(-end // self._block_size)], dtype=torch.int64)
            where = torch.arange(start, end)
            positions.append(where)
            blocks.append(ids[where // self._block_size])
            spans.append(Span(end, ids.to(device), self._tiles(start, end, row)))
            row += count
        position = torch.cat(positions)
        return Batch(
            tuple(spans),
            position.to(device),
            torch.cat(blocks).to(device),
            (position % self._block_size).to(device),
        )

    def _tiles(self, start: int, end: int, row: int) -> tuple[Tile, ...]:
        tiles = []
        for first in range(start - start % TILE, end, TILE):
            low, high = max(start, first), min(end, first + TILE)
            padded = -(-(high - low) // ROWS_MIN) * ROWS_MIN
            context = first + TILE
            mask = self._mask[low - first : low - first + padded, -context:]
            tiles.append(Tile(slice(row + low - start, row + high - start), context, mask))
        return tuple(tiles)

    def attend(self, cache: Tensor, batch: Batch, query: Tensor) -> Tensor:
        """query: [tokens, heads, dim], of positions whose KV is in `cache` already; same shape.

        cache: [blocks, block_size, 2, KV heads, dim].
        """
        out = torch.empty_like(query)
        for span in batch.spans:
            held = self._gather(cache, span)
            for tile in span.tiles:
                out[tile.rows] = _attend_tile(held, tile, query[tile.rows])
        return out

    def _gather(self, cache: Tensor, span: Span) -> Tensor:
        """The request's keys and values in order: [context, 2, KV heads, dim]."""
        torch.index_select(cache, 0, span.table, out=self._scratch[: len(span.table)])
        held = self._scratch.flatten(0, 1)
        context = span.tiles[-1].context
        # What lies behind the last row may be anything, even NaN, which no mask would hide.
        held[span.length : context].zero_()
        return held[:context]


def _attend_tile(held: Tensor, tile: Tile, query: Tensor) -> Tensor:
    count = len(query)
    padding = len(tile.mask) - count
    if padding:
        query = torch.cat((query, query[-1:].expand(padding, -1, -1)))
    seen = held[: tile.context].transpose(0, 2)
    mixed = functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        seen[None, :, 0],
        seen[None, :, 1],
        attn_mask=tile.mask,
        enable_gqa=query.shape[1] > seen.shape[0],
    )
    return mixed[0].transpose(0, 1)[:count]


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x: [rows, in]; weight: [out, in]. A row's result does not depend on the number of rows."""
    rows = len(x)
    if rows >= ROWS_MIN:
        return functional.linear(x, weight)
    padded = torch.cat((x, x.new_zeros((ROWS_MIN - rows, x.shape[1]))))
    return functional.linear(padded, weight)[:rows]


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
