"""Session-aware KV connector: the engine-neutral half.

`connector.SessionKVConnector` is the vLLM plugin's class; it is imported only when asked for, so
that importing this package needs neither vLLM nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from connector.vllm_adapter import SessionKVConnector

__all__ = ["SessionKVConnector"]


def __getattr__(name: str) -> Any:
    if name == "SessionKVConnector":
        from connector.vllm_adapter import SessionKVConnector

        return SessionKVConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
