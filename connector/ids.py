"""Ids that travel between the engine, the connector and the store. All are opaque.

Leaf module: standard library only.
"""

from __future__ import annotations

from typing import NewType

RequestId = NewType("RequestId", str)
"""The engine's id of one request; a preempted request keeps it."""

JobId = NewType("JobId", int)
"""One transfer. Never reused within a process, so a late report can't settle another job."""

BlockId = NewType("BlockId", int)
"""Index of a page in the engine's paged KV cache."""

BlockHash = NewType("BlockHash", bytes)
"""The engine's own chained hash of a full block (32 bytes with sha256). Equal at depth d means
that the first d blocks are equal."""

SessionKey = NewType("SessionKey", bytes)
"""HMAC of (tenant, cache salt, session id): the only form in which an id leaves a process."""

Generation = NewType("Generation", int)
"""One life of a session id, drawn from the index's global counter."""

NodeId = NewType("NodeId", str)
"""Stable name of one data server, the same for every engine (host:port/db, or a socket path)."""

RunId = NewType("RunId", int)
"""One run: consecutive blocks of one chain, saved together on one node."""

GrantId = NewType("GrantId", int)
"""Room promised to one save."""

Namespace = NewType("Namespace", bytes)
"""16-byte digest of everything that changes the bytes or the meaning of a block."""

NO_HASH = BlockHash(b"")
"""The parent of a chain's first block."""

NO_NAMESPACE = Namespace(b"")
NO_SESSION = SessionKey(b"")
"""A chain without a session id: placed and evicted as a pseudo-session of its own."""

NO_GENERATION = Generation(0)
NO_GRANT = GrantId(0)
NO_NODE = NodeId("")
