"""Puts the control process together: link, fleet, admin API; ends when the data process does."""

from __future__ import annotations

import asyncio
import logging
import signal
from pathlib import Path

import aiohttp
from aiohttp import web

from warmfront.clock import MonotonicClock
from warmfront.config import Config, ConfigSources
from warmfront.control import security
from warmfront.control.admin import Admin
from warmfront.control.change import Changes
from warmfront.control.generations import Generations
from warmfront.control.link import Link, LinkClosedError
from warmfront.control.listening import listen

logger = logging.getLogger(__name__)

CONNECTIONS_PER_SERVER = 4
KEEP_ALIVE_S = 4.0
"""Below the 5 s after which vLLM's HTTP server closes an idle connection."""


async def run(
    config: Config, socket: Path, *, config_path: Path | None = None, sources: ConfigSources | None = None
) -> None:
    """Do everything until the data process says stop or has gone.

    Args:
        config: Validated.
        socket: Of the data process; what must outlive this process is kept beside it.
        config_path: File that `config` was read from; it follows reloads.
        sources: Where the configuration is read from again.

    Raises:
        LinkClosedError: Nobody listens at `socket`.
        ConfigError: The admin port may not be opened for want of a token.
    """
    security.require_safe_admin(config.control)
    link = await Link.connect(socket)
    connector = aiohttp.TCPConnector(limit=0, limit_per_host=CONNECTIONS_PER_SERVER, keepalive_timeout=KEEP_ALIVE_S)
    async with aiohttp.ClientSession(connector=connector) as http:
        memory = socket.with_name("discovery.json")
        generations = Generations(config, link=link, http=http, clock=MonotonicClock(), memory=memory)
        changes = Changes(
            generations,
            link=link,
            sources=sources,
            config_path=config_path,
            on_change=lambda config, fleet: admin.follow(config, fleet),
        )
        admin = Admin(config, link=link, fleet=generations.fleet, changes=changes.routes())
        runner = web.AppRunner(admin.application(), access_log=None)
        beside = asyncio.create_task(listen(runner, config.control))
        reading = asyncio.create_task(link.read())
        work = [asyncio.create_task(generations.run()), asyncio.create_task(changes.follow_signals())]
        try:
            await _first_of(reading, *work, _termination())
        finally:
            for task in (beside, *work):
                task.cancel()
            await asyncio.gather(beside, *work, return_exceptions=True)
            await runner.cleanup()
            await link.close()


async def _first_of(*tasks: asyncio.Task[None]) -> None:
    """Wait for the first to end, cancel the others, and pass on how it ended; a gone data process is a normal end."""
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    try:
        for task in done:
            task.result()
    except* LinkClosedError as gone:
        logger.info("%s", gone.exceptions[0])


def _termination() -> asyncio.Task[None]:
    """Return a task that ends on a termination signal.

    An interrupt from the terminal reaches the data process as well, which then says stop: ignored here.
    """
    loop, asked = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, asked.set)
    loop.add_signal_handler(signal.SIGINT, lambda: None)

    async def wait() -> None:
        await asked.wait()

    return asyncio.create_task(wait())
