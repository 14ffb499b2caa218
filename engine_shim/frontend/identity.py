"""Session ids in HTTP headers, in and out."""

from __future__ import annotations

from collections.abc import Sequence

REPLY_HEADER = "X-Session-ID"


def header_text(raw: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    """Headers of an ASGI scope as text: UTF-8 where it is valid, else Latin-1.

    With UTF-8 an id that a client sends as it got it from us is the same id again. The first of
    several equal names wins.
    """
    found: dict[str, str] = {}
    for name, value in raw:
        found.setdefault(name.decode("latin-1").lower(), _text(value))
    return found


def _text(value: bytes) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return value.decode("latin-1")


def reply_header(session_id: str | None) -> list[tuple[bytes, bytes]]:
    """The reply's `X-Session-ID`, if there is an id.

    UTF-8. A space at either end, which no header can carry, is percent-encoded.
    """
    if session_id is None:
        return []
    core = session_id.strip(" ")
    lead = len(session_id) - len(session_id.lstrip(" "))
    tail = len(session_id) - lead - len(core)
    value = "%20" * lead + core + "%20" * tail
    return [(REPLY_HEADER.lower().encode(), value.encode())]
