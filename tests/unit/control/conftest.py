"""Engine servers that replay recorded vLLM answers, and a core that speaks the control link, both on real sockets."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "vllm"
DEADLINE_S = 10.0


def recorded(name: str) -> str:
    return (FIXTURES / name).read_text(encoding="utf-8")


async def until(condition: Callable[[], Any], what: str = "the condition") -> Any:
    """Wait for something true, and return it."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not (result := condition()):
        assert time.monotonic() < deadline_s, f"{what} did not come true"
        await asyncio.sleep(0.005)
    return result


def card(name: str, *, parent: str | None = None, root: str | None = None, length: int | None = 4096) -> dict[str, Any]:
    """One entry of `/v1/models`, as vLLM gives it."""
    return {
        "id": name,
        "object": "model",
        "created": 1796021790,
        "owned_by": "vllm",
        "root": root or f"/models/{name}",
        "parent": parent,
        "max_model_len": length,
        "permission": [],
    }


class RecordedEngine:
    """An engine server whose answers are set by the test; `None` means that the path does not exist."""

    def __init__(self) -> None:
        self.health = 200
        self.metrics: str | None = recorded("metrics.txt")
        self.models: list[dict[str, Any]] = [card("tiny")]
        self.models_status = 200
        self.version: str | None = "0.32.0"
        self.sources: dict[str, Any] | None = {
            "0": {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": "tcp://*:5640",
                "replay_endpoint": "tcp://*:5650",
                "buffer_steps": 10000,
                "hwm": 100000,
                "max_queue_size": 100000,
                "topic": "kv-events",
            }
        }
        self.raw: dict[str, bytes] = {}
        self.statuses: dict[str, int] = {}
        self.posts: dict[str, Callable[[dict[str, Any]], tuple[int, Any]]] = {}
        self.hold: asyncio.Event | None = None
        self.asked: list[str] = []
        self.headers: list[dict[str, str]] = []
        self._runner: web.AppRunner | None = None
        self._port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def start(self) -> None:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        self._port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        self._runner = None

    async def _answer(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        if self.hold is not None:
            await self.hold.wait()
        if request.path in self.statuses:
            return web.json_response({"error": "scaling"}, status=self.statuses[request.path])
        if request.path in self.raw:
            return web.Response(body=self.raw[request.path])
        if request.method == "POST":
            if request.path not in self.posts:
                return web.json_response({"detail": "Not Found"}, status=404)
            status, body = self.posts[request.path](await request.json())
            return web.json_response(body, status=status)
        answers: dict[str, Callable[[], web.Response | None]] = {
            "/health": lambda: web.Response(status=self.health),
            "/metrics": lambda: None if self.metrics is None else web.Response(text=self.metrics),
            "/v1/models": lambda: web.json_response({"object": "list", "data": self.models}, status=self.models_status),
            "/version": lambda: None if self.version is None else web.json_response({"version": self.version}),
            "/kv_event_sources": lambda: None if self.sources is None else web.json_response(self.sources),
        }
        found = answers.get(request.path, lambda: None)()
        return found or web.json_response({"detail": "Not Found"}, status=404)


@pytest.fixture
async def engine_server() -> AsyncIterator[Callable[[], Awaitable[RecordedEngine]]]:
    """Start engine servers; they end with the test."""
    servers: list[RecordedEngine] = []

    async def start() -> RecordedEngine:
        server = RecordedEngine()
        await server.start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        if server.hold is not None:
            server.hold.set()
        await server.stop()


@pytest.fixture
async def engine(engine_server: Callable[[], Awaitable[RecordedEngine]]) -> RecordedEngine:
    return await engine_server()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


class FakeCore:
    """The core's end of the control link."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.frames: list[dict[str, Any]] = []
        self.answers: dict[str, tuple[int, bytes]] = {}
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, str(self.path))

    async def stop(self) -> None:
        self.hang_up()
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    def hang_up(self) -> None:
        for writer in self._writers:
            writer.close()
        self._writers.clear()

    def send(self, frame: dict[str, Any]) -> None:
        self.send_bytes(msgspec.msgpack.encode(frame))

    def send_bytes(self, payload: bytes, *, length: int | None = None) -> None:
        for writer in self._writers:
            writer.write(struct.pack(">I", len(payload) if length is None else length) + payload)

    @property
    def is_connected(self) -> bool:
        return bool(self._writers)

    @property
    def updates(self) -> list[dict[str, Any]]:
        return [frame["update"] for frame in self.frames if frame["type"] == "fleet"]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        self.send({"type": "hello", "serving": "127.0.0.1:8080", "pid": 42})
        try:
            while True:
                (length,) = struct.unpack(">I", await reader.readexactly(4))
                frame = msgspec.msgpack.decode(await reader.readexactly(length))
                self.frames.append(frame)
                if frame["type"] == "ask" and frame["question"] in self.answers:
                    status, body = self.answers[frame["question"]]
                    self.send({"type": "answer", "id": frame["id"], "status": status, "body": body})
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


@pytest.fixture
async def core(tmp_path: Path) -> AsyncIterator[FakeCore]:
    fake = FakeCore(tmp_path / "control.sock")
    await fake.start()
    yield fake
    await fake.stop()
