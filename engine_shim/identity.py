"""Who a request belongs to: one resolution for every entrance, and what is left afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from connector.errors import SessionIdError
from connector.session import DEFAULT_HEADERS, FIELD, resolve_session_id
from engine_shim.errors import InvalidRequest


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
