"""The snapshot over the admin API: how memory is doing, and the whole of it for another router.

The data process holds the snapshot; here it is only passed on. A chunk is asked for when the client has taken the one
before, so a slow client costs one chunk of memory and the link stays free for everything else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec
from aiohttp import web
from msgspec import Struct

from warmfront.control.link import Link, Reply
from warmfront.errors import OverloadedError

logger = logging.getLogger(__name__)

QUESTION = "snapshot"
OPEN_TIMEOUT_S = 60.0
"""Copying and writing the snapshot of a large fleet."""
CONTENT_TYPE = "application/vnd.warmfront.snapshot"


class Ask(Struct, frozen=True, omit_defaults=True):
    """What the data process is asked; without fields: how memory is doing."""

    open: bool = False
    export: int | None = None
    """Number of an export, for the chunk at `offset`."""
    offset: int = 0
    close: bool = False


class Opened(Struct, frozen=True):
    """A snapshot that waits to be fetched."""

    export: int
    bytes: int


class Snapshots:
    """Handlers."""

    def __init__(self, link: Link, *, timeout_s: Callable[[], float]) -> None:
        self._link = link
        self._timeout_s = timeout_s

    async def state(self, request: web.Request) -> web.Response:
        """Answer how memory is doing: the last file, what was restored, what was refused and why."""
        reply = await self._ask(Ask())
        return web.Response(status=reply.status, body=reply.body, content_type="application/json")

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Stream the snapshot as it is now, in the format of the file."""
        reply = await self._ask(Ask(open=True), timeout_s=OPEN_TIMEOUT_S)
        if reply.status != 200:
            raise OverloadedError("no snapshot can be given now; try again")
        opened = msgspec.json.decode(reply.body, type=Opened)
        try:
            return await self._pass_on(request, opened)
        finally:
            await self._ask(Ask(export=opened.export, close=True))

    async def _pass_on(self, request: web.Request, opened: Opened) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": CONTENT_TYPE})
        response.content_length = opened.bytes
        await response.prepare(request)
        offset = 0
        while offset < opened.bytes:
            chunk = await self._ask(Ask(export=opened.export, offset=offset))
            if chunk.status != 200 or not chunk.body:
                logger.warning(
                    "a snapshot ends after %d of %d bytes: the data process has no more", offset, opened.bytes
                )
                assert request.transport is not None
                request.transport.close()  # the client must not take a part for the whole
                return response
            await response.write(chunk.body)
            offset += len(chunk.body)
        await response.write_eof()
        return response

    async def _ask(self, ask: Ask, *, timeout_s: float | None = None) -> Reply:
        payload = b"" if ask == Ask() else msgspec.json.encode(ask)
        return await self._link.ask(QUESTION, payload=payload, timeout_s=timeout_s or self._timeout_s())


def routes(link: Link, *, timeout_s: Callable[[], float]) -> list[web.RouteDef]:
    """Return the paths of this module.

    Args:
        link: To the data process.
        timeout_s: Tells the time for each of its answers; it may change.
    """
    snapshots = Snapshots(link, timeout_s=timeout_s)
    return [
        web.get("/admin/snapshot", snapshots.stream, allow_head=False),
        web.get("/admin/snapshot/state", snapshots.state),
    ]
