"""A lock around an in-process index, which the index client and the janitor share.

A server runs one script at a time; `memory://` has to be given that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

from store_worker.index.base import SessionIndex

_LOCK = threading.RLock()


class _Locked:
    """Every method of the index, one at a time. Any thread."""

    def __init__(self, index: SessionIndex) -> None:
        self._index = index

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._index, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            with _LOCK:
                return method(*args, **kwargs)

        return call


def locked(index: SessionIndex) -> SessionIndex:
    """The same index, safe to be called from several threads. One lock for the process."""
    return cast(SessionIndex, _Locked(index))
