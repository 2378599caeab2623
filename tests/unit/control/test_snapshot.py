"""The snapshot over the admin API: passed on in order, at the client's pace, and never a part for the whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from warmfront.control import snapshot
from warmfront.control.link import Link, Reply, UnansweredError

Client = TestClient[Any, Any]
CHUNK = 1000


class Holder(Link):
    """The data process as far as snapshots go, without a socket."""

    def __init__(self, content: bytes) -> None:
        self.content, self.said = content, len(content)
        self.asked: list[dict[str, Any]] = []
        self.refuses = False
        self.closed = asyncio.Event()

    async def ask(self, question: str, *, payload: bytes = b"", path: str = "", timeout_s: float) -> Reply:
        assert question == "snapshot"
        ask: dict[str, Any] = msgspec.json.decode(payload) if payload else {}
        self.asked.append(ask)
        if self.refuses:
            return Reply(1, 503, b"{}")
        if ask.get("open"):
            return Reply(1, 200, msgspec.json.encode({"export": 4, "bytes": self.said}))
        if ask.get("close"):
            self.closed.set()
            return Reply(1, 200, b"")
        if "export" in ask:
            offset = ask.get("offset", 0)
            return Reply(1, 200, self.content[offset : offset + CHUNK])
        return Reply(1, 200, b'{"failures": 0}')


@pytest.fixture
def holder() -> Holder:
    return Holder(bytes(range(256)) * 40)


@pytest.fixture
async def admin(holder: Holder) -> AsyncIterator[Client]:
    application = web.Application()
    application.add_routes(snapshot.routes(holder, timeout_s=lambda: 1.0))
    async with TestClient(TestServer(application)) as client:
        yield client


async def test_the_snapshot_arrives_whole_and_is_given_back(admin: Client, holder: Holder) -> None:
    answer = await admin.get("/admin/snapshot")
    assert (answer.status, answer.headers["content-type"]) == (200, snapshot.CONTENT_TYPE)
    assert await answer.read() == holder.content
    assert [ask.get("offset", 0) for ask in holder.asked[1:-1]] == list(range(0, len(holder.content), CHUNK))
    assert holder.asked[-1] == {"export": 4, "close": True}


async def test_a_snapshot_that_ends_early_is_an_error_for_the_client(admin: Client, holder: Holder) -> None:
    holder.said += 1
    answer = await admin.get("/admin/snapshot")
    with pytest.raises(aiohttp.ClientPayloadError):
        await answer.read()
    assert holder.asked[-1] == {"export": 4, "close": True}


async def test_a_client_that_leaves_gives_the_snapshot_back(admin: Client, holder: Holder) -> None:
    holder.content = b"x" * (64 * 1024 * 1024)
    holder.said = len(holder.content)
    answer = await admin.get("/admin/snapshot")
    answer.close()
    async with asyncio.timeout(10):
        await holder.closed.wait()
    assert len(holder.asked) < len(holder.content) / CHUNK, "it was read at the client's pace"


async def test_the_state_is_passed_on(admin: Client) -> None:
    assert await (await admin.get("/admin/snapshot/state")).json() == {"failures": 0}


async def test_a_data_process_that_gives_none_is_an_overload(holder: Holder) -> None:
    holder.refuses = True
    with pytest.raises(Exception, match="try again") as caught:
        await snapshot.Snapshots(holder, timeout_s=lambda: 1.0).stream(_request())
    assert not isinstance(caught.value, UnansweredError)
    assert getattr(caught.value, "status", None) == 503


def _request() -> web.Request:
    from aiohttp.test_utils import make_mocked_request

    return make_mocked_request("GET", "/admin/snapshot")
