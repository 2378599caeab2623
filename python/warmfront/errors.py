"""Everything that can go wrong, as one tree.

    WarmfrontError
    ├── ConfigError                  never reaches a client
    ├── EventStreamError             never reaches a client
    ├── UnknownRequestError          never reaches a client
    ├── CoreError                    500
    └── ClientError                  has a face: status, type, code
        ├── InvalidRequestError      400 · PromptTooLongError 400 · AuthenticationError 401 · ModelNotFoundError 404
        │                            PathNotFoundError 404 · MethodNotAllowedError 405 · RequestTimeoutError 408
        │                            BodyTooLargeError 413 · UriTooLongError 414 · UnsupportedEncodingError 415
        │                            HeadersTooLargeError 431
        ├── CapacityError
        │   ├── RateLimitedError 429 · ShedError 429 · QueueTimeoutError 429
        │   └── NoReplicaError 503 · OverloadedError 503
        └── UpstreamError
            └── UpstreamConnectError 502 · UpstreamTimeoutError 504

Each class carries its HTTP face, so no second table exists in Python; the core's table is compared with it by a test.
"""

from __future__ import annotations

from typing import Any, ClassVar


class WarmfrontError(Exception):
    """Anything warmfront raises on purpose."""


class ConfigError(WarmfrontError):
    """The configuration is wrong; the message names path and source."""


class EventStreamError(WarmfrontError):
    """A KV event stream cannot be used."""


class UnknownRequestError(WarmfrontError, LookupError):
    """The core no longer knows the request: its client has left."""


class ClientError(WarmfrontError):
    """An error with a face in the OpenAI error format."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"

    def body(self) -> dict[str, Any]:
        """Return the OpenAI error body."""
        return {"error": {"message": str(self), "type": self.type, "param": None, "code": self.code}}


class CoreError(ClientError):
    """The core failed; a client sees 500 without internals."""


class InvalidRequestError(ClientError):
    """The request cannot be read."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_body"


class PromptTooLongError(InvalidRequestError):
    """The prompt does not fit the model's context."""

    code = "context_length_exceeded"


class AuthenticationError(InvalidRequestError):
    """No valid API key."""

    status = 401
    code = "invalid_api_key"


class ModelNotFoundError(InvalidRequestError):
    """No pool serves this model."""

    status = 404
    code = "model_not_found"


class PathNotFoundError(InvalidRequestError):
    """Not a path that reaches engines."""

    status = 404
    code = "path_not_found"


class MethodNotAllowedError(InvalidRequestError):
    """The path exists, the method does not."""

    status = 405
    code = "method_not_allowed"


class RequestTimeoutError(InvalidRequestError):
    """The client took too long to send its request."""

    status = 408
    code = "request_timeout"


class BodyTooLargeError(InvalidRequestError):
    """The body is over the limit."""

    status = 413
    code = "body_too_large"


class UriTooLongError(InvalidRequestError):
    """The path is over the limit."""

    status = 414
    code = "uri_too_long"


class UnsupportedEncodingError(InvalidRequestError):
    """The body is compressed. None of the encodings is taken."""

    status = 415
    code = "unsupported_encoding"


class HeadersTooLargeError(InvalidRequestError):
    """The header is over the limit."""

    status = 431
    code = "headers_too_large"


class CapacityError(ClientError):
    """No room at the moment."""


class RateLimitedError(CapacityError):
    """The client asks too often."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class ShedError(CapacityError):
    """No replica has room and the request may be refused."""

    status = 429
    type = "rate_limit_error"
    code = "fleet_saturated"


class QueueTimeoutError(CapacityError):
    """The request waited for room as long as it may."""

    status = 429
    type = "rate_limit_error"
    code = "queue_timeout"


class NoReplicaError(CapacityError):
    """Nothing is ready."""

    status = 503
    type = "service_unavailable_error"
    code = "no_ready_replica"


class OverloadedError(CapacityError):
    """The router itself has no room."""

    status = 503
    type = "service_unavailable_error"
    code = "router_overloaded"


class UpstreamError(ClientError):
    """An engine could not be used."""


class UpstreamConnectError(UpstreamError):
    """No choice could be reached."""

    status = 502
    code = "upstream_unreachable"


class UpstreamTimeoutError(UpstreamError):
    """An engine accepted the request and did not answer in time."""

    status = 504
    code = "upstream_timeout"
