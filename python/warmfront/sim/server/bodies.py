"""Request bodies in, error bodies out, in vLLM's shapes."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from warmfront.errors import ClientError, InvalidRequestError
from warmfront.sim.server.dialect import Body

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class NotFoundError(ClientError):
    """No such model."""

    status = 404
    type = "NotFoundError"


class OverloadError(ClientError):
    """The queue is full. vLLM sends no `Retry-After` with it."""

    status = 503
    type = "Service Unavailable"


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer errors in vLLM's shape; its `code` is the HTTP status."""
    try:
        return await handler(request)
    except ClientError as error:
        kind = "BadRequestError" if isinstance(error, InvalidRequestError) else error.type
        content = {"message": str(error), "type": kind, "param": None, "code": error.status}
        if request.path.startswith("/v1/messages"):
            body: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": str(error)}}
        else:
            body = {"error": content}
        return web.json_response(body, status=error.status)
    except web.HTTPNotFound:
        return web.json_response({"detail": "Not Found"}, status=404)
    except web.HTTPMethodNotAllowed:
        return web.json_response({"detail": "Method Not Allowed"}, status=405)


async def body_of(request: web.Request) -> Body:
    """Return the JSON object in a request.

    Raises:
        InvalidRequestError: There is none.
    """
    raw = await request.read()
    try:
        body = json.loads(raw)
        if b"\\u" in raw or b"\xed" in raw:  # the two ways to write half of a surrogate pair, which is no text
            json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidRequestError("the body must be a JSON object")
    return body


def string_of(body: Body, name: str) -> str:
    """Return a field that must be a string.

    Raises:
        InvalidRequestError: It is not.
    """
    value = body.get(name)
    if not isinstance(value, str):
        raise InvalidRequestError(f"{name} must be a string")
    return value
