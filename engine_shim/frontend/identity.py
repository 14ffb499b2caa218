"""Who a request belongs to: one resolution for every entrance, and what is left afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from connector.errors import SessionIdError
from connector.session import DEFAULT_HEADERS, FIELD, resolve_session_id
from engine_shim.errors import InvalidRequest

REPLY_HEADER = "X-Session-ID"


class Identity(msgspec.Struct, frozen=True):
    """One identity. No copy of the id is left in xargs or kv_transfer_params."""

    session_id: str | None = None
    xargs: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None


def identify(
    body: object = None,
    headers: Mapping[str, str] | None = None,
    xargs: Mapping[str, Any] | None = None,
    kv_transfer_params: Mapping[str, Any] | None = None,
    header_names: Sequence[str] = DEFAULT_HEADERS,
) -> Identity:
    """`connector.session.resolve_session_id`, with the copies of the id removed.

    headers: None for a caller without HTTP. Raises InvalidRequest for an id that is present and
    not acceptable.
    """
    try:
        session_id = resolve_session_id(body, headers, xargs, kv_transfer_params, header_names)
    except SessionIdError as error:
        raise InvalidRequest(str(error), param=FIELD, code="invalid_session_id") from error
    return Identity(session_id, _without_id(xargs), _without_id(kv_transfer_params))


def _without_id(source: Mapping[str, Any] | None) -> dict[str, Any] | None:
    left = {key: value for key, value in (source or {}).items() if key != FIELD}
    return left or None


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
