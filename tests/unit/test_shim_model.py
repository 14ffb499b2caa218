"""The model: the answer depends on all of the context, and on nothing but the context."""

from __future__ import annotations

import random

import pytest
import torch

from engine_shim.api import RequestOptions
from engine_shim.config import EngineConfig, ModelConfig
from engine_shim.llm import LLM
from engine_shim.model.runner import ModelRunner
from engine_shim.protocol import FinishReason, SamplingParams
from engine_shim.scheduler_output import Work
from engine_shim.tokenizer import decode, encode

GREEDY = SamplingParams(temperature=0.0, max_tokens=32)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(32, 127) for _ in range(length)]


def engine(**changes: object) -> LLM:
    base: dict[str, object] = {"num_blocks": 256, "max_model_len": 2048}
    return LLM(EngineConfig(**{**base, **changes}))  # type: ignore[arg-type]


def tokens_of(llm: LLM, prompt: list[int], params: SamplingParams = GREEDY) -> tuple[int, ...]:
    return llm.generate([prompt], params)[0][0].token_ids


def changed(prompt: list[int], at: int) -> list[int]:
    other = list(prompt)
    other[at] = 32 + (other[at] - 31) % 95
    return other


@pytest.fixture(scope="module")
def plain() -> LLM:
    return engine()


@pytest.mark.parametrize(("length", "at"), [(60, 0), (60, 30), (500, 3), (500, 250), (1500, 5)])
def test_one_early_token_changes_the_answer(plain: LLM, length: int, at: int) -> None:
    prompt = prompt_of(length)
    first, second = tokens_of(plain, prompt), tokens_of(plain, changed(prompt, at))
    # Not by luck with one near tie: the answers go different ways.
    assert sum(a != b for a, b in zip(first, second, strict=True)) >= 8


def test_answers_are_lively_and_printable(plain: LLM) -> None:
    answer = tokens_of(plain, prompt_of(100))
    assert len(set(answer)) > 10
    assert all(32 <= token < 127 for token in answer)
    assert encode(decode(answer)) == list(answer)


LENGTH = 700


def logits(runner: ModelRunner, prompt: list[int], cuts: list[int], name: str) -> torch.Tensor:
    """Logits after `prompt`, computed in pieces that end at `cuts`; blocks in scattered order."""
    size = 16
    blocks = torch.randperm(200, generator=torch.Generator().manual_seed(len(cuts))).tolist()
    table = tuple(blocks[: -(-len(prompt) // size)])
    found = []
    model = runner.model
    start = 0
    for end in [*cuts, len(prompt)]:
        batch = model.attention.batch([(start, end - start, table)])
        rows = torch.tensor([end - start - 1])
        found = model.forward(torch.tensor(prompt[start:end]), batch, rows)
        start = end
    return found  # type: ignore[return-value]


@pytest.mark.parametrize(
    "cuts",
    [[512], [16], [1], [256, 512], [699], [100, 101, 102, 103], list(range(660, 700)), [255, 257]],
    ids=["512", "16", "1", "tiles", "last", "single steps", "decode", "around a tile"],
)
def test_bits_do_not_depend_on_the_pieces(cuts: list[int]) -> None:
    """Holds on CPUs with MKL and one thread; elsewhere rounding may differ, hence the fallback."""
    torch.set_num_threads(1)
    runner = ModelRunner(EngineConfig(num_blocks=200, max_model_len=2048))
    prompt = prompt_of(LENGTH)
    whole, pieces = logits(runner, prompt, [], "a"), logits(runner, prompt, cuts, "b")
    if torch.backends.mkl.is_available():
        assert torch.equal(whole, pieces)
    else:
        allowed = torch.isfinite(whole)
        assert torch.allclose(whole[allowed], pieces[allowed], atol=1e-3)


def test_answer_does_not_depend_on_company_cache_or_mode(plain: LLM) -> None:
    prompts = [prompt_of(20 + 37 * i, i) for i in range(6)]
    alone = [tokens_of(plain, prompt) for prompt in prompts]
    for llm in (
        plain,  # everything cached now
        engine(max_num_batched_tokens=64),
        engine(max_num_batched_tokens=100, async_scheduling=True),
        engine(num_blocks=128, max_model_len=1024),
        engine(enable_prefix_caching=False),
    ):
        together = llm.generate(prompts, GREEDY)
        assert [found[0].token_ids for found in together] == alone


def test_ranks_split_the_same_model(plain: LLM) -> None:
    runner = ModelRunner(EngineConfig(num_blocks=200, max_model_len=2048))
    split = ModelRunner(EngineConfig(num_blocks=200, max_model_len=2048, tp_size=4))
    prompt = prompt_of(100)
    one, four = logits(runner, prompt, [], "a"), logits(split, prompt, [], "a")
    allowed = torch.isfinite(one)
    assert torch.allclose(one[allowed], four[allowed], atol=1e-3)
    assert not torch.equal(one, four)  # or nothing was split
    # Each rank's cache has its heads of the one model's cache.
    whole = runner.caches[0][2]
    parts = torch.cat([split.caches[rank][2] for rank in range(4)], dim=3)
    assert whole.shape == parts.shape and torch.allclose(whole, parts, atol=1e-3)


def test_caches_are_as_the_connector_is_told() -> None:
    config = EngineConfig(num_blocks=64, max_model_len=512, tp_size=2, block_size=8)
    runner = ModelRunner(config)
    assert len(runner.caches) == 2 and len(runner.caches[0]) == config.model.num_layers
    for layer in runner.caches[1]:
        assert layer.shape == (64, 8, 2, 2, 64) and layer.is_contiguous()


def test_garbage_behind_the_context_does_no_harm() -> None:
    runner = ModelRunner(EngineConfig(num_blocks=64, max_model_len=512))
    work = Work("a", 0, 5, (3,), True, GREEDY, 0, False, (70, 71, 72, 73, 74))
    clean = runner.execute([work])
    for layer in runner.caches[0]:
        layer[3, 5:] = float("nan")
        layer[4:] = float("nan")
    assert runner.execute([work]) == clean


def test_another_seed_is_another_model(plain: LLM) -> None:
    other = engine(model=ModelConfig(seed=1))
    assert tokens_of(other, prompt_of(50)) != tokens_of(plain, prompt_of(50))
    assert ModelConfig(seed=1).name != ModelConfig().name


class TestSampling:
    """Temperature, cuts, seeds, logprobs."""

    def test_seed_decides(self, plain: LLM) -> None:
        params = SamplingParams(temperature=1.0, seed=5, max_tokens=20)
        first = tokens_of(plain, prompt_of(30), params)
        assert tokens_of(plain, prompt_of(30), params) == first
        params.seed = 6
        assert tokens_of(plain, prompt_of(30), params) != first

    def test_without_a_seed_requests_differ(self, plain: LLM) -> None:
        params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
        assert tokens_of(plain, prompt_of(30), params) != tokens_of(plain, prompt_of(30), params)

    def test_children_differ_and_share_the_prefix(self, plain: LLM) -> None:
        params = SamplingParams(temperature=1.0, n=3, seed=1, max_tokens=12)
        children = plain.generate([prompt_of(40, 8)], params)[0]
        assert len({child.token_ids for child in children}) == 3

    def test_narrow_cuts_are_greedy(self, plain: LLM) -> None:
        greedy = tokens_of(plain, prompt_of(30))
        for params in (
            SamplingParams(temperature=1.0, top_k=1, seed=3, max_tokens=32),
            SamplingParams(temperature=1.0, top_p=1e-6, seed=3, max_tokens=32),
            SamplingParams(temperature=1e-3, seed=3, max_tokens=32),
        ):
            assert tokens_of(plain, prompt_of(30), params) == greedy

    def test_preemption_does_not_change_a_sample(self) -> None:
        params = SamplingParams(temperature=1.0, seed=9, max_tokens=60, ignore_eos=True)
        prompts = [prompt_of(30, i) for i in range(6)]
        roomy = engine().generate(prompts, params)
        tight = engine(num_blocks=20, max_model_len=256)
        cramped = tight.generate(prompts, params)
        assert tight.core.stats()["preemptions"] > 0  # type: ignore[operator]
        assert [c[0].token_ids for c in cramped] == [r[0].token_ids for r in roomy]

    def test_logprobs(self, plain: LLM) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=3)
        found = plain.generate([prompt_of(30)], params)[0][0]
        assert len(found.logprobs) == 4
        for token, entry in zip(found.token_ids, found.logprobs, strict=True):
            assert entry.token_id == token and entry.rank == 0
            assert entry.top[0] == (token, entry.logprob)
            assert len(entry.top) == 3 and entry.top[0][1] >= entry.top[1][1] >= entry.top[2][1]
            assert entry.logprob < 0

    def test_eos_ends_a_sampled_answer(self, plain: LLM) -> None:
        params = SamplingParams(temperature=10.0, seed=0, max_tokens=1000)
        found = plain.generate([prompt_of(30)], params)[0][0]
        assert found.finish_reason is FinishReason.STOP
        params = SamplingParams(temperature=10.0, seed=0, max_tokens=300, min_tokens=300)
        assert len(plain.generate([prompt_of(30)], params)[0][0].token_ids) == 300


def test_llm_in_process(plain: LLM) -> None:
    text = plain.generate(["What a day"], GREEDY)[0][0].text
    stop = text[4:7]
    params = SamplingParams(temperature=0.0, max_tokens=32, stop=[stop, "never"])
    found = plain.generate(["What a day"], params, RequestOptions(request_id="mine"))[0][0]
    assert found.request_id == "mine"
    assert found.text == text[: text.index(stop)]
    assert (found.finish_reason, found.stop_reason) == (FinishReason.STOP, stop)
    assert plain.drain()


def test_llm_streaming_input(plain: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3)
    name = plain.add_request("Hello there", params, resumable=True)
    plain.add_input(name, " and again")
    plain.add_input(name, None)
    deltas = []
    while plain.has_work:
        deltas += [delta for request_id, delta in plain.step() if request_id == name]
    assert [d.awaiting_input for d in deltas if d.finish_reason is not None] == [True, False]
    assert len([t for d in deltas for t in d.token_ids]) == 6
