"""Inspection and verification of a store on a real server, through the command line."""

from __future__ import annotations

import json
from typing import Any

import pytest
import redis

from connector.config import parse_config
from connector.ids import BlockHash, Generation, Namespace
from connector.indexmsg import Boundary, CommitRequest, Granted, PrepareRequest, TurnEnd
from store_worker.backends.factory import node_id
from store_worker.cli.main import main
from store_worker.codec import HEADER_BYTES
from store_worker.index import open_index
from store_worker.inspect import key_of, where
from store_worker.keys import object_key
from tests.servers import Server

NS = Namespace(b"n" * 16)
PAYLOAD = 100
OBJECT = HEADER_BYTES + PAYLOAD
CHAIN = tuple(BlockHash(f"block {i}".encode().ljust(32, b".")) for i in range(4))


class Store:
    """A server with one conversation of four blocks."""

    def __init__(self, server: Server) -> None:
        self.url = server.url
        self.config = parse_config({"store": self.url})
        self.index: Any = open_index(self.url, self.config)
        self.client: redis.Redis = server.client()
        self.node = node_id(self.url)
        self.store = self.index.identity().incarnation
        self.index.register_node(self.node, b"incarn-1", 1 << 24)
        self.index.describe(NS, json.dumps({"model": "m", "payload_bytes": PAYLOAD}), 16)
        self.session = key_of(self.index, self.config, "conversation")
        granted = self.index.prepare(
            PrepareRequest(
                namespace=NS, session=self.session, generation=Generation(0), hashes=CHAIN,
                nodes=(self.node,), object_bytes=OBJECT,
            )
        )  # fmt: skip
        assert isinstance(granted, Granted)
        for block in CHAIN:
            self.client.set(self.key(block), bytes(OBJECT))
        self.index.commit(
            CommitRequest(
                namespace=NS, session=self.session, grant=granted.grant, saved=4,
                turn_end=TurnEnd((Boundary(4, CHAIN[3]),), 64),
            )
        )  # fmt: skip

    def key(self, block: BlockHash) -> bytes:
        return object_key(self.store, NS, block, 0)

    def ask(self, capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, Any]:
        code = main([*args, "--store", self.url, "--json"])
        return code, json.loads(capsys.readouterr().out)


@pytest.fixture
def store(clean_redis: Server) -> Store:
    return Store(clean_redis)


def test_a_session_is_found_by_its_id(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = store.ask(capsys, "session", "conversation")
    assert code == 0
    assert (found["home"], found["blocks"], found["tokens"]) == (store.node, 4, 64)
    code, found = store.ask(capsys, "session", "another")
    assert (code, found) == (1, None)


def test_another_tenant_finds_nothing(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = store.ask(capsys, "session", "conversation", "--tenant", "other")
    assert (code, found) == (1, None)


def test_where_tells_routers(store: Store) -> None:
    found = where(store.index, store.config, "conversation")
    assert found is not None
    assert (found.home, found.tokens, found.turns) == (store.node, 64, 1)
    assert where(store.index, store.config, "another") is None


def test_lists(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    _, sessions = store.ask(capsys, "sessions")
    assert [s["session"] for s in sessions["sessions"]] == [store.session.hex()]
    _, nodes = store.ask(capsys, "nodes")
    assert [(n["node"], n["blocks"]) for n in nodes] == [(store.node, 4)]
    _, namespaces = store.ask(capsys, "namespaces")
    assert [(n["facts"]["model"], n["blocks"]) for n in namespaces] == [("m", 4)]


@pytest.mark.parametrize("command", ["sessions", "nodes", "namespaces", "verify"])
def test_people_get_tables(
    store: Store,
    command: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main([command, "--store", store.url]) == 0
    assert store.node[:10] in capsys.readouterr().out or command == "namespaces"


def test_an_empty_store_is_clean(
    clean_redis: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "--store", clean_redis.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"]


def test_drain(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = store.ask(capsys, "drain", store.node)
    assert (code, answer["draining"], answer["blocks"]) == (0, True, 4)
    code, answer = store.ask(capsys, "drain", store.node, "--off")
    assert (code, answer["draining"]) == (0, False)
    code, answer = store.ask(capsys, "drain", "nowhere")
    assert (code, answer["ok"]) == (1, False)


def test_verify_is_clean_and_leaves_what_a_save_is_writing(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    store.client.set(store.key(BlockHash(b"under way".ljust(32))), bytes(OBJECT), px=60_000)
    code, report = store.ask(capsys, "verify")
    assert (code, report["ok"]) == (0, True)
    assert (report["nodes"][0]["objects"], report["nodes"][0]["passing"]) == (5, 1)


def test_verify_finds_what_is_planted_and_repairs_it(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    orphan = store.key(BlockHash(b"orphan".ljust(32)))
    store.client.set(orphan, bytes(OBJECT))
    store.client.delete(store.key(CHAIN[3]))
    store.client.set(store.key(CHAIN[2]), bytes(OBJECT - 1))
    store.client.pexpire(store.key(CHAIN[0]), 60_000)
    code, report = store.ask(capsys, "verify")
    node = report["nodes"][0]
    assert code == 1
    assert node["orphans"] == [orphan.hex()]
    assert node["missing"] == [store.key(CHAIN[3]).hex()]
    assert node["wrong_size"] == [store.key(CHAIN[2]).hex()]
    assert node["expiring"] == [store.key(CHAIN[0]).hex()]
    store.ask(capsys, "verify", "--repair")
    code, report = store.ask(capsys, "verify")
    assert (code, report["ok"]) == (0, True)
    assert not store.client.exists(orphan)
    assert store.client.pttl(store.key(CHAIN[0])) == -1
    assert store.index.acquire(NS, [(CHAIN[3], 4)], 1.0, store.session).depth == 2


def test_objects_of_a_lost_index_are_orphans(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    old = object_key(b"old-life", NS, CHAIN[0], 0)
    store.client.set(old, bytes(OBJECT))
    _, report = store.ask(capsys, "verify")
    assert report["nodes"][0]["orphans"] == [old.hex()]


def test_a_node_that_does_not_answer_is_named(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    both = json.dumps({"index": store.url, "data": [store.url, "redis://127.0.0.1:1"]})
    code = main(["verify", "--store", both, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert (code, report["unreachable"]) == (1, ["127.0.0.1:1/0"])
