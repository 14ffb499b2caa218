"""The server-side index when the server fails: what is raised, and that it recovers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from connector.config import parse_config
from connector.errors import ConfigError, StoreTimeout, StoreUnavailable, UnsupportedError
from connector.indexmsg import Declined, DeclineReason
from store_worker.index import IndexOptions, MemoryIndex, open_index
from store_worker.index.redis import RedisIndex
from store_worker.index.scripts import NAMES, script
from tests.index_kit import BLOCK, INC, NS, A, Driver, chain, key
from tests.servers import Server

S = key("s")


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        yield running


def ready(server: Server, **options: float) -> Driver:
    d = Driver(RedisIndex(server.url, IndexOptions(**options)))  # type: ignore[arg-type]
    d.index.identity()
    d.index.register_node(A, INC, 1000 * BLOCK, d.now)
    return d


def test_scripts_are_loaded_again_when_the_server_forgot_them(server: Server) -> None:
    d, c = ready(server), chain("c", 3)
    d.save(c, session=S)
    with server.client() as client:
        client.script_flush()
    assert d.depth(c) == 3
    d.sound()


def test_a_server_that_is_gone_is_unavailable_and_then_empty(server: Server) -> None:
    d, c = ready(server), chain("c", 3)
    d.save(c, session=S)
    before = d.index.identity()
    server.kill()
    with pytest.raises(StoreUnavailable, match="recall"):
        d.index.recall(NS, S)
    server.start()
    assert d.index.identity() != before, "what was stored under the old one is not found"
    assert d.listed(c) == 0
    assert d.ask(c, session=S) == Declined(DeclineReason.NO_NODE)
    d.index.register_node(A, INC, 1000 * BLOCK, d.now)
    d.save(c, session=S)
    assert d.listed(c) == 3
    d.sound()


def test_generations_go_on_after_the_index_was_lost(server: Server) -> None:
    """A save of before the loss must not become visible after a close of after it."""
    d, c = ready(server), chain("c", 3)
    d.index.close(S, d.now)
    token = d.generation(S)
    with server.client() as client:
        client.flushall()
    d = ready(server)
    d.index.close(S, d.now)
    assert d.generation(S) > token
    assert d.ask(c, session=S, generation=token) == Declined(DeclineReason.STALE_GENERATION)


def test_a_server_that_does_not_answer_is_a_timeout(server: Server) -> None:
    d = ready(server, timeout_s=0.2)
    server.pause()
    try:
        with pytest.raises(StoreTimeout):
            d.index.recall(NS, S)
    finally:
        server.resume()
    assert d.index.recall(NS, S).home is None


def test_a_full_server_refuses_saves_whole_and_lets_go(server: Server) -> None:
    d, c = ready(server), chain("c", 20)
    d.save(c, session=S)
    granted = d.ask(chain("late", 2), session=S)
    with server.client() as client:
        client.config_set("maxmemory", 1)
    with pytest.raises(StoreUnavailable, match="maxmemory"):
        d.ask(chain("more", 3), session=S)
    d.sound()
    assert len(d.index.abort(granted.grant, d.now)) == 2  # type: ignore[union-attr]
    closed = d.index.close(S, d.now)
    assert closed.blocks == 20, "what frees works without memory"
    d.index.freed(closed.victims, d.now)
    d.index.dying(A, d.now)
    d.sound()


def test_data_of_another_format_is_refused(server: Server) -> None:
    with server.client() as client:
        client.hset("{skv}:m", mapping={"inc": "x", "sec": "y", "fmt": 99})
    with pytest.raises(UnsupportedError, match="format 99"):
        RedisIndex(server.url).identity()


def test_identity_is_made_once(server: Server) -> None:
    one, two = RedisIndex(server.url), RedisIndex(server.url)
    found = one.identity()
    assert found == two.identity() == one.identity()
    assert (len(found.incarnation), len(found.secret)) == (8, 32)


def test_credentials_and_database_are_taken_from_the_url() -> None:
    with Server(tcp=True) as server:
        with server.client() as client:
            client.config_set("requirepass", "word")
        index = RedisIndex(server.tcp_url.replace("redis://", "redis://:word@") + "/3")
        index.identity()
        with redis.Redis(port=server.port, password="word", db=3) as client:
            assert client.exists("{skv}:m")
        with pytest.raises(StoreUnavailable, match="uthenticated"):
            RedisIndex(server.tcp_url).identity()


def test_every_script_loads_and_its_name_is_its_content(server: Server) -> None:
    with server.client() as client:
        for name in NAMES:
            code = script(name)
            assert client.script_load(code.text) == code.sha.encode() or (
                client.script_load(code.text) == code.sha
            )
    assert len({script(name).sha for name in NAMES}) == len(NAMES)


def test_urls() -> None:
    one = open_index("memory://here")
    assert isinstance(one, MemoryIndex)
    other = open_index("memory://here", parse_config({"store": "memory://here"}))
    assert isinstance(other, MemoryIndex) and other.state is one.state
    assert open_index("memory://there").identity() != one.identity()
    assert isinstance(open_index("redis://127.0.0.1:1"), RedisIndex)
    with pytest.raises(ConfigError, match="redis"):
        open_index("mooncake://x")
    with pytest.raises(StoreUnavailable):
        open_index("redis://127.0.0.1:1").identity()
