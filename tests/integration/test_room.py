"""A store that fills up: room is made in time, the accounts are true, nothing is refused."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator

import pytest
import redis

from connector.config import StoreConfig, parse_config
from store_worker.backends.factory import node_id
from store_worker.embedded import find_server
from store_worker.inspect import where
from store_worker.verify import verify
from tests.integration.conversation_kit import Fleet, Talk
from tests.servers import Server
from tests.waiting import eventually

MEMORY = "14mb"
TURNS, PROMPT = 30, 560


def binaries() -> list[object]:
    """A Redis, where there is one, and the embedded Valkey."""
    installed = shutil.which("redis-server")
    missing = pytest.mark.skip(reason="no redis-server on this machine")
    return [
        pytest.param(installed, id="redis", marks=() if installed else missing),
        pytest.param(find_server(), id="valkey"),
    ]


@pytest.fixture
def index() -> Iterator[Server]:
    with Server() as server:
        yield server


def stored_at(fleet: Fleet) -> StoreConfig:
    return parse_config({"store": fleet.store}).resolved_store()


def out_of_memory(client: redis.Redis) -> int:
    """OOM replies that the server has given."""
    found = client.info("errorstats").get("errorstat_OOM", {"count": 0})
    return int(found["count"])


@pytest.mark.parametrize("binary", binaries())
@pytest.mark.parametrize("policy", ["lru", "return"])
def test_a_full_node_never_refuses_and_its_account_is_true(
    index: Server, binary: str, policy: str
) -> None:
    with Server(memory=MEMORY, binary=binary) as data, data.client() as client:
        empty = client.info("memory")["used_memory"]
        store = {"index": index.url, "data": [data.url]}
        with Fleet(store, pattern=False, policy=policy) as fleet:
            shim = fleet.engine()
            for turn in range(TURNS):
                Talk(fleet, f"s{turn}", PROMPT).turn(shim)
            counters = shim.counters()
            assert counters.get("save_objects{outcome=FAILED}", 0) == 0
            assert out_of_memory(client) == 0
            stats = fleet.index().stats()
            assert stats["blocks_committed"] - stats["blocks"] > 100, "nothing was evicted"
            _assert_true_account(fleet, data, client, empty)
            assert verify(fleet.index(), stored_at(fleet)).clean


def _assert_true_account(
    fleet: Fleet, data: Server, client: redis.Redis, empty: int
) -> None:
    """What the index says is stored is what the server uses, within 3 %."""

    def settled() -> bool:
        (state,) = [n for n in fleet.index().nodes() if n.node == node_id(data.url)]
        used = client.info("memory")["used_memory"] - empty
        assert state.stored + state.granted + state.dying <= state.capacity
        return state.dying == 0 and abs(state.stored - used) <= 0.03 * used

    eventually(settled, 20.0, "the account to be that of the server")


def test_of_two_nodes_one_is_lost(index: Server) -> None:
    with Server(tcp=True) as one, Server(tcp=True) as other:
        store = {"index": index.url, "data": [one.tcp_url, other.tcp_url]}
        names = {node_id(one.tcp_url): one, node_id(other.tcp_url): other}
        with Fleet(store, pattern=False, load_deadline_s=5.0) as fleet:
            writer, reader = fleet.engine(), fleet.engine()
            talks = {f"s{i}": Talk(fleet, f"s{i}", 100) for i in range(8)}
            for talk in talks.values():
                talk.turn(writer)
            homes = homes_of(fleet)
            assert set(homes.values()) == set(names), "both nodes are somebody's home"
            for name, server in names.items():
                with server.client() as client:
                    blocks = sum(len(t.history) // 16 for s, t in talks.items() if homes[s] == name)
                    stored = len(list(client.scan_iter(match=b"skvo:*")))
                    assert abs(stored - blocks) <= sum(1 for h in homes.values() if h == name)
            lost = homes["s0"]
            names[lost].kill()
            for session, talk in talks.items():
                answer = talk.turn(reader, must_hit=homes[session] != lost)
                if homes[session] != lost:
                    assert answer.loaded >= 96, "the other node's conversations keep their hits"
            eventually(lambda: lost in down(fleet), 20.0, "the lost node to be noticed")
            for session, talk in talks.items():
                talk.turn(writer, must_hit=homes[session] != lost)
            assert lost not in homes_of(fleet).values()
            for talk in talks.values():
                talk.turn(reader)
            eventually(lambda: clean_but_for(fleet, lost), 20.0, "index and nodes to agree")


def homes_of(fleet: Fleet) -> dict[str, str]:
    """Each conversation's home, by its id."""
    config = parse_config({"store": fleet.store})
    found = {}
    for session in (f"s{i}" for i in itertools.count()):
        place = where(fleet.index(), config, session)
        if place is None:
            return found
        assert place.home is not None
        found[session] = place.home
    return found


def clean_but_for(fleet: Fleet, lost: str) -> bool:
    """The janitor takes expiries off a little after the commits."""
    report = verify(fleet.index(), stored_at(fleet))
    assert report.unreachable == [lost]
    return all(node.clean for node in report.nodes)


def down(fleet: Fleet) -> set[str]:
    """Nodes that the index knows to be away."""
    return {state.node for state in fleet.index().nodes() if not state.up}


def test_a_node_that_is_emptied_by_hand_is_used_again(index: Server) -> None:
    with Server(tcp=True) as data:
        store = {"index": index.url, "data": [data.tcp_url]}
        with Fleet(store) as fleet:
            shim, reader = fleet.engine(), fleet.engine()
            Talk(fleet, "before", 40).turn(shim)
            (old,) = fleet.index().nodes()
            with data.client() as client:
                client.flushall()
            eventually(lambda: fleet.index().nodes()[0].incarnation != old.incarnation, 10.0)
            eventually(lambda: saves_again(fleet), 30.0, "saves to work again")
            talk = Talk(fleet, "after", 40)
            talk.turn(shim)
            assert talk.turn(reader).loaded > 0


def saves_again(fleet: Fleet) -> bool:
    shim = fleet.engines[0]
    before = shim.counters().get("tokens_saved", 0)
    Talk(fleet, f"try-{before}-{len(shim.answers)}", 40).turn(shim)
    return shim.counters().get("tokens_saved", 0) > before
