"""Reading bodies and making replies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engine_shim.errors import InvalidRequest
from engine_shim.frontend.bodies import BODY_BYTES_MAX
from engine_shim.frontend.run import error_body

Headers = Sequence[tuple[bytes, bytes]]


async def read_body(request: Request) -> bytes:
    """Raises InvalidRequest (413) above the limit, ClientDisconnect."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > BODY_BYTES_MAX:
            raise InvalidRequest(
                f"the body is over {BODY_BYTES_MAX} bytes; send a shorter prompt", status=413
            )
        parts.append(part)
    return b"".join(parts)


def json_reply(value: Any, headers: Headers = (), status: int = 200) -> Response:
    """A JSON reply; headers may hold any bytes."""
    response = Response(msgspec.json.encode(value), status, media_type="application/json")
    response.raw_headers.extend(headers)
    return response


def error_reply(error: Exception, headers: Headers = ()) -> Response:
    """An OpenAI-shaped error."""
    status, body = error_body(error)
    return json_reply(body, headers, status)
