"""What one caller of the index says of itself."""

from __future__ import annotations

import msgspec


class IndexOptions(msgspec.Struct, frozen=True, kw_only=True):
    """engine: a name for `SessionState.engines`; empty: not recorded. tenant: whose limits count.
    sessions_max, pinned_bytes_max: the tenant's; 0 sessions: no limit, 0 bytes: no pins.
    high_water: share of a node's capacity beyond which a save names victims, so that the next
    finds room. timeout_s, connect_timeout_s: of one call to the server."""

    engine: str = ""
    tenant: str = "default"
    sessions_max: int = 0
    pinned_bytes_max: int = 1 << 30
    high_water: float = 0.97
    timeout_s: float = 1.0
    connect_timeout_s: float = 1.0
