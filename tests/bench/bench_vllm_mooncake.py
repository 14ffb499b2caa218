"""Our connector and vLLM's own MooncakeStoreConnector in real vLLM, on the same real Mooncake.

    .venv-vllm/bin/python -m tests.bench.bench_vllm_mooncake [--rounds 9]
        [--tokens 1000,4000,7000] [--json]

A prompt is sent again after the engine's own cache was emptied, to one server and the other in
turns, the order changing each round: time to first token, what the lookup costs the scheduler,
tokens that were loaded. A server without a connector computes the same prompt.

Sketch: 7,000 tokens are 55 MiB in 218 objects of 256 KiB; the library moves 0.8 to 2 GB/s of them,
so 30 to 70 ms, and one token's forward pass over 7,000 tokens. A lookup asks an index (one or two
round trips of 0.1 ms) and Mooncake for 218 keys (0.3 ms), off the scheduler's thread; the built-in
one asks for the same keys while the scheduler waits.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.bench.bench_vllm import Rig, ask, builtin, fill
from tests.bench.report import Row, show
from tests.mooncake.cluster import MooncakeCluster
from tests.servers import Server
from tests.vllm.scheduler_kit import prompt
from tests.vllm.servers import LOGGING, TOKENS_PER_BLOCK, Spec, running, transfer_config

SEGMENT_BYTES = 2 << 30
PROMPTS = 2
OURS, BUILTIN = "ours", "built-in"
LOOKUPS = "SKV_BENCH_LOOKUPS"
HITS = "vllm:external_prefix_cache_hits_total"


@dataclass
class Measured:
    """Of one prompt length, by case."""

    first_ms: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    spent_ms: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    waited_ms: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    loaded: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


@contextlib.contextmanager
def rig(lookups: dict[str, Path]) -> Iterator[Rig]:
    """A Mooncake, an index, and three servers. lookups: gets each connector's file."""
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(MooncakeCluster((SEGMENT_BYTES, SEGMENT_BYTES)))
        index = stack.enter_context(Server(tcp=True))
        lookups.update({name: cluster.folder / f"lookups-{name}" for name in (OURS, BUILTIN)})
        # The tests' debug log is work that only our connector would have.
        quiet = cluster.folder / "logging.json"
        quiet.write_text(json.dumps({**LOGGING, "loggers": {"vllm": {"level": "WARNING"}}}))
        env = {"VLLM_LOGGING_CONFIG_PATH": str(quiet)}
        store = {"index": index.tcp_url, "data": cluster.url}
        ours = Spec(OURS, transfer_config(store))
        specs = [
            Spec("plain", env=env),
            timed(ours, OURS, "TimedSessionKV", {**env, LOOKUPS: str(lookups[OURS])}),
            timed(
                builtin(cluster), BUILTIN, "TimedMooncakeStore",
                {**env, LOOKUPS: str(lookups[BUILTIN])},
            ),
        ]  # fmt: skip
        servers = stack.enter_context(running(*specs))
        yield Rig({server.spec.name: server for server in servers})


def timed(spec: Spec, name: str, connector: str, env: dict[str, str]) -> Spec:
    """The same server, its lookups timed."""
    transfer = {
        **(spec.transfer or {}),
        "kv_connector": connector,
        "kv_connector_module_path": "tests.bench.timed_connectors",
    }
    return replace(spec, name=name, transfer=transfer, env={**spec.env, **env})


def measure(found: Rig, lookups: dict[str, Path], tokens: int, rounds: int) -> list[Row]:
    """All cases of one prompt length, in turns."""
    prompts = [prompt(tokens * 100 + i, tokens) for i in range(PROMPTS)]
    for name in (OURS, BUILTIN):
        fill(found, name, prompts)
    seen = Measured()
    for number in range(rounds):
        order = ["plain", OURS, BUILTIN] if number % 2 else [BUILTIN, OURS, "plain"]
        for name in order:
            one(found, lookups.get(name), name, prompts[number % PROMPTS], number, seen)
    what = f"{tokens} tokens"
    names = (OURS, BUILTIN)
    whole = (tokens - 1) // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK
    note = f"{whole} in whole blocks"
    return [
        *(Row(f"first token, {what}", n, "ms", seen.first_ms[n]) for n in ("plain", *names)),
        *(Row(f"lookup, scheduler busy, {what}", n, "ms", seen.spent_ms[n]) for n in names),
        *(Row(f"lookup, to the answer, {what}", n, "ms", seen.waited_ms[n]) for n in names),
        *(Row(f"loaded of {what}", n, "tokens", seen.loaded[n], note) for n in names),
    ]


def one(
    found: Rig, lookups: Path | None, name: str, tokens: list[int], number: int, seen: Measured
) -> None:
    """One prompt, sent again to a server that has nothing of it."""
    found.empty(name)
    server = found.servers[name]
    before = server.metrics().get(HITS, 0.0)
    seconds = ask(server, tokens, f"{name}-{len(tokens)}-{number % PROMPTS}")
    seen.first_ms[name].append(float(seconds) * 1e3)
    if lookups is not None:
        last = json.loads(lookups.read_text().splitlines()[-1])
        seen.spent_ms[name].append(last["spent_s"] * 1e3)
        seen.waited_ms[name].append(last["waited_s"] * 1e3)
        seen.loaded[name].append(server.metrics().get(HITS, 0.0) - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", default="1000,4000,7000")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows, lookups = [], dict[str, Path]()
    with rig(lookups) as found:
        for tokens in map(int, options.tokens.split(",")):
            rows += measure(found, lookups, tokens, options.rounds)
        show(rows, options.json)


if __name__ == "__main__":
    main()
