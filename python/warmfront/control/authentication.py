"""Who may use the admin API: a middleware over all routes, so that a new route is closed until somebody opens it."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Middleware

from warmfront.config import ControlConfig
from warmfront.control.files import read_secret
from warmfront.control.security import Watched
from warmfront.errors import AuthenticationError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

OPEN_PATHS = frozenset({"/health"})
"""Admin paths that need no token: they tell that the process lives and nothing else of use."""


def authentication(control: ControlConfig) -> Middleware:
    """Return the middleware that lets only bearers of the token past; without a token file, everybody.

    Raises:
        ConfigError: The token cannot be read.
    """
    path = control.admin_token_file
    token = None if path is None else Watched("control.admin_token_file", [path], lambda: read_secret(path))

    @web.middleware
    async def authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
        if token is not None and request.path not in OPEN_PATHS and not _is_bearer(request, token.current()):
            raise AuthenticationError("the admin API needs its token: send it as `Authorization: Bearer`")
        return await handler(request)

    return authenticate


def _is_bearer(request: web.Request, token: str) -> bool:
    given = request.headers.getall("Authorization", [])
    if len(given) != 1:
        return False
    scheme, _, offered = given[0].partition(" ")
    return scheme.lower() == "bearer" and _is_equal(offered.strip(), token)


def _is_equal(offered: str, secret: str) -> bool:
    """Compare in a time that tells nothing, not even the length."""
    digests = (hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest() for text in (offered, secret))
    return hmac.compare_digest(*digests)
