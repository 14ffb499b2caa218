"""The model: RMSNorm, RoPE, grouped-query attention, SwiGLU; weights drawn from a seed.

Tensor parallel ranks live in one process: each has its slice of the heads and of the MLP, and its
own KV cache; their partial sums are added.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engine_shim.config import EngineConfig, ModelConfig
from engine_shim.model.attention import (
    Attention,
    Batch,
    linear,
    rope_tables,
    rotate,
    write_cache,
)
from engine_shim.tokenizer import EOS, PRINTABLE

# With the usual small deviations a random model repeats one token, whatever it is asked. These
# make one early token of a long prompt change the answer, while rounding errors stay far below
# the distance between the two likeliest tokens. Found for a hidden size of 256.
INIT_STD = 0.15
INIT_HIDDEN = 256
QK_SCALE = 0.85
NORM_EPS = 1e-5


@dataclass(frozen=True)
class LayerShard:
    """One rank's part of one layer; weights are [out, in]."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Weights:
    """All weights. layers[layer][rank]. allowed: bool [vocab], what may be sampled at all."""

    embed: Tensor
    layers: tuple[tuple[LayerShard, ...], ...]
    head: Tensor
    allowed: Tensor


def make_weights(config: EngineConfig) -> Weights:
    """Draw the weights: on the CPU, in float32, in a fixed order, so that they depend on the
    model's config only."""
    model, device = config.model, torch.device(config.device)
    dtype = getattr(torch, model.dtype)
    source = torch.Generator().manual_seed(model.seed)

    deviation = INIT_STD * (INIT_HIDDEN / model.hidden_size) ** 0.5

    def draw(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        return torch.randn(rows, columns, generator=source) * (deviation * scale)

    def place(x: Tensor) -> Tensor:
        return x.to(dtype=dtype, device=device).contiguous()

    embed = place(draw(model.vocab_size, model.hidden_size))
    layers = []
    for _ in range(model.num_layers):
        full = _draw_layer(model, draw)
        shards = (_shard(full, model, rank, config.tp_size) for rank in range(config.tp_size))
        layers.append(tuple(LayerShard(*(place(x) for x in shard)) for shard in shards))
    allowed = torch.zeros(model.vocab_size, dtype=torch.bool)
    allowed[PRINTABLE.start : PRINTABLE.stop] = True
    head = draw(model.vocab_size, model.hidden_size)
    # A reply must re-tokenize to itself, or its blocks could never be hit by the next turn.
    head[~allowed] = 0.0
    allowed[EOS] = True
    return Weights(embed, tuple(layers), place(head), allowed.to(device))


def _draw_layer(model: ModelConfig, draw: object) -> dict[str, Tensor]:
    assert callable(draw)
    hidden, inner = model.hidden_size, model.intermediate_size
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    return {
        "q": draw(queries, hidden, QK_SCALE),
        "k": draw(keys, hidden, QK_SCALE),
        "v": draw(keys, hidden),
        "o": draw(hidden, queries),
        "gate": draw(inner, hidden),
        "up": draw(inner, hidden),
        "down": draw(hidden, inner),
    }


def _shard(
    full: dict[str, Tensor], model: ModelConfig, rank: int, size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rank's (qkv, out, gate_up, down)."""

    def rows(name: str) -> Tensor:
        return full[name].chunk(size, dim=0)[rank]

    def columns(name: str) -> Tensor:
        return full[name].chunk(size, dim=1)[rank]

    return (
        torch.cat((rows("q"), rows("k"), rows("v"))),
        columns("o"),
        torch.cat((rows("gate"), rows("up"))),
        columns("down"),
    )


def make_caches(config: EngineConfig) -> list[list[Tensor]]:
    """KV caches: [rank][layer], each zeros [blocks, block_size, 2, kv_heads / tp_size, dim]."""
    model = config.model
    shape = (
        config.num_blocks,
        config.block_size,
        2,
        model.num_kv_heads // config.tp_size,
        model.head_dim,
    )
    dtype, device = getattr(torch, model.dtype), torch.device(config.device)
    return [
        [torch.zeros(shape, dtype=dtype, device=device) for _ in range(model.num_layers)]
        for _ in range(config.tp_size)
    ]


class Transformer:
    """The forward pass. Used by one thread."""

    def __init__(self, config: EngineConfig, caches: list[list[Tensor]]) -> None:
        self._model = config.model
        self._size = config.tp_size
        self._caches = caches
        self._weights = make_weights(config)
        device = torch.device(config.device)
        model = config.model
        self._cos, self._sin = rope_tables(
            config.max_model_len, model.head_dim, model.rope_theta, device
        )
        kv_shape = (model.num_kv_heads // config.tp_size, model.head_dim)
        self.attention = Attention(
            config.max_model_len, config.block_size, kv_shape, self._weights.embed
        )

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, batch: Batch, rows: Tensor) -> Tensor:
        """Logits float32 [len(rows), vocab] of the given rows; tokens that can't be sampled have
        -inf. Writes the KV of all tokens into the caches.

        token_ids: int64 [tokens]; rows: int64.
        """
        weights = self._weights
        x = weights.embed[token_ids]
        angles = (self._cos[batch.positions], self._sin[batch.positions])
        for index in range(self._model.num_layers):
            x = x + self._attention(index, _norm(x), batch, angles)
            x = x + self._mlp(index, _norm(x))
        logits = linear(_norm(x[rows]), weights.head).float()
        return logits.masked_fill(~weights.allowed, float("-inf"))

    def _attention(
        self, index: int, x: Tensor, batch: Batch, angles: tuple[Tensor, Tensor]
    ) -> Tensor:
        model, total = self._model, None
        heads, kv_heads = model.num_heads // self._size, model.num_kv_heads // self._size
        for rank, shard in enumerate(self._weights.layers[index]):
            mixed = linear(x, shard.qkv).view(len(x), -1, model.head_dim)
            query, key, value = mixed.split((heads, kv_heads, kv_heads), dim=1)
            cache = self._caches[rank][index]
            write_cache(cache, batch, rotate(key, *angles), value)
            seen = self.attention.attend(cache, batch, rotate(query, *angles))
            part = linear(seen.reshape(len(x), -1), shard.out)
            total = part if total is None else total + part
        assert total is not None
        return total

    def _mlp(self, index: int, x: Tensor) -> Tensor:
        total = None
        for shard in self._weights.layers[index]:
            gate, up = linear(x, shard.gate_up).chunk(2, dim=-1)
            part = linear(functional.silu(gate) * up, shard.down)
            total = part if total is None else total + part
        assert total is not None
        return total


def _norm(x: Tensor) -> Tensor:
    return functional.rms_norm(x, (x.shape[-1],), eps=NORM_EPS)
