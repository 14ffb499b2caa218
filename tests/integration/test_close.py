"""`session-kv close`: a conversation ends, and what only it needed is gone from index and nodes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import NamedTuple

import pytest

from connector.clock import SystemClock
from connector.config import Config, parse_config
from connector.ids import NO_HASH, BlockHash, Namespace, NodeId, SessionKey
from connector.indexmsg import CommitOutcome, CommitRequest, Granted, PrepareRequest
from connector.session import session_key
from store_worker.backends.base import DataNode, PutItem
from store_worker.backends.factory import node_id, open_node
from store_worker.cli.main import main
from store_worker.index import SessionIndex, open_index
from store_worker.keys import object_key
from tests.servers import Server, free_port

NAMESPACE = Namespace(b"n" * 16)
PAYLOAD = memoryview(b"x" * 4096)
CAPACITY = 64 << 20
RANKS = 2
NUMBERS = itertools.count()


def chain(name: str, length: int) -> tuple[BlockHash, ...]:
    return tuple(BlockHash(f"{name}-{i}".encode().ljust(32, b".")) for i in range(length))


class Store(NamedTuple):
    """An index and a data node, as an engine would use them."""

    url: str
    index: SessionIndex
    node: DataNode
    name: NodeId
    incarnation: bytes
    secret: bytes

    def key(self, session: str, tenant: str = "default", salt: str | None = None) -> SessionKey:
        return session_key(self.secret, tenant, salt, session)

    def objects(self, hashes: Sequence[BlockHash]) -> list[bytes]:
        ranks = range(RANKS)
        return [object_key(self.incarnation, NAMESPACE, h, rank) for h in hashes for rank in ranks]

    def stored(self, hashes: Sequence[BlockHash]) -> int:
        return sum(self.node.exists(self.objects(hashes), SystemClock().now() + 5))

    def save(self, session: SessionKey, hashes: Sequence[BlockHash], start: int = 0) -> None:
        """Put and commit a chain's blocks from `start` on (of which some may be there already)."""
        new = tuple(hashes[start:])
        parent = hashes[start - 1] if start else NO_HASH
        items = [PutItem(key, [PAYLOAD]) for key in self.objects(new)]
        self.node.put(items, 600_000, SystemClock().now() + 5)
        generation = self.index.recall(NAMESPACE, session).generation
        granted = self.index.prepare(
            PrepareRequest(
                namespace=NAMESPACE,
                session=session,
                generation=generation,
                parent=parent,
                start=start,
                hashes=new,
                nodes=(self.name,),
                object_bytes=len(PAYLOAD),
                ranks=RANKS,
            )
        )
        assert isinstance(granted, Granted)
        request = CommitRequest(
            namespace=NAMESPACE,
            session=session,
            generation=generation,
            grant=granted.grant,
            saved=len(new) - granted.first_missing,
            parent=parent,
            start=start,
        )
        assert self.index.commit(request).outcome is CommitOutcome.OK

    def listed(self, hashes: Sequence[BlockHash]) -> int:
        return sum(self.index.probe(NAMESPACE, hashes))


def opened(url: str, data_url: str) -> Store:
    config: Config = parse_config({"store": {"index": url, "data": data_url}})
    index, node = open_index(url, config), open_node(data_url, config)
    name = node_id(data_url)
    index.register_node(name, node.incarnation(SystemClock().now() + 5), CAPACITY)
    identity = index.identity()
    text = json.dumps({"index": url, "data": [data_url]})
    return Store(text, index, node, name, identity.incarnation, identity.secret)


@pytest.fixture(params=["redis", "memory"])
def store(request: pytest.FixtureRequest) -> Store:
    if request.param == "memory":
        url = f"memory://close{next(NUMBERS)}"
    else:
        url = request.getfixturevalue("clean_redis").url
    return opened(url, url)


def close(capsys: pytest.CaptureFixture[str], store: Store, *arguments: str) -> tuple[int, dict]:
    code = main(["close", *arguments, "--store", store.url, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_everything_of_one_session_goes(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = chain("a", 5)
    store.save(store.key("chat-1"), blocks)
    assert store.listed(blocks) == 5 and store.stored(blocks) == 5 * RANKS
    code, answer = close(capsys, store, "chat-1")
    expected = {"ok": True, "session": "chat-1", "known": True, "blocks": 5, "left": 0}
    assert (code, answer) == (0, expected)
    assert store.listed(blocks) == 0 and store.stored(blocks) == 0
    (node,) = store.index.nodes()
    assert (node.stored, node.dying, node.granted) == (0, 0, 0)
    assert not store.index.check_integrity()


def test_what_another_session_needs_stays(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    shared, mine, theirs = chain("s", 3), chain("m", 2), chain("t", 2)
    store.save(store.key("mine"), shared + mine)
    store.save(store.key("theirs"), shared + theirs)
    code, answer = close(capsys, store, "mine")
    assert code == 0 and answer["blocks"] == 2
    assert store.listed(shared + theirs) == 5 and store.listed(mine) == 0
    assert store.stored(shared + theirs) == 5 * RANKS and store.stored(mine) == 0


def test_a_long_conversation_takes_several_calls(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    key, blocks = store.key("long"), chain("p", 300)
    for part in range(3):
        store.save(key, blocks[: 100 * (part + 1)], start=100 * part)
    code, answer = close(capsys, store, "long")
    assert code == 0 and answer["blocks"] == 300 and answer["left"] == 0
    assert store.listed(blocks[:128]) == 0 and store.stored(blocks) == 0


def test_an_unknown_session(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = close(capsys, store, "never-seen")
    assert code == 1 and answer["known"] is False
    assert main(["close", "never-seen", "--store", store.url]) == 1
    assert "no session 'never-seen'" in capsys.readouterr().out


def test_a_second_close_finds_nothing(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    store.save(store.key("chat-1"), chain("a", 2))
    assert close(capsys, store, "chat-1")[0] == 0
    assert close(capsys, store, "chat-1")[0] == 1


def test_another_tenant_or_salt_closes_nothing(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = chain("a", 2)
    store.save(store.key("chat-1", tenant="acme", salt="s1"), blocks)
    assert close(capsys, store, "chat-1")[0] == 1
    assert close(capsys, store, "chat-1", "--tenant", "acme")[0] == 1
    assert store.listed(blocks) == 2
    assert close(capsys, store, "chat-1", "--tenant", "acme", "--cache-salt", "s1")[0] == 0
    assert store.listed(blocks) == 0


def test_a_secret_of_the_config(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    secret = "ab" * 32
    store.save(session_key(bytes.fromhex(secret), "default", None, "chat-1"), chain("a", 2))
    assert close(capsys, store, "chat-1")[0] == 1
    assert close(capsys, store, "chat-1", "--session-secret", secret)[0] == 0


def test_a_dead_data_node_leaves_the_objects_to_the_engines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Server() as index, Server() as data:
        store = opened(index.url, data.url)
        store.save(store.key("chat-1"), chain("a", 3))
        data.kill()
        code, answer = close(capsys, store, "chat-1")
        assert code == 0 and answer["blocks"] == 3 and answer["left"] == 3
        assert store.listed(chain("a", 3)) == 0


def test_no_index(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"redis://127.0.0.1:{free_port()}"
    assert main(["close", "chat-1", "--store", url]) == 2
    assert capsys.readouterr().err.startswith("session-kv: ")


def test_an_id_that_no_client_could_send(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["close", "x" * 300, "--store", store.url]) == 2
    assert "at most 256" in capsys.readouterr().err
