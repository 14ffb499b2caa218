"""SET and GET of cache blocks: our bulk path against redis-py, in turns in one run.

    python -m tests.bench.bench_bulk [--rounds 5] [--mib 64] [--unix]

Sketch: the bytes of a value are copied into the kernel and out of it, and once more in the server;
at S GB/s of the loopback stream a transfer can't beat S. redis-py adds copies in the client:
joining the request, and for a reply one per read of 32 KiB and one into the final bytes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import redis

from connector.clock import SystemClock
from connector.config import parse_config
from connector.meta import BlockOutcome
from store_worker.backends.base import GetItem, PutItem
from store_worker.backends.factory import open_node
from store_worker.codec import checksum
from tests.servers import Server

# (name, bytes of a value, bytes of a region)
CASES = (
    ("64 KiB", 64 << 10, 64 << 10),
    ("256 KiB", 256 << 10, 256 << 10),
    ("1 MiB", 1 << 20, 1 << 20),
    ("1 MiB in 32 KiB regions", 1 << 20, 32 << 10),
    ("2 MiB", 2 << 20, 2 << 20),
)


def regions(memory: memoryview, value: int, region: int, count: int) -> list[list[memoryview]]:
    return [
        [memory[at : at + region] for at in range(start, start + value, region)]
        for start in range(0, count * value, value)
    ]


class Case:
    """One size: the four operations, each moving `count` values."""

    def __init__(self, url: str, value: int, region: int, total: int) -> None:
        config, self.clock = parse_config({"store": url}), SystemClock()
        self.node = open_node(url, config, self.clock)
        self.plain = redis.Redis.from_url(url)
        self.count = max(4, total // value)
        self.bytes = self.count * value
        source = bytearray(os.urandom(value)) * self.count
        self.source = regions(memoryview(source), value, region, self.count)
        self.target = regions(memoryview(bytearray(self.bytes)), value, region, self.count)
        self.keys = [b"bench:%d" % i for i in range(self.count)]
        self.values = [b"".join(parts) for parts in self.source]

    def put(self) -> None:
        items = [PutItem(k, p) for k, p in zip(self.keys, self.source, strict=True)]
        found = self.node.put(items, 600_000, self.clock.now() + 60)
        assert set(found) == {BlockOutcome.OK}, found

    def get(self, verify: bool = False) -> None:
        items = [GetItem(k, p) for k, p in zip(self.keys, self.target, strict=True)]
        landed = (lambda index: checksum(self.target[index])) if verify else None
        found = self.node.get(items, self.clock.now() + 60, landed)  # type: ignore[arg-type]
        assert set(found) == {BlockOutcome.OK}, found

    def get_verified(self) -> None:
        self.get(verify=True)

    def plain_put(self) -> None:
        pipe = self.plain.pipeline(transaction=False)
        for key, value in zip(self.keys, self.values, strict=True):
            pipe.set(key, value, px=600_000)
        pipe.execute()

    def plain_get(self) -> None:
        pipe = self.plain.pipeline(transaction=False)
        for key in self.keys:
            pipe.get(key)
        assert len(pipe.execute()) == self.count


def measure(case: Case, rounds: int) -> dict[str, list[float]]:
    """GB/s of each operation, in turns."""
    steps: dict[str, Callable[[], None]] = {
        "put": case.put, "redis-py set": case.plain_put,
        "get": case.get, "get+checksum": case.get_verified, "redis-py get": case.plain_get,
    }
    speed: dict[str, list[float]] = {name: [] for name in steps}
    for round_number in range(rounds + 1):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            took = time.perf_counter() - began
            if round_number:  # the first round makes pages and connections
                speed[name].append(case.bytes / took / 1e9)
    assert all(b"".join(a) == b"".join(b) for a, b in zip(case.source, case.target, strict=True))
    return speed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--unix", action="store_true")
    args = parser.parse_args()
    with Server(memory="2gb", tcp=not args.unix) as server:
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) > 1:  # one core each, as on a machine with one process per core
            os.sched_setaffinity(server.pid, cores[1:2])
            os.sched_setaffinity(0, cores[:1])
        url = server.url if args.unix else server.tcp_url
        print(f"GB/s, median (lowest-highest) of {args.rounds}; {args.mib} MiB a round; {url[:5]}")
        for name, value, region in CASES:
            case = Case(url, value, region, args.mib << 20)
            row = " | ".join(
                f"{what} {statistics.median(v):.2f} ({min(v):.2f}-{max(v):.2f})"
                for what, v in measure(case, args.rounds).items()
            )
            print(f"{name:24} {row}", flush=True)
            case.plain.flushall()
            case.node.close()
            case.plain.close()


if __name__ == "__main__":
    main()
