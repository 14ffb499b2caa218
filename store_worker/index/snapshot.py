"""A server's keys read into a `State`, so that one integrity check serves both indexes.

Keys, all under `{skv}:` (`P` is a place, "node number:epoch"; run ids have 12 digits):

    m           hash  clock gen floor seq run grant nodes logged running tcls ops inc sec fmt
    nodes       hash  node name -> number       n:N  hash  one node      nc:N  hash  its charges
    dy:P do:P   hash, zset  dying blocks        gh:P hash  promised blocks -> grants
    l:P:L:C     zset  leaves of level L, class C, by use; l:P:-1:0 leased ones, by end
    lc:P        set   the L:C that are not empty      tm:P zset  leaves to look at again, by time
    pr:P        zset  runs       cp:P zset  runs with a copy there, by use     dead zset  places
    e:NS        hash  block hash -> run id, depth     nss set  namespaces      ds hash  in words
    r:R b:R     string  one run; its hashes     k:R zset  children, grants     h:R zset  holders
    g:G gx      hash, zset  grants; by end      cy cx hash, zset  copies under way
    s:S sh:S sb:S  hash, zset, hash  session; its holds by time; its boundaries by namespace
    sq si sp    zset  sessions by age, those that hold nothing by use, pinned ones by end
    tn ct       hash  tenants' sums; counters   ab zset  abandoned tips        ld hash  who leads
    cv cu log   hash, zset, list  conversations; by use; the turn log
    tb ts       hash, string  score table
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import redis

from connector.indexmsg import CommitOutcome, Committed
from store_worker.index.records import (
    Conversation,
    Copy,
    Dying,
    Grant,
    Lease,
    ListKey,
    Mark,
    Node,
    Run,
    Session,
    State,
    Tenant,
    Zset,
)
from store_worker.index.replies import event, stored_boundaries
from store_worker.policy import LRU_TABLE, ScoreTable

PREFIX = b"{skv}:"
TRIES = 5
NAMESPACE_BYTES = 16
_FRONT = re.compile(rb"(\d+) (\d+) (\d+) (\d+) (\d+) (\d+);([^;]*);([^|]*)\|")
_REST = re.compile(rb"(\d+) (\d+) (\d) (\S+) (\d);([^;]*);([^;]*)$")


def read_state(client: redis.Redis) -> State:
    """All of it. If others write meanwhile, it is read again; the last try may be torn."""
    for _ in range(TRIES):
        before = client.hget("{skv}:m", "ops")
        keys = dict(_dump(client))
        if client.hget("{skv}:m", "ops") == before:
            break
    return _Reader(keys).state()


def _dump(client: redis.Redis) -> Iterator[tuple[bytes, Any]]:
    names = sorted(client.scan_iter(match="{skv}:*", count=1000))
    for i in range(0, len(names), 500):
        part = names[i : i + 500]
        kinds = _pipe(client, [("TYPE", name) for name in part])
        reads = {
            b"hash": lambda name: ("HGETALL", name),
            b"zset": lambda name: ("ZRANGE", name, 0, -1, "WITHSCORES"),
            b"string": lambda name: ("GET", name),
            b"list": lambda name: ("LRANGE", name, 0, -1),
            b"set": lambda name: ("SMEMBERS", name),
        }
        there = [(name, kind) for name, kind in zip(part, kinds, strict=True) if kind in reads]
        values = _pipe(client, [reads[kind](name) for name, kind in there])
        for (name, _), value in zip(there, values, strict=True):
            yield name[len(PREFIX) :], value


def _pipe(client: redis.Redis, commands: list[tuple]) -> list[Any]:
    with client.pipeline(transaction=False) as pipe:
        for command in commands:
            pipe.execute_command(*command)
        return pipe.execute()


def _zset(pairs: Any, member: Any = lambda m: m) -> Zset:
    found = Zset()
    for name, score in pairs or ():
        found.add(member(name), float(score) if float(score) % 1 else int(float(score)))
    return found


def _child(member: bytes) -> int:
    return -int(member[1:]) if member.startswith(b"g") else int(member)


class _Reader:
    """Turns dumped keys into records."""

    def __init__(self, keys: dict[bytes, Any]) -> None:
        self.keys = keys
        self.ns_bytes = len(next(iter(keys.get(b"nss") or ()), b"n" * NAMESPACE_BYTES))

    def state(self) -> State:
        """Everything."""
        m = self.keys.get(b"m", {})
        s = State(m.get(b"inc", b""), m.get(b"sec", b""))
        numbers = {k: int(m.get(k, 0)) for k in (b"clock", b"gen", b"floor", b"seq", b"run")}
        s.clock_ms, s.generation, s.floor, s.seq, s.last_run = numbers.values()
        s.last_grant, s.logged = int(m.get(b"grant", 0)), int(m.get(b"logged", 0))
        self._nodes(s, int(m.get(b"nodes", 0)))
        self._places(s)
        self._runs(s)
        self._grants(s)
        self._sessions(s)
        self._turns(s)
        s.counts = {k.decode(): int(v) for k, v in self.keys.get(b"ct", {}).items()}
        s.abandoned = _zset(self.keys.get(b"ab"), self._key)
        for ns, text in self.keys.get(b"ds", {}).items():
            tokens, _, words = text.decode().partition(" ")
            s.described[ns] = (words, int(tokens))
        s.table = self._table()
        lead = self.keys.get(b"ld")
        s.leader = (lead[b"owner"].decode(), int(lead[b"until"])) if lead else ("", 0)
        return s

    def _with(self, prefix: bytes) -> Iterator[tuple[bytes, Any]]:
        for name, value in self.keys.items():
            if name.startswith(prefix):
                yield name[len(prefix) :], value

    def _key(self, joined: bytes) -> tuple[bytes, bytes]:
        return joined[: self.ns_bytes], joined[self.ns_bytes :]

    def _nodes(self, s: State, count: int) -> None:
        for idx in range(1, count + 1):
            h = self.keys[b"n:%d" % idx]
            n = {k.decode(): int(v) for k, v in h.items() if k not in (b"name", b"inc")}
            node = Node(
                idx, h[b"name"].decode(), h[b"inc"], n["epoch"], n["up"] == 1, n["drain"] == 1,
                n["cap"], n["stored"], n["copies"], n["granted"], n["dying"], n["blocks"],
                (n["rm"], n["rn"], n["rb"]),
            )  # fmt: skip
            charges = self.keys.get(b"nc:%d" % idx, {})
            node.charges = {int(k): int(v) for k, v in charges.items()}
            place = b"%d:%d" % (idx, node.epoch)
            for key, text in self.keys.get(b"dy:" + place, {}).items():
                size, ranks, ns_bytes = map(int, text.split())
                node.dying_blocks[key[:ns_bytes], key[ns_bytes:]] = Dying(size, ranks)
            node.dying_order = _zset(self.keys.get(b"do:" + place), self._key)
            promised = self.keys.get(b"gh:" + place, {})
            node.promised = {self._key(key): int(grants) for key, grants in promised.items()}
            s.nodes[node.name] = node
            s.by_idx.append(node)

    def _places(self, s: State) -> None:
        for name, pairs in self._with(b"l:"):
            idx, epoch, level, cls = map(int, name.split(b":"))
            key: ListKey = (level, cls)
            s.place(idx, epoch).lists[key] = _zset(pairs, int)
        for prefix, field in ((b"tm:", "timers"), (b"pr:", "runs"), (b"cp:", "copied")):
            for name, pairs in self._with(prefix):
                idx, epoch = map(int, name.split(b":"))
                setattr(s.place(idx, epoch), field, _zset(pairs, int))
        s.dead = _zset(self.keys.get(b"dead"), lambda m: tuple(map(int, m.split(b":"))))

    def _runs(self, s: State) -> None:
        for name, text in self._with(b"r:"):
            run = self._run(int(name), text, self.keys.get(b"b:" + name, b""))
            run.children = _zset(self.keys.get(b"k:" + name), _child)
            run.holders = _zset(self.keys.get(b"h:" + name))
            s.runs[run.id] = run
        for ns, entries in self._with(b"e:"):
            s.entries[ns] = {h: (int(v[:12]), int(v[12:])) for h, v in entries.items()}

    @staticmethod
    def _run(run_id: int, text: bytes, hashes: bytes) -> Run:
        front = _FRONT.match(text)
        assert front is not None, f"run {run_id} is not what we write: {text!r}"
        start, stop, node, epoch, ns_bytes, parent_bytes = map(int, front.groups()[:6])
        ns_end = front.end() + ns_bytes
        parent = text[ns_end : ns_end + parent_bytes]
        rest = _REST.match(text, ns_end + parent_bytes)
        assert rest is not None, f"run {run_id} is not what we write: {text!r}"
        step = len(hashes) // max(1, stop - start) or 1
        run = Run(
            run_id, text[front.end() : ns_end], parent, start, stop, node, epoch, int(rest[1]),
            int(rest[2]), [hashes[i : i + step] for i in range(0, len(hashes), step)],
        )  # fmt: skip
        lists = [
            [tuple(map(int, part.split())) for part in packed.split(b",") if part]
            for packed in (rest[6], rest[7], front[7])
        ]
        run.marks = [Mark(*m) for m in lists[0]]
        run.leases = [Lease(*m[:2]) for m in lists[1]]
        run.copies = [Copy(*m) for m in lists[2]]
        run.shared = [int(d) for d in front[8].split()]
        run.free = rest[3] == b"1"
        if rest[4] != b"-":
            level, cls = map(int, rest[4].split(b":"))
            run.where = (level, cls)
        return run

    def _grants(self, s: State) -> None:
        for name, h in self._with(b"g:"):
            n = {k: int(h[k]) for k in (b"gen", b"start", b"n", b"node", b"epoch", b"ranks")}
            hashes, count = h.get(b"hashes", b""), n[b"n"]
            step = len(hashes) // count if count else 1
            grant = Grant(
                int(name), h[b"ns"], h[b"session"], n[b"gen"], h[b"parent"], n[b"start"],
                tuple(hashes[i : i + step] for i in range(0, len(hashes), step)), n[b"node"],
                n[b"epoch"], n[b"ranks"], int(h[b"bb"]), int(h[b"tokens"]),
            )  # fmt: skip
            if b"reply" in h:
                grant.reply = Committed(CommitOutcome.OK)
            s.grants[grant.id] = grant
        s.grant_ends = _zset(self.keys.get(b"gx"), int)
        for member, text in self.keys.get(b"cy", {}).items():
            size, ranks, epoch, ns_bytes = map(int, text.split())
            rest = member[4:]
            s.copying[int(member[:4]), rest[:ns_bytes], rest[ns_bytes:]] = (size, ranks, epoch)
        s.copy_ends = _zset(self.keys.get(b"cx"), lambda m: (int(m[:4]), *self._key(m[4:])))

    def _sessions(self, s: State) -> None:
        for key, h in self._with(b"s:"):
            n = {k.decode(): int(v) for k, v in h.items() if k not in (b"tenant", b"engines")}
            engines = h[b"engines"].decode()
            record = Session(
                n["gen"], n["seq"], n["home"], n["turns"], n["last"], n["prio"], n["puntil"],
                n["pin"], n["pinb"], h[b"tenant"].decode(), n["counted"] == 1, n["closed"] == 1,
                tuple(engines.split("\n")) if engines else (),
            )  # fmt: skip
            record.holds = _zset(self.keys.get(b"sh:" + key), int)
            for ns, packed in self.keys.get(b"sb:" + key, {}).items():
                record.boundaries[ns] = stored_boundaries(packed)
            s.sessions[key] = record
        s.by_seq = _zset(self.keys.get(b"sq"))
        s.idle = _zset(self.keys.get(b"si"))
        s.pins = _zset(self.keys.get(b"sp"))
        for name, value in self.keys.get(b"tn", {}).items():
            tenant = s.tenants.setdefault(name[2:].decode(), Tenant())
            setattr(tenant, "sessions" if name.startswith(b"s:") else "pinned", int(value))

    def _turns(self, s: State) -> None:
        for key, text in self.keys.get(b"cv", {}).items():
            numbers, _, tip = text.partition(b"|")
            turns, at_ms, cls, depth, shared = map(int, numbers.split())
            s.conversations[self._key(key)] = Conversation(turns, at_ms, cls, tip, depth, shared)
        s.by_use = _zset(self.keys.get(b"cu"), self._key)
        s.log.extend(event(text) for text in self.keys.get(b"log", ()))

    def _table(self) -> ScoreTable:
        h, packed = self.keys.get(b"tb"), self.keys.get(b"ts", b"")
        if not h:
            return LRU_TABLE
        parts = [tuple(int(n) for n in h[k].split()) for k in (b"times", b"tokens", b"edges")]
        values = [float(packed[i : i + 25]) for i in range(0, len(packed), 25)]
        bins = len(parts[2])
        rows = tuple(tuple(values[i : i + bins]) for i in range(0, len(values), bins))
        return ScoreTable(
            parts[0], parts[1], parts[2], rows, int(h[b"version"]), int(h[b"serial"])
        )
