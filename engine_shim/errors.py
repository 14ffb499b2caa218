"""What the shim raises on purpose.

    ShimError
    ├── InvalidRequest           the client's fault; the front end answers 4xx
    ├── EngineDead               the engine process ended or can't be reached
    ├── EngineTimeout            no answer within the deadline; the engine may still live
    ├── RequestFailed            this one request ended in an engine-side error
    └── ConnectorContractError   a connector broke `connector_port`; stops the engine
"""

from __future__ import annotations


class ShimError(Exception):
    """Root of the shim's errors."""


class InvalidRequest(ShimError, ValueError):
    """A request that can't be served as sent. Safe to show to the client.

    param: the offending field, as the client names it. code: short machine-readable reason.
    status: HTTP status the front end answers with.
    """

    error_type = "invalid_request_error"

    def __init__(
        self, message: str, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message)
        self.message, self.param, self.code, self.status = message, param, code, status

    def as_openai(self) -> dict[str, dict[str, object]]:
        """The body of the error reply, in OpenAI's shape."""
        return {
            "error": {
                "message": self.message,
                "type": self.error_type,
                "param": self.param,
                "code": self.code,
            }
        }


class EngineDead(ShimError):
    """The engine process ended. Every caller that waits for it gets this."""


class EngineTimeout(ShimError):
    """The engine did not answer within the caller's deadline."""


class RequestFailed(ShimError):
    """The engine gave up on one request; others go on."""


class ConnectorContractError(ShimError):
    """A connector did what `connector_port` forbids. A bug: the engine stops."""
