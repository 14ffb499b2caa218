"""Random traffic on the shim engine, with and without a connector that misbehaves in time.

PatternRunner asserts on every step that each block holds what it must; after every step the
books are checked; at the end every answer is right and nothing is held.
"""

from __future__ import annotations

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_shim.protocol import FinishReason
from tests.shim_kit import (
    Driver,
    Faults,
    ToyConnector,
    expected_tokens,
    pattern_engine,
    request,
    small_config,
)

SESSIONS = ("s0", "s1", "s2", None)


def run_traffic(seed: int, async_scheduling: bool, with_connector: bool, num_blocks: int) -> None:
    source = random.Random(seed)
    config = small_config(
        num_blocks=num_blocks,
        max_model_len=num_blocks * 4 if num_blocks < 32 else 128,
        max_num_batched_tokens=source.choice((5, 16, 64)),
        max_num_seqs=source.choice((2, 8)),
        tp_size=source.choice((1, 2)),
        async_scheduling=async_scheduling,
        enable_session_cache=True,
    )
    faults = Faults()
    connector = ToyConnector(config, faults) if with_connector else None
    driver = Driver(pattern_engine(config, connector))
    asked: dict[str, tuple[list[int], int]] = {}
    roots = [[source.randrange(32, 127) for _ in range(40)] for _ in range(3)]
    for number in range(60):
        act = source.random()
        if act < 0.35:
            most = config.max_model_len - 2
            prompt = source.choice(roots)[: source.randrange(1, min(40, most))]
            prompt = prompt + [source.randrange(32, 127) for _ in range(source.randrange(0, 12))]
            prompt = prompt[:most]
            count = source.randrange(1, 20)
            name = f"r{number}"
            asked[name] = (prompt, min(count, config.max_model_len - len(prompt)))
            driver.add(request(name, prompt, count, source.choice(SESSIONS)))
        elif act < 0.42 and asked:
            driver.core.abort([source.choice(sorted(asked))])
        elif act < 0.50:
            driver.core.close_session(f"s{source.randrange(3)}")
        elif act < 0.54:
            driver.core.reset_prefix_cache()
        elif act < 0.64:
            faults.load_steps, faults.save_steps = source.randrange(1, 6), source.randrange(1, 9)
            faults.ask_again = source.choice((0, 0, 3))
            faults.delay_free_steps = source.choice((0, 0, 4))
            if connector is not None and connector.listed:
                faults.lost = set(source.sample(sorted(connector.listed), 1))
        else:
            driver.step(source.randrange(1, 5))
    driver.run()
    for name, (prompt, count) in asked.items():
        outcome = driver.outcomes[name]
        assert outcome.last is not None, name
        tokens = expected_tokens(prompt, count)
        if outcome.last.finish_reason is FinishReason.ABORT:
            assert outcome.tokens == tokens[: len(outcome.tokens)]
        else:
            assert outcome.last.finish_reason is FinishReason.LENGTH
            assert outcome.tokens == tokens
    driver.assert_at_rest()


@settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(
    seed=st.integers(0, 1 << 30),
    async_scheduling=st.booleans(),
    with_connector=st.booleans(),
    num_blocks=st.sampled_from((16, 24, 64)),
)
def test_random_traffic(
    seed: int, async_scheduling: bool, with_connector: bool, num_blocks: int
) -> None:
    run_traffic(seed, async_scheduling, with_connector, num_blocks)
