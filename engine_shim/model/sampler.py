"""Choosing tokens from logits. Pure functions of (logits, parameters, seed, position)."""

from __future__ import annotations

import torch
from torch import Tensor

from engine_shim.protocol import SamplingParams, TokenLogprobs
from engine_shim.scheduler_output import Sampled, Work
from engine_shim.tokenizer import EOS

_SEED_MASK = (1 << 63) - 1
_POSITION_STEP = 0x9E3779B97F4A7C15


def sample(logits: Tensor, work: list[Work]) -> list[Sampled]:
    """logits: float32 [len(work), vocab], on any device; row i is for work[i]."""
    if all(_plain_greedy(part) for part in work):
        return [Sampled(token) for token in logits.argmax(dim=-1).tolist()]
    on_cpu = logits.cpu()
    return [_sample_one(on_cpu[row], part) for row, part in enumerate(work)]


def _plain_greedy(part: Work) -> bool:
    params = part.params
    return params.temperature == 0.0 and params.logprobs is None and not part.suppress_stop


def _sample_one(logits: Tensor, part: Work) -> Sampled:
    params = part.params
    raw = logits
    if part.suppress_stop:
        logits = logits.clone()
        logits[[EOS, *(params.stop_token_ids or ())]] = float("-inf")
    if params.temperature == 0.0:
        token = int(logits.argmax())
    else:
        token = _draw(logits / params.temperature, params, part.seed, part.start + part.count)
    if params.logprobs is None:
        return Sampled(token)
    return Sampled(token, _logprobs(raw, token, params.logprobs))


def _draw(logits: Tensor, params: SamplingParams, seed: int, position: int) -> int:
    """One draw. It depends on seed and position alone, so a token that is computed again after
    a preemption or a failed load is the same one."""
    logits = _top_k_top_p(logits, params)
    source = torch.Generator().manual_seed((seed + position * _POSITION_STEP) & _SEED_MASK)
    noise = torch.empty_like(logits).exponential_(generator=source)
    return int((torch.softmax(logits, dim=-1) / noise).argmax())


def _top_k_top_p(logits: Tensor, params: SamplingParams) -> Tensor:
    if params.top_k > 0:
        least = logits.topk(min(params.top_k, logits.shape[-1])).values[-1]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if params.top_p < 1.0:
        ordered, order = logits.sort(descending=True)
        weight = torch.softmax(ordered, dim=-1)
        # The likeliest token always stays: what lies before it weighs nothing.
        cut = weight.cumsum(dim=-1) - weight >= params.top_p
        logits = logits.clone()
        logits[order[cut]] = float("-inf")
    return logits


def _logprobs(logits: Tensor, token: int, count: int) -> TokenLogprobs:
    """Of the model's own distribution, before temperature and cuts."""
    values = torch.log_softmax(logits, dim=-1)
    own = float(values[token])
    rank = int((values > own).sum())
    best = values.topk(min(count, len(values))) if count else None
    top = []
    if best is not None:
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        top = [(index, value) for index, value in pairs if value > float("-inf")]
    return TokenLogprobs(token, own, rank, top)
