"""The session index: records, the reference in Python, and the server-side one."""

from __future__ import annotations

from connector.clock import Clock
from connector.config import SENTINEL, Config
from connector.errors import ConfigError
from store_worker.index.base import SessionIndex
from store_worker.index.memory import MemoryIndex
from store_worker.index.options import IndexOptions

__all__ = ["IndexOptions", "MemoryIndex", "SessionIndex", "open_index", "options_of"]

_MEMORY: dict[str, MemoryIndex] = {}


def open_index(
    url: str,
    config: Config | None = None,
    options: IndexOptions | None = None,
    clock: Clock | None = None,
) -> SessionIndex:
    """The index at a URL: `redis://`, `rediss://`, `unix://`, `redis+sentinel://`, or
    `memory://NAME` (one per name and process, for tests). Connects when first asked.
    options: instead of those that `config` says.

    Raises ConfigError for another kind of URL.
    """
    if options is None:
        options = IndexOptions() if config is None else options_of(config)
    if url.startswith("memory://"):
        index = _MEMORY.setdefault(url, MemoryIndex(clock, options))
        return index.view(options)
    if url.partition("://")[0] in ("redis", "rediss", "unix", SENTINEL):
        from store_worker.index.redis import RedisIndex

        return RedisIndex(url, options)
    raise ConfigError("store.index", url, "a redis://, rediss://, unix:// or memory:// URL")


def options_of(config: Config) -> IndexOptions:
    """What a config says to the index."""
    return IndexOptions(
        tenant=config.tenant,
        sessions_max=config.sessions_max,
        pinned_bytes_max=config.pinned_bytes_max,
        timeout_s=config.index_timeout_s,
        connect_timeout_s=config.connect_timeout_s,
    )
