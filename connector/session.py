"""Which conversation a request belongs to: one answer from every entrance of an engine.

Pure functions. Leaf module: standard library only.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence

from connector.errors import SessionIdError
from connector.ids import SessionKey

SESSION_ID_BYTES_MAX = 256
DEFAULT_HEADERS: tuple[str, ...] = ("X-Session-ID",)
FIELD = "session_id"
_DIGEST_BYTES = 16


def resolve_session_id(
    body: object = None,
    headers: Mapping[str, str] | None = None,
    xargs: Mapping[str, object] | None = None,
    kv_transfer_params: Mapping[str, object] | None = None,
    header_names: Sequence[str] = DEFAULT_HEADERS,
) -> str | None:
    """The request's session id, or None.

    Order: `body` (the value of the body field `session_id`), then each of `header_names` in turn
    (names compared without case), then `xargs["session_id"]`, then
    `kv_transfer_params["session_id"]`. Empty strings and non-strings never count.
    Raises SessionIdError if the first value that counts is not acceptable (see `check_session_id`).
    """
    for value in _candidates(body, headers, xargs, kv_transfer_params, header_names):
        if isinstance(value, str) and value:
            return check_session_id(value)
    return None


def _candidates(
    body: object,
    headers: Mapping[str, str] | None,
    xargs: Mapping[str, object] | None,
    params: Mapping[str, object] | None,
    header_names: Sequence[str],
) -> list[object]:
    found: list[object] = [body]
    if headers:
        lower = {name.lower(): value for name, value in headers.items()}
        found += [lower.get(name.lower()) for name in header_names]
    for source in (xargs, params):
        found.append(source.get(FIELD) if isinstance(source, Mapping) else None)
    return found


def check_session_id(value: str) -> str:
    """`value` itself if it is acceptable.

    Raises SessionIdError if it is longer than 256 bytes of UTF-8, can't be encoded, or has
    control characters: an id is never cut short, since two ids could then become one.
    """
    try:
        length_bytes = len(value.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise SessionIdError("session id is not valid Unicode (it has lone surrogates)") from error
    if length_bytes > SESSION_ID_BYTES_MAX:
        raise SessionIdError(
            f"session id is {length_bytes} bytes long, at most {SESSION_ID_BYTES_MAX} are accepted;"
            " send a shorter id (a UUID has 36)"
        )
    if any(ord(char) < 32 or 127 <= ord(char) < 160 for char in value):
        raise SessionIdError("session id has control characters; send printable text")
    return value


def session_key(secret: bytes, tenant: str, cache_salt: str | None, session_id: str) -> SessionKey:
    """HMAC-SHA256 of (tenant, cache salt, id), 16 bytes: no tenant can name another's session.

    Each part is preceded by its length, so that no two triples give the same message.
    """
    parts = (tenant.encode(), (cache_salt or "").encode(), session_id.encode())
    message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return SessionKey(hmac.new(secret, message, hashlib.sha256).digest()[:_DIGEST_BYTES])


def short(key: bytes) -> str:
    """A session key as it may appear in a log line: the first 8 hex digits."""
    return key[:4].hex() if key else "-"
