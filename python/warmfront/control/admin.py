"""The admin API: what the fleet looks like, why a request would go where, what is configured.

Bound to loopback by default, and to anything else only with a token (`authentication`). Whoever is let in sees
everything but secrets, and may drain and reload (`change.py`). What only the data process knows is asked over the link;
errors have the same form as on the clients' port.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from aiohttp import web
from msgspec import Struct

from warmfront.config import Config, redacted
from warmfront.control import snapshot
from warmfront.control.answers import as_json
from warmfront.control.authentication import authentication
from warmfront.control.fleet import FleetKeeper
from warmfront.control.link import Link, Reply
from warmfront.control.report import fleet_report
from warmfront.errors import (
    BodyTooLargeError,
    ClientError,
    CoreError,
    InvalidRequestError,
    MethodNotAllowedError,
    ModelNotFoundError,
    NoReplicaError,
    PathNotFoundError,
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

EXPLAINABLE = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
"""Paths whose requests are routed by prefix."""


class Admin:
    """Handlers, over what the control process knows and what it may ask."""

    def __init__(self, config: Config, *, link: Link, fleet: FleetKeeper, changes: Sequence[web.RouteDef] = ()) -> None:
        self._config = config
        self._link = link
        self._fleet = fleet
        self._authenticate = authentication(config.control)
        self._changes = changes

    def follow(self, config: Config, fleet: FleetKeeper) -> None:
        """Answer from now on out of another configuration and what was found out under it."""
        self._config, self._fleet = config, fleet

    def application(self) -> web.Application:
        """Return the application to serve."""
        application = web.Application(middlewares=[_in_openai_form, self._authenticate])
        application.add_routes(
            [
                web.get("/health", self.health),
                web.get("/admin/fleet", self.fleet),
                web.get("/admin/config", self.config),
                web.get("/admin/policy", self.policy),
                web.post("/admin/explain", self.explain),
                *self._changes,
                *snapshot.routes(self._link, timeout_s=lambda: self._config.control.answer_timeout_s),
            ]
        )
        return application

    async def health(self, request: web.Request) -> web.Response:
        """Answer that this process lives, and which data process it belongs to."""
        hello = self._link.hello
        return as_json(
            {"status": "ok", "serving": hello.serving if hello else None, "pid": hello.pid if hello else None}
        )

    async def fleet(self, request: web.Request) -> web.Response:
        """Answer everything known about pools and replicas."""
        answer = await self._ask("fleet")
        return as_json(
            fleet_report(self._fleet.update, self._fleet.facts, self._fleet.checks, self._link.state, answer)
        )

    async def config(self, request: web.Request) -> web.Response:
        """Answer the effective configuration; header values are hidden."""
        return as_json(redacted(self._config))

    async def policy(self, request: web.Request) -> web.Response:
        """Answer the policy's name, constants and learned values."""
        return as_json(await self._ask("policy"))

    async def explain(self, request: web.Request) -> web.Response:
        """Answer what would be decided about the request in the body, without dispatching it."""
        path = request.query.get("path", EXPLAINABLE[0])
        if path not in EXPLAINABLE:
            raise InvalidRequestError(f"path: expected one of {', '.join(EXPLAINABLE)}")
        payload = await _body(request, bytes_max=self._config.front.body_bytes_max)
        if not payload:
            raise InvalidRequestError("the body is empty: send the request to explain")
        reply = await self._link.ask(
            "explain", payload=payload, path=path, timeout_s=self._config.control.answer_timeout_s
        )
        if reply.status != 200:
            raise _refusal(reply)
        return web.Response(body=reply.body, content_type="application/json")

    async def _ask(self, question: str) -> dict[str, Any]:
        reply = await self._link.ask(question, timeout_s=self._config.control.answer_timeout_s)
        if reply.status != 200:
            raise CoreError(f"the data process answers {reply.status} to {question!r}")
        return msgspec.json.decode(reply.body, type=dict[str, Any])


async def _body(request: web.Request, *, bytes_max: int) -> bytes:
    """Read a body whole. Not by aiohttp's own bound, which is that of the start."""
    body = bytearray()
    async for chunk in request.content.iter_any():
        body += chunk
        if len(body) > bytes_max:
            raise BodyTooLargeError("the body is over front.body_bytes_max")
    return bytes(body)


class _Problem(Struct, frozen=True):
    """What the router and the core answer when a question has no answer: words, or an OpenAI error."""

    error: str | dict[str, Any]


def _refusal(reply: Reply) -> ClientError:
    """Give a refusal of the data process the form of a client error."""
    try:
        error = msgspec.json.decode(reply.body, type=_Problem).error
    except msgspec.DecodeError:
        return CoreError(f"the data process answers {reply.status}")
    words = error if isinstance(error, str) else str(error.get("message", ""))
    if reply.status == ModelNotFoundError.status:
        return ModelNotFoundError(words)
    if reply.status == NoReplicaError.status:
        return NoReplicaError(words)
    return InvalidRequestError(words) if reply.status < 500 else CoreError(words)


@web.middleware
async def _in_openai_form(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every error into an OpenAI error body."""
    try:
        return await handler(request)
    except ClientError as error:
        return as_json(error.body(), error.status)
    except web.HTTPException as error:
        return as_json(_named(error, request).body(), error.status)


def _named(error: web.HTTPException, request: web.Request) -> ClientError:
    if isinstance(error, web.HTTPMethodNotAllowed):
        return MethodNotAllowedError(f"{request.method} is not allowed here")
    return PathNotFoundError(f"{request.path} is not a path of the admin API")
