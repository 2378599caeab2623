"""Starts and stops an engine server: sockets, the step loop, signals."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass

from aiohttp import web

from warmfront.clock import MonotonicClock
from warmfront.sim.engine import Engine, EngineConfig
from warmfront.sim.server.app import EngineServer, ServedModel, ServerOptions
from warmfront.sim.server.publisher import KvPublisher, PublisherConfig, replaying

BACKLOG = 1024
"""Connections the kernel holds before they are accepted."""
SHUTDOWN_S = 1.0
"""How long streams may take to end once the server stops."""


@dataclass(frozen=True, slots=True)
class Service:
    """One engine server."""

    engine: EngineConfig
    model: ServedModel
    options: ServerOptions
    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes a free one."""
    events: PublisherConfig | None = None
    """`None`: no KV events, as vLLM by default."""


@contextlib.asynccontextmanager
async def running(service: Service) -> AsyncIterator[tuple[str, EngineServer]]:
    """Serve while the block runs; yields the base URL.

    Raises:
        OSError: The address cannot be bound.
        EventSocketError: An event address cannot be bound.
    """
    publisher = None
    async with contextlib.AsyncExitStack() as stack:
        listener = stack.enter_context(socket.create_server((service.host, service.port), backlog=BACKLOG))
        if service.events is not None:
            publisher = KvPublisher(
                service.events, block_size=service.engine.block_size, adapters=list(service.model.adapters)
            )
            await stack.enter_async_context(replaying(publisher))
        server = EngineServer(
            Engine(service.engine),
            clock=MonotonicClock(),
            model=service.model,
            options=service.options,
            publisher=publisher,
        )
        await stack.enter_async_context(_task(server.runner.run()))
        runner = web.AppRunner(
            server.application(), handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_S
        )
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.SockSite(runner, listener, backlog=BACKLOG).start()
        yield f"http://{service.host}:{listener.getsockname()[1]}", server


async def serve_until_signal(service: Service, ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; `ready` is told the base URL once connections are accepted."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with running(service) as (url, _server):
        ready(url)
        await stop.wait()


@contextlib.asynccontextmanager
async def _task(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run a coroutine beside the block; its failure ends the block."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(work)
        try:
            yield
        finally:
            task.cancel()
