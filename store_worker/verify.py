"""Integrity of the index against the data nodes: orphans, missing objects, wrong sizes.

The index is read as a whole, each node's keys are scanned, and what looks wrong is looked at once
more, since engines go on meanwhile. Objects that still have an expiry are not orphans: they belong
to a save under way, or go by themselves. Thread: the caller's.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import redis

from connector.config import StoreConfig
from connector.ids import BlockHash, Namespace, NodeId
from store_worker.backends.factory import node_id
from store_worker.codec import HEADER_BYTES
from store_worker.index.base import SessionIndex
from store_worker.index.records import State
from store_worker.keys import OBJECT_PREFIX, object_key, parse_object_key

KEYS_PER_CALL = 512
KEPT = -1
"""What PTTL answers for a key without expiry; -2: there is no such key."""

Progress = Callable[[str, int], None]
"""Told what is being done and how many keys were looked at."""


class Findings(msgspec.Struct):
    """Of one node: keys as hex. orphans: stored for ever and listed nowhere. missing: listed and
    not there. wrong_size: not as long as its namespace says. expiring: listed, but the expiry was
    never taken off. passing: written and not committed yet (not a fault)."""

    node: str
    objects: int = 0
    orphans: list[str] = []
    missing: list[str] = []
    wrong_size: list[str] = []
    expiring: list[str] = []
    passing: int = 0
    repaired: int = 0

    @property
    def clean(self) -> bool:
        """Nothing is wrong."""
        return not (self.orphans or self.missing or self.wrong_size or self.expiring)


class Report(msgspec.Struct):
    """index: violated invariants, in words. unreachable: nodes that did not answer."""

    index: list[str]
    nodes: list[Findings]
    unreachable: list[str]

    @property
    def clean(self) -> bool:
        """Index and nodes agree."""
        return not self.index and not self.unreachable and all(n.clean for n in self.nodes)


@dataclass
class _Expected:
    """Keys that the index lists on a node, with the size each must have (0: not known)."""

    keys: dict[bytes, int] = field(default_factory=dict)
    dying: set[bytes] = field(default_factory=set)


def verify(
    index: SessionIndex, store: StoreConfig, repair: bool = False, progress: Progress | None = None
) -> Report:
    """Compare, and with `repair` delete orphans, forget what is lost, take expiries off.

    Only Redis/Valkey nodes can be scanned. Raises StoreError if the index can't be asked.
    """
    tell = progress or (lambda what, count: None)
    report = Report(index=index.check_integrity(), nodes=[], unreachable=[])
    state, identity = index.snapshot(), index.identity()
    sizes = payload_sizes(index)
    for url in store.data:
        name = node_id(url)
        expected = _expected(state, identity.incarnation, name, sizes)
        try:
            client = redis.Redis.from_url(url, socket_timeout=5.0, socket_connect_timeout=1.0)
            findings = _compare(client, name, expected, tell)
            _look_again(client, index, findings)
            if repair and not findings.clean:
                _repair(client, index, findings)
        except redis.RedisError:
            report.unreachable.append(name)
            continue
        report.nodes.append(findings)
    return report


def payload_sizes(index: SessionIndex) -> dict[Namespace, int]:
    """Bytes of an object, header included, by namespace; where its description says."""
    sizes = {}
    for namespace, (text, _, _) in index.namespaces().items():
        try:
            payload = msgspec.json.decode(text).get("payload_bytes", 0) if text else 0
        except (msgspec.DecodeError, AttributeError):
            payload = 0
        if payload:
            sizes[namespace] = HEADER_BYTES + int(payload)
    return sizes


def _expected(
    state: State, store: bytes, name: NodeId, sizes: dict[Namespace, int]
) -> _Expected:
    expected = _Expected()
    node = state.nodes.get(name)
    if node is None:
        return expected
    for run in state.runs.values():
        upto = run.start
        if (run.node, run.epoch) == (node.idx, node.epoch):
            upto = run.stop
        for copy in run.copies:
            if (copy.node, copy.epoch) == (node.idx, node.epoch):
                upto = max(upto, copy.upto)
        size = sizes.get(Namespace(run.ns), 0)
        for depth, rank in itertools.product(range(run.start, upto), range(run.ranks)):
            hash_ = BlockHash(run.hashes[depth - run.start])
            expected.keys[object_key(store, Namespace(run.ns), hash_, rank)] = size
    for (ns, block), dying in node.dying_blocks.items():
        for rank in range(dying.ranks):
            expected.dying.add(object_key(store, Namespace(ns), BlockHash(block), rank))
    return expected


def _compare(
    client: redis.Redis, name: NodeId, expected: _Expected, tell: Progress
) -> Findings:
    findings = Findings(node=name)
    seen: set[bytes] = set()
    for keys in _batches(client.scan_iter(match=OBJECT_PREFIX + b"*", count=1000)):
        for key, (size, left_ms) in zip(keys, _facts(client, keys), strict=True):
            if left_ms == -2:
                continue
            seen.add(key)
            _judge(findings, expected, key, (size, left_ms))
        findings.objects = len(seen)
        tell(f"scanning {name}", len(seen))
    findings.missing = [key.hex() for key in expected.keys if key not in seen]
    return findings


def _judge(
    findings: Findings, expected: _Expected, key: bytes, facts: tuple[int, int]
) -> None:
    size, left_ms = facts
    must = expected.keys.get(key)
    if must is None:
        if left_ms != KEPT:
            findings.passing += 1
        elif key not in expected.dying:
            findings.orphans.append(key.hex())
        return
    if must and size != must:
        findings.wrong_size.append(key.hex())
    if left_ms != KEPT:
        findings.expiring.append(key.hex())


def _facts(client: redis.Redis, keys: Sequence[bytes]) -> list[tuple[int, int]]:
    """(length, milliseconds left) of each key."""
    pipe = client.pipeline(transaction=False)
    for key in keys:
        pipe.strlen(key)
        pipe.pttl(key)
    answers: list[Any] = pipe.execute()
    return list(zip(answers[::2], answers[1::2], strict=True))


def _look_again(client: redis.Redis, index: SessionIndex, findings: Findings) -> None:
    """Engines have gone on since the index was read: only what is still wrong counts."""
    orphans = [bytes.fromhex(key) for key in findings.orphans]
    findings.orphans = [
        key.hex()
        for key, listed in zip(orphans, _listed(index, orphans), strict=True)
        if not listed and client.pttl(key) == KEPT
    ]
    for name, wrong in (("missing", True), ("expiring", False)):
        keys = [bytes.fromhex(key) for key in getattr(findings, name)]
        facts = [fact for part in _batches(iter(keys)) for fact in _facts(client, part)]
        still = [
            key.hex()
            for key, listed, (_, left_ms) in zip(keys, _listed(index, keys), facts, strict=True)
            if listed and (left_ms == -2 if wrong else left_ms >= 0)
        ]
        setattr(findings, name, still)


def _listed(index: SessionIndex, keys: Sequence[bytes]) -> list[bool]:
    """Whether each key's block is listed now."""
    names = [parse_object_key(key) for key in keys]
    listed: dict[tuple[Namespace, BlockHash], bool] = {}
    by_ns: dict[Namespace, list[BlockHash]] = defaultdict(list)
    store = index.identity().incarnation
    for found in names:
        if found is not None and found.store == store:
            by_ns[found.namespace].append(found.hash)
    for namespace, hashes in by_ns.items():
        for i in range(0, len(hashes), 128):
            part = hashes[i : i + 128]
            listed.update(
                ((namespace, h), there)
                for h, there in zip(part, index.probe(namespace, part), strict=True)
            )
    return [n is not None and listed.get((n.namespace, n.hash), False) for n in names]


def _repair(client: redis.Redis, index: SessionIndex, findings: Findings) -> None:
    """Orphans go, what is lost or wrong is forgotten and deleted, expiries are taken off."""
    node = NodeId(findings.node)
    bad: dict[Namespace, list[BlockHash]] = defaultdict(list)
    for text in (*findings.missing, *findings.wrong_size):
        name = parse_object_key(bytes.fromhex(text))
        if name is not None:
            bad[name.namespace].append(name.hash)
    for namespace, hashes in bad.items():
        for i in range(0, len(hashes), 128):
            victims = index.forget(namespace, list(dict.fromkeys(hashes[i : i + 128])), node)
            store = index.identity().incarnation
            keys = [
                object_key(store, v.namespace, v.hash, rank)
                for v in victims
                for rank in range(v.ranks)
            ]
            _unlink(client, keys)
            index.freed(victims)
    doomed = [*findings.orphans, *findings.wrong_size]
    _unlink(client, [bytes.fromhex(key) for key in doomed])
    for key in findings.expiring:
        client.persist(bytes.fromhex(key))
    findings.repaired = sum(
        map(len, (findings.orphans, findings.missing, findings.wrong_size, findings.expiring))
    )


def _unlink(client: redis.Redis, keys: Sequence[bytes]) -> None:
    for part in _batches(iter(keys)):
        client.unlink(*part)


def _batches(keys: Iterator[bytes]) -> Iterator[list[bytes]]:
    while part := list(itertools.islice(keys, KEYS_PER_CALL)):
        yield part


