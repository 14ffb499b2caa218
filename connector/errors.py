"""The error tree.

    SessionKVError
    ├── ConfigError          a config value that can't work; stops the start
    ├── SessionIdError       a session id a client sent that is not acceptable (HTTP 400)
    ├── HintError            a malformed kv_hints envelope (HTTP 400 in the shim, ignored in vLLM)
    ├── UnsupportedError     a model or deployment this version can't serve; stops the start
    ├── WireError            peers that do not speak the same protocol
    └── StoreError           the world's failures: results, not bugs; never reach a request
        ├── StoreUnavailable     no connection, or it broke
        ├── StoreTimeout         no answer within the deadline
        └── StoreFull            the server refused a write for want of memory

A missing or corrupt object is an outcome (`meta.BlockOutcome`), not an exception.

Leaf module: standard library only.
"""

from __future__ import annotations


class SessionKVError(Exception):
    """Root of every error this project raises on purpose."""


class ConfigError(SessionKVError):
    """A config value that can't work. The message names key, value, expectation and remedy."""

    def __init__(self, key: str, value: object, expected: str, hint: str = "") -> None:
        self.key, self.value, self.expected, self.hint = key, value, expected, hint
        tail = f"; {hint}" if hint else ""
        super().__init__(f"config key {key!r} = {value!r}: expected {expected}{tail}")


class SessionIdError(SessionKVError):
    """A session id that is present but not acceptable. Safe to show to the client."""


class HintError(SessionKVError):
    """A malformed kv_hints envelope. Safe to show to the client."""


class UnsupportedError(SessionKVError):
    """A model or deployment that can't be served; says what to do instead."""


class WireError(SessionKVError):
    """Two peers whose message formats differ."""


class StoreError(SessionKVError):
    """A failure of the store or of the way to it. Becomes a miss or a declined save."""


class StoreUnavailable(StoreError):
    """No connection to the server, or the connection broke."""


class StoreTimeout(StoreError):
    """The server did not answer within the deadline."""


class StoreFull(StoreError):
    """The server refused a write because its memory is full."""
