"""The proxy's way to the session index: the proxy's composition root."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from connector.clock import Clock, SystemClock
from connector.config import Config
from connector.errors import StoreError
from connector.ids import BlockHash, Namespace
from engine_shim.pd_proxy import Committed
from store_worker.assemble import resolve_store
from store_worker.cli.options import config_of
from store_worker.index import open_index
from store_worker.inspect import where

T = TypeVar("T")
TIP_POLL_MIN_S, TIP_POLL_MAX_S = 0.002, 0.02


class ProxyStore:
    """`pd_proxy.StorePort` over the session index. One index call at a time, off the event loop."""

    def __init__(self, config: Config, clock: Clock) -> None:
        self._config = config
        store, self._embedded = resolve_store(self._config, clock)
        self._index = open_index(store.index, self._config)
        self._clock = clock
        self._turn = asyncio.Lock()

    async def _ask(self, call: Callable[..., T], *args: Any) -> T:
        async with self._turn:
            return await asyncio.to_thread(call, *args)

    async def wait_committed(self, namespace: str, tip: str, timeout_s: float) -> Committed:
        """See StorePort. Looks again after 2 ms, then less and less often, up to 20 ms."""
        where, block = Namespace(bytes.fromhex(namespace)), BlockHash(bytes.fromhex(tip))
        end = self._clock.now() + timeout_s
        again_s = TIP_POLL_MIN_S
        try:
            while await self._ask(self._index.awaited, where, block):
                if self._clock.now() >= end:
                    return Committed.LATE
                await asyncio.sleep(again_s)
                again_s = min(again_s * 1.5, TIP_POLL_MAX_S)
            (listed,) = await self._ask(self._index.probe, where, [block])
        except StoreError:
            return Committed.UNKNOWN
        return Committed.YES if listed else Committed.ABANDONED

    async def where(self, session_id: str, cache_salt: str | None) -> dict[str, Any] | None:
        """See StorePort."""
        found = await self._ask(where, self._index, self._config, session_id, cache_salt)
        return None if found is None else msgspec.to_builtins(found)

    async def aclose(self) -> None:
        """See StorePort."""
        if self._embedded is not None:
            self._embedded.close()


def open_proxy_store(store: str, tenant: str) -> ProxyStore:
    """The proxy's way to the index. store: as `--store` takes it. Raises ConfigError."""
    options = argparse.Namespace(store=store, tenant=tenant)
    return ProxyStore(config_of(options), SystemClock())
