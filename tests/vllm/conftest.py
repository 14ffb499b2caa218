"""Fixtures of the tests with vLLM: stores, engines around vLLM's scheduler, and real servers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from store_worker.index.redis import RedisIndex
from tests.servers import Server
from tests.waiting import eventually

if TYPE_CHECKING:
    from tests.vllm.dialogs import Reference
    from tests.vllm.scheduler_kit import Engine


@dataclass
class Store:
    """An index and data nodes, each a real server of its own, so that one can fail alone."""

    index: Server
    nodes: list[Server]

    @property
    def data(self) -> Server:
        """The first data node."""
        return self.nodes[0]

    @property
    def urls(self) -> dict[str, object]:
        """The config key `store`."""
        return {"index": self.index.url, "data": [node.url for node in self.nodes]}

    def pause_data(self) -> None:
        """Stop the first data node once the index knows it: before, a save would find no node, and
        be declined instead of kept waiting."""
        index = RedisIndex(self.index.url)
        eventually(lambda: any(node.up for node in index.nodes()), 20, "a node that is up")
        index.close_connections()
        self.data.pause()

    def objects(self) -> dict[bytes, bytes]:
        """Every object of the first data node, by key."""
        with self.data.client() as client:
            keys = list(client.scan_iter(match="skvo:*", count=1000))
            return dict(zip(keys, client.mget(keys) if keys else [], strict=True))


@pytest.fixture
def store() -> Iterator[Store]:
    """One index and one data node, empty."""
    with Server() as index, Server() as data:
        yield Store(index, [data])


@dataclass
class Engines:
    """Makes engines on one store, and closes them."""

    store: Store
    made: list[Engine]
    stack: contextlib.ExitStack

    def __call__(
        self, transfer: Mapping[str, object] | None = None, kit: Any = None, **extra: object
    ) -> Engine:
        """An engine with our connector. kit: arguments of Engine; extra: keys of its config."""
        from tests.vllm.scheduler_kit import Engine
        from tests.vllm.servers import transfer_config

        config = transfer or transfer_config(self.store.urls, **extra)
        engine = self.stack.enter_context(Engine(config, **(kit or {})))
        self.made.append(engine)
        return engine


@pytest.fixture
def engines(store: Store) -> Iterator[Engines]:
    """Engines on `store`. Afterwards a paused server goes on, and every engine is closed."""
    with contextlib.ExitStack() as stack:
        yield Engines(store, [], stack)
        for server in (store.index, *store.nodes):
            with contextlib.suppress(AssertionError, ProcessLookupError):
                server.resume()


Solo = Callable[..., list[int]]


@pytest.fixture(scope="session")
def solo() -> Iterator[Solo]:
    """The tokens that an engine without a connector gives, computed from nothing."""
    from tests.vllm.scheduler_kit import Engine

    known: dict[tuple[object, ...], list[int]] = {}
    with Engine(None) as engine:

        def answer(tokens: Sequence[int], max_tokens: int = 4, **more: object) -> list[int]:
            key = (tuple(tokens), max_tokens, tuple(sorted(more.items())))
            if key not in known:
                engine.run_all()
                assert engine.scheduler.reset_prefix_cache()
                text = engine.answer(f"solo-{len(known)}", tokens, max_tokens, **more)
                assert text.cached == 0
                known[key] = text.tokens
            return known[key]

        yield answer


@pytest.fixture(scope="session")
def reference() -> Iterator[Reference]:
    """A vLLM server without a connector."""
    from tests.vllm.dialogs import Reference
    from tests.vllm.servers import Spec, running

    with running(Spec("reference")) as (server,):
        made = Reference(server)
        yield made
        made.close()
