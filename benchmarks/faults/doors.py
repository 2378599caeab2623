"""Doors between a router and one engine that can be made to misbehave while traffic goes through.

`HttpDoor` stands for the engine's HTTP port, `EventDoor` for its two event sockets. Both pass everything through
unchanged until a mode is set, and again when it is cleared. A process that is killed or stopped needs no door; these
are for what a process does while it lives: refuse, fall silent, cut, lie, lose.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import zmq
import zmq.asyncio
from aiohttp import web

END_OF_REPLAY = b"\xff" * 8
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "content-length", "host"}
BODY_BYTES_MAX = 64 * 1024 * 1024
CUT_AFTER_CHUNKS = 3
SLOW_METRICS_S = 30.0
IDLE_METRICS = "vllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0\nvllm:kv_cache_usage_perc 0.0\n"
FULL_METRICS = "vllm:num_requests_running 256.0\nvllm:num_requests_waiting 500.0\nvllm:kv_cache_usage_perc 1.0\n"
DELAY_S = 3.0
LOST_SHARE = 0.2


@dataclass
class HttpDoor:
    """A reverse proxy to one engine.

    Modes of requests that generate: `pass`, `error_500`, `busy_503`, `busy_429`, `error_chunk` (200 and an error as
    first event), `reset` (takes the request, closes the connection), `silent` (takes it and never answers), `cut`
    (closes in mid-stream). Modes of /metrics: `pass`, `stale`, `idle`, `full`, `error`, `slow`.
    """

    engine: str
    port: int
    posts: str = "pass"
    metrics: str = "pass"
    accepted: int = 0
    """Requests that generate, whatever became of them."""
    _kept_metrics: bytes | None = None
    _session: aiohttp.ClientSession | None = None
    _runner: web.AppRunner | None = None

    async def open(self) -> None:
        """Listen."""
        self._session = aiohttp.ClientSession(
            auto_decompress=False, connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        )
        application = web.Application(client_max_size=BODY_BYTES_MAX)
        application.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()

    async def close(self) -> None:
        """Stop listening; what is open is cut."""
        if self._runner is not None:
            await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/metrics":
            return await self._tell_metrics(request)
        if request.method == "POST" and request.path.startswith("/v1/"):
            self.accepted += 1
            spoilt = await self._spoilt(request)
            if spoilt is not None:
                return spoilt
        return await self._pass(request)

    async def _spoilt(self, request: web.Request) -> web.StreamResponse | None:
        mode = self.posts
        if mode in ("pass", "cut"):
            return None
        await request.read()
        if mode == "silent":
            await asyncio.Event().wait()
        if mode == "reset":
            return _aborted(request)
        if mode == "error_chunk":
            error = b'data: {"error": {"message": "overloaded", "type": "overloaded_error", "code": 503}}\n\n'
            return web.Response(body=error + b"data: [DONE]\n\n", content_type="text/event-stream")
        status = {"error_500": 500, "busy_503": 503, "busy_429": 429}[mode]
        headers = {"retry-after": "1"} if mode.startswith("busy") else {}
        error = {"message": "made to fail", "type": "server_error", "param": None, "code": status}
        return web.json_response({"error": error}, status=status, headers=headers)

    async def _tell_metrics(self, request: web.Request) -> web.StreamResponse:
        if self.metrics == "error":
            return web.Response(status=500, text="made to fail")
        if self.metrics == "slow":
            await asyncio.sleep(SLOW_METRICS_S)
        if self.metrics in ("idle", "full"):
            return web.Response(text=IDLE_METRICS if self.metrics == "idle" else FULL_METRICS)
        if self.metrics == "stale" and self._kept_metrics is not None:
            return web.Response(body=self._kept_metrics, content_type="text/plain")
        assert self._session is not None
        try:
            async with self._session.get(self.engine + "/metrics") as answer:
                self._kept_metrics = await answer.read()
        except aiohttp.ClientError:
            return _aborted(request)
        return web.Response(body=self._kept_metrics, content_type="text/plain")

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        assert self._session is not None
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP]
        body = await request.read()
        try:
            async with self._session.request(
                request.method, self.engine + request.path_qs, headers=headers, data=body or None
            ) as answer:
                response = web.StreamResponse(status=answer.status)
                for name, value in answer.headers.items():
                    if name.lower() not in HOP_BY_HOP:
                        response.headers.add(name, value)
                await response.prepare(request)
                chunks = 0
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                    chunks += 1
                    if self.posts == "cut" and request.method == "POST" and chunks >= CUT_AFTER_CHUNKS:
                        return _aborted(request)
                await response.write_eof()
                return response
        except aiohttp.ClientError:
            return _aborted(request)


def _aborted(request: web.Request) -> web.StreamResponse:
    """Close the connection as a process that dies does: no end of the message."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=500)


@dataclass
class EventDoor:
    """Passes one engine's KV events on.

    Modes of the live stream: `pass`, `lose` (one batch in five), `delay` (by three seconds), `reorder` (neighbours),
    `duplicate`, `stop`, `garbage` (one message in five is noise), `clock` (stamped an hour early). Modes of replay:
    `pass`, `refuse` (never answered), `truncate` (half of it, then the end marker).
    """

    engine: tuple[str, str]
    """Live and replay endpoint of the engine."""
    ports: tuple[int, int]
    seed: int = 0
    live: str = "pass"
    replay: str = "pass"
    replays: int = 0
    _held: list[list[bytes]] = field(default_factory=list)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _context: Any = None

    async def open(self) -> None:
        """Bind both sockets and begin to pass on."""
        self._context = zmq.asyncio.Context()
        self._random = random.Random(self.seed)
        source = self._context.socket(zmq.SUB)
        source.setsockopt(zmq.SUBSCRIBE, b"")
        source.connect(self.engine[0])
        out = self._context.socket(zmq.PUB)
        out.bind(f"tcp://127.0.0.1:{self.ports[0]}")
        router = self._context.socket(zmq.ROUTER)
        router.bind(f"tcp://127.0.0.1:{self.ports[1]}")
        self._tasks = [
            asyncio.create_task(self._pass_live(source, out)),
            asyncio.create_task(self._pass_replay(router)),
        ]

    async def close(self) -> None:
        """Close both sockets."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.destroy(linger=0)

    async def _pass_live(self, source: Any, out: Any) -> None:
        """Take from the engine and send when due; order is kept, whatever the delays."""
        loop = asyncio.get_running_loop()
        waiting: asyncio.Queue[tuple[float, list[bytes]]] = asyncio.Queue()

        async def take() -> None:
            while True:
                frames = await source.recv_multipart()
                due_s = loop.time() + (DELAY_S if self.live == "delay" else 0.0)
                for spoilt in self._spoilt(frames):
                    waiting.put_nowait((due_s, spoilt))

        async with asyncio.TaskGroup() as group:
            group.create_task(take())
            while True:
                due_s, frames = await waiting.get()
                await asyncio.sleep(due_s - loop.time())
                await out.send_multipart(frames)

    def _spoilt(self, frames: list[bytes]) -> list[list[bytes]]:
        mode = self.live
        if mode == "stop" or (mode == "lose" and self._random.random() < LOST_SHARE):
            return []
        if mode == "garbage" and self._random.random() < LOST_SHARE:
            frames = [frames[0], frames[1], self._random.randbytes(len(frames[2]))]
        if mode == "clock":
            frames = _an_hour_early(frames)
        if mode == "duplicate":
            return [frames, frames]
        if mode == "reorder" and not self._held:
            self._held.append(frames)
            return []
        held, self._held = self._held, []
        return [frames, *held]

    async def _pass_replay(self, router: Any) -> None:
        while True:
            client, *request = await router.recv_multipart()
            self.replays += 1
            if self.replay == "refuse":
                continue
            answers = await self._ask(request)
            if self.replay == "truncate":
                answers = [*answers[: len(answers) // 2], answers[-1]]
            for answer in answers:
                await router.send_multipart([client, *answer])

    async def _ask(self, request: list[bytes]) -> list[list[bytes]]:
        """Ask the engine; a dead one answers nothing, as it would without a door."""
        dealer = self._context.socket(zmq.DEALER)
        answers: list[list[bytes]] = []
        try:
            dealer.connect(self.engine[1])
            await dealer.send_multipart(request)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(5.0):
                    while not answers or END_OF_REPLAY not in answers[-1]:
                        answers.append(await dealer.recv_multipart())
        finally:
            dealer.close(linger=0)
        return answers


def _an_hour_early(frames: list[bytes]) -> list[bytes]:
    """Move the time stamp of a batch, its first field: MessagePack float64 behind the byte of the array."""
    payload = frames[2]
    if payload[1:2] != b"\xcb":
        raise ValueError("a batch of KV events begins with its time")
    (stamp,) = struct.unpack(">d", payload[2:10])
    return [frames[0], frames[1], payload[:2] + struct.pack(">d", stamp - 3600.0) + payload[10:]]
