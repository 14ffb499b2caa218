"""Put and get of cache blocks on a real Mooncake: our node against the bare library, in turns.

    .venv-vllm/bin/python -m tests.bench.bench_mooncake_bulk [--rounds 5] [--mib 32]

Sketch: over TCP each slice is a message with its own answer, so the bare library pays per region;
ours copies regions under 256 KiB together first (a copy at some 8 GB/s against a transfer at 1 to
3) and reads into staging memory, one copy more than the library needs. `whole` is the library with
one slice per object, which no paged cache can offer: the floor.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

from connector.clock import SystemClock
from connector.meta import BlockOutcome
from store_worker.backends import mooncake_bulk
from store_worker.backends.base import GetItem, PutItem
from store_worker.backends.mooncake import Membership
from store_worker.backends.mooncake_library import address_of, open_library, replicate_config
from store_worker.backends.mooncake_url import parse_mooncake_url
from tests.mooncake.cluster import MooncakeCluster

KIB, MIB = 1 << 10, 1 << 20
CASES = (  # (bytes of an object, bytes of a region)
    (64 * KIB, 64 * KIB),
    (64 * KIB, 4 * KIB),
    (256 * KIB, 256 * KIB),
    (256 * KIB, 32 * KIB),
    (MIB, MIB),
    (MIB, 256 * KIB),
    (MIB, 128 * KIB),
    (MIB, 32 * KIB),
    (4 * MIB, 128 * KIB),
)
HEADER = 112
SLICES = 1024
OBJECTS_MAX = 256

Run = Callable[[], None]


class Bench:
    """One size; every operation moves `count` objects."""

    def __init__(self, cluster: MooncakeCluster, bare: Any, sizes: tuple[int, int], total: int):
        self.cluster, self.bare = cluster, bare
        self.value, self.region = sizes
        self.count = max(2, min(OBJECTS_MAX, total // self.value))
        self.source = memoryview(bytearray(os.urandom(self.value) * self.count))
        self.target = memoryview(bytearray(len(self.source)))
        self.node = cluster.node()
        self.header = memoryview(bytes(HEADER))
        self.config = replicate_config(cluster.names[0])
        self.serial = 0

    def parts(self, memory: memoryview, index: int) -> list[memoryview]:
        start, stop = index * self.value, (index + 1) * self.value
        return [memory[at : at + self.region] for at in range(start, stop, self.region)]

    def once(self, kind: str) -> tuple[float, float]:
        """Seconds of a put and of a get of all objects; the bytes are compared."""
        self.serial += 1
        names = [f"{kind}:{self.serial}:{i}" for i in range(self.count)]
        self.target[:] = bytes(len(self.target))
        put, get = getattr(self, kind)(names)
        began = time.perf_counter()
        put()
        middle = time.perf_counter()
        get()
        ended = time.perf_counter()
        assert self.target == self.source, kind
        left = self.bare.batch_remove(
            [mooncake_bulk.text_key(n.encode(), self.node.segment) for n in names] + names, True
        )
        assert sum(code == 0 for code in left) == self.count
        return middle - began, ended - middle

    def ours(self, names: list[str]) -> tuple[Run, Run]:
        keys = [name.encode() for name in names]
        puts = [
            PutItem(key, [self.header, *self.parts(self.source, i)]) for i, key in enumerate(keys)
        ]
        gets = [
            GetItem(key, [memoryview(bytearray(HEADER)), *self.parts(self.target, i)])
            for i, key in enumerate(keys)
        ]
        good = [BlockOutcome.OK] * self.count
        soon = self.cluster.soon

        def put() -> None:
            assert self.node.put(puts, 60_000, soon(60)) == good

        def get() -> None:
            assert self.node.get(gets, soon(60)) == good

        return put, get

    def library(self, names: list[str]) -> tuple[Run, Run]:
        return self._bare(names, self.region)

    def whole(self, names: list[str]) -> tuple[Run, Run]:
        return self._bare(names, self.value)

    def _bare(self, names: list[str], region: int) -> tuple[Run, Run]:
        step = max(1, SLICES // (self.value // region))
        calls = [
            (names[at : at + step], self._slices(at, min(at + step, self.count), region))
            for at in range(0, self.count, step)
        ]

        def put() -> None:
            for some, (sources, _, sizes) in calls:
                codes = self.bare.batch_put_from_multi_buffers(some, sources, sizes, self.config)
                assert not any(codes)

        def get() -> None:
            for some, (_, targets, sizes) in calls:
                codes = self.bare.batch_get_into_multi_buffers(some, targets, sizes)
                assert set(codes) == {self.value}

        return put, get

    def _slices(
        self, start: int, stop: int, region: int
    ) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
        """Addresses in the source, in the target, and sizes, per object."""
        bases = address_of(self.source), address_of(self.target)
        offsets = range(0, self.value, region)
        places = [
            [[base + i * self.value + at for at in offsets] for i in range(start, stop)]
            for base in bases
        ]
        return places[0], places[1], [[region] * len(offsets)] * (stop - start)


def show(bench: Bench, rounds: int) -> None:
    kinds = ("ours", "library", "whole")
    took: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind in kinds:
            took[kind].append(bench.once(kind))
    size = bench.value * bench.count / 1e9
    cells = []
    for kind in kinds:
        for way in (0, 1):
            rates = sorted(size / pair[way] for pair in took[kind])
            cells.append(f"{statistics.median(rates):5.2f} ({rates[0]:.2f}-{rates[-1]:.2f})")
    bench.node.close()
    name = f"{bench.value >> 10} KiB / {bench.region >> 10} KiB"
    print(f"| {name:18} | {bench.count:4} | " + " | ".join(cells) + " |", flush=True)


def show_exists(cluster: MooncakeCluster) -> None:
    node = cluster.node()
    for count in (1, 128, 1024, 8192):
        keys = [b"%064d" % i for i in range(count)]
        took = []
        for _ in range(7):
            began = time.perf_counter()
            node.exists(keys, cluster.soon())
            took.append((time.perf_counter() - began) * 1e3)
        middle = statistics.median(took)
        print(f"exists, {count} keys: median {middle:.2f} ms, best {min(took):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=32)
    parser.add_argument("--in-place", type=int, default=mooncake_bulk.IN_PLACE_BYTES)
    parser.add_argument("--window", type=int, default=mooncake_bulk.WINDOW)
    args = parser.parse_args()
    mooncake_bulk.IN_PLACE_BYTES, mooncake_bulk.WINDOW = args.in_place, args.window
    with MooncakeCluster((1 << 30,)) as cluster:
        member = Membership(cluster.url, cluster.config(), SystemClock())
        bare = open_library(parse_mooncake_url(cluster.url))
        load = os.getloadavg()[0]
        print(f"GB/s, median (least-most) of {args.rounds}; load average {load:.1f}")
        print("| object / region | n | our put | our get | library put | library get "
              "| whole put | whole get |")
        print("|---|---|---|---|---|---|---|---|")
        for sizes in CASES:
            show(Bench(cluster, bare, sizes, args.mib << 20), args.rounds)
        show_exists(cluster)
        member.close()


if __name__ == "__main__":
    main()
