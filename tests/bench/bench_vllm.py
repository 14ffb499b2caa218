"""Time to first token in real vLLM: store hit, own prefix cache, recompute; and what saving costs.

    .venv-vllm/bin/python -m tests.bench.bench_vllm [--rounds 5] [--tokens 1000,4000,7000]
        [--mooncake] [--json]

Sketch: the tiny model caches 8 KiB per token, so 7,000 tokens are 55 MiB: at 1 to 3 GB/s over
loopback 20 to 60 ms, against a recompute of a second and more. All cases of one length are measured
in turns, round by round, in an order that changes. `--mooncake` adds our connector and vLLM's own
MooncakeStoreConnector on the same real Mooncake (a master and two owners of a segment).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.bench.report import Row, show
from tests.servers import Server
from tests.vllm.dialogs import StoreView
from tests.vllm.scheduler_kit import prompt
from tests.vllm.servers import (
    MODEL_NAME,
    TOKENS_PER_BLOCK,
    Spec,
    VllmServer,
    running,
    transfer_config,
)
from tests.waiting import eventually

SETTLE_S = 60.0
DECODE_TOKENS = 256
# Made once (it takes tens of milliseconds); no connection is kept, since servers close idle ones.
HTTP = httpx.Client(timeout=120, limits=httpx.Limits(max_keepalive_connections=0))


class Asked(float):
    """Seconds to the first token. step_s: mean time from one token to the next."""

    cached: int = 0
    step_s: float = 0.0


def ask(server: VllmServer, tokens: list[int], session: str, max_tokens: int = 1) -> Asked:
    """One streamed completion."""
    body = {
        "model": MODEL_NAME,
        "prompt": tokens,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    times: list[float] = []
    cached, began = 0, time.perf_counter()
    headers = {"X-Session-ID": session}
    with HTTP.stream("POST", server.url + "/v1/completions", json=body, headers=headers) as reply:
        reply.raise_for_status()
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            part = json.loads(line[6:])
            if part["choices"]:
                times.append(time.perf_counter())
            elif part.get("usage"):
                details = part["usage"].get("prompt_tokens_details") or {}
                cached = details.get("cached_tokens") or 0
    found = Asked(times[0] - began)
    found.cached = cached
    if len(times) > 1:
        found.step_s = (times[-1] - times[0]) / (len(times) - 1)
    return found


@dataclass
class Rig:
    """The servers; store_of: where a server's saves can be seen."""

    servers: dict[str, VllmServer]
    store_of: dict[str, StoreView] = field(default_factory=dict)

    def empty(self, name: str) -> None:
        server = self.servers[name]
        eventually(server.reset_local_cache, SETTLE_S, f"{name} holds nothing", 0.02)


@contextlib.contextmanager
def rig(mooncake: bool) -> Iterator[Rig]:
    """plain: no connector. redis: ours. With Mooncake: ours on it (`mooncake`), and `builtin`."""
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(Server(memory="4gb", tcp=True))
        specs = [Spec("plain"), Spec("redis", transfer_config(redis.tcp_url))]
        views = {"redis": StoreView(redis.tcp_url)}
        if mooncake:
            from tests.mooncake.cluster import MooncakeCluster

            cluster = stack.enter_context(MooncakeCluster((2 << 30, 2 << 30)))
            index = stack.enter_context(Server(tcp=True))
            store = {"index": index.tcp_url, "data": cluster.url}
            specs += [Spec("mooncake", transfer_config(store)), builtin(cluster)]
            views["mooncake"] = StoreView(index.tcp_url)
        servers = stack.enter_context(running(*specs))
        yield Rig({server.spec.name: server for server in servers}, views)


def builtin(cluster) -> Spec:  # type: ignore[no-untyped-def]
    """vLLM's own connector on the same master and the same owners."""
    path = Path(cluster.folder) / "builtin.json"
    path.write_text(
        json.dumps(
            {
                "metadata_server": cluster.metadata,
                "master_server_address": f"127.0.0.1:{cluster.port}",
                "protocol": "tcp",
                "device_name": "",
                "mode": "standalone-store",
                "global_segment_size": 0,
                "local_buffer_size": "512MB",
            }
        )
    )
    env = {"MOONCAKE_CONFIG_PATH": str(path), "MOONCAKE_REQUESTER_LOCAL_HOSTNAME": "127.0.0.1"}
    transfer = {
        "kv_connector": "MooncakeStoreConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"load_async": True},
    }
    return Spec("builtin", transfer, env=env)


def fill(found: Rig, name: str, prompts: list[list[int]]) -> int:
    """Store every prompt. Returns the tokens that can be hit: all whole blocks but for a connector
    that stores less."""
    for number, tokens in enumerate(prompts):
        ask(found.servers[name], tokens, f"{name}-{len(tokens)}-{number}")
    whole = whole_blocks(len(prompts[0]))
    best = whole
    for number, tokens in enumerate(prompts):
        session, seen = f"{name}-{len(tokens)}-{number}", [0]

        def settled(tokens: list[int] = tokens, session: str = session, seen=seen) -> bool:  # type: ignore[no-untyped-def]
            found.empty(name)
            seen.append(ask(found.servers[name], tokens, session).cached)
            return seen[-1] == whole or (len(seen) > 8 and 0 < seen[-1] == seen[-4])

        eventually(settled, SETTLE_S, f"{name} to hit {len(tokens)} tokens", 0.2)
        best = min(best, seen[-1])
    return best


def whole_blocks(tokens: int) -> int:
    """Tokens of a prompt that can come from a cache."""
    return (tokens - 1) // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK


def first_tokens(found: Rig, tokens: int, rounds: int, chance: random.Random) -> list[Row]:
    """All cases of one prompt length, in turns."""
    prompts = [prompt(tokens * 100 + i, tokens) for i in range(2)]
    want = {"recompute": 0, "own prefix cache": whole_blocks(tokens)}
    want |= {name: fill(found, name, prompts) for name in found.servers if name != "plain"}
    times: dict[str, list[float]] = defaultdict(list)
    cases = list(want)
    for number in range(rounds):
        for case in chance.sample(cases, len(cases)):
            name = case if case in found.servers else "plain"
            session = f"{name}-{tokens}-{number % 2}"
            found.empty(name)
            if case == "own prefix cache":
                ask(found.servers[name], prompts[number % 2], session)
            seconds = ask(found.servers[name], prompts[number % 2], session)
            if seconds.cached == want[case]:
                times[case].append(float(seconds) * 1e3)
    return [
        Row(
            f"first token, {tokens} tokens",
            case,
            "ms",
            times[case] or [float("nan")],
            f"{want[case]} tokens cached in {len(times[case])} of {rounds} rounds",
        )
        for case in cases
    ]


def decode_steps(found: Rig, rounds: int) -> list[Row]:
    """Mean time from one token to the next, without and with a connector that saves."""
    gaps: dict[str, list[float]] = defaultdict(list)
    for number in range(rounds):
        for name in ("plain", "redis"):
            tokens = prompt(5_000_000 + number, 512)
            asked = ask(found.servers[name], tokens, f"steps-{number}", DECODE_TOKENS)
            gaps[name].append(asked.step_s * 1e3)
    return [Row("decode step, 1 request", name, "ms", gaps[name]) for name in gaps]


def commit_lag(found: Rig, rounds: int) -> Row:
    """From a reply's end until its last whole block can be found by another engine."""
    lags = []
    for number in range(rounds):
        session, view = f"lag-{number}", found.store_of["redis"]
        tokens = prompt(6_000_000 + number, 20 * TOKENS_PER_BLOCK - 8)
        ask(found.servers["redis"], tokens, session, 9)
        began = time.perf_counter()
        eventually(lambda s=session, v=view: v.blocks(s) >= 20, 20, "the commit", 0.0005)  # type: ignore[misc]
        lags.append((time.perf_counter() - began) * 1e3)
    return Row("reply's end to commit", "redis", "ms", lags)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", default="1000,4000,7000")
    parser.add_argument("--mooncake", action="store_true", help="compare on a real Mooncake too")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    chance, rows = random.Random(0), []
    with rig(options.mooncake) as found:
        for tokens in map(int, options.tokens.split(",")):
            rows += first_tokens(found, tokens, options.rounds, chance)
        rows += decode_steps(found, options.rounds)
        rows.append(commit_lag(found, options.rounds))
    show(rows, options.json)


if __name__ == "__main__":
    main()
