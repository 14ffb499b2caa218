"""What people and routers ask of a store, from Python: `where` a session lives.

Thread: the caller's; one call to the index each.
"""

from __future__ import annotations

import msgspec

from connector.config import Config
from connector.ids import SessionKey
from connector.session import check_session_id, session_key
from store_worker.index.base import SessionIndex


class Where(msgspec.Struct, frozen=True):
    """Where a conversation is. home: the node its new blocks go to, None before the first.
    tokens: of its longest stored chain. engines: that last used it, newest first."""

    home: str | None
    tokens: int
    blocks: int
    turns: int
    last_use_ms: int
    engines: tuple[str, ...]


def key_of(
    index: SessionIndex, config: Config, session_id: str, cache_salt: str | None = None
) -> SessionKey:
    """The session's name in the index. Raises SessionIdError, StoreError."""
    secret = bytes.fromhex(config.session_secret) or index.identity().secret
    return session_key(secret, config.tenant, cache_salt, check_session_id(session_id))


def where(
    index: SessionIndex, config: Config, session_id: str, cache_salt: str | None = None
) -> Where | None:
    """None if the index knows no such session of this tenant. Raises SessionIdError, StoreError."""
    state = index.session(key_of(index, config, session_id, cache_salt))
    if state is None:
        return None
    return Where(
        home=state.home,
        tokens=state.tokens,
        blocks=state.blocks,
        turns=state.turns,
        last_use_ms=state.last_use_ms,
        engines=state.engines,
    )
