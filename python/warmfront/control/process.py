"""Puts the control process together: link, fleet, admin API; ends when the data process does."""

from __future__ import annotations

import asyncio
import logging
import signal
from pathlib import Path

import aiohttp
from aiohttp import web

from warmfront.clock import MonotonicClock
from warmfront.config import Config, ControlConfig
from warmfront.control import security, verify
from warmfront.control.admin import Admin
from warmfront.control.discovery.static import StaticDiscovery
from warmfront.control.fleet import FleetKeeper
from warmfront.control.link import Link, LinkClosedError
from warmfront.errors import ConfigError

logger = logging.getLogger(__name__)

CONNECTIONS_PER_SERVER = 4
KEEP_ALIVE_S = 4.0
"""Below the 5 s after which vLLM's HTTP server closes an idle connection."""

FIRST_STATE_TIMEOUT_S = 2.0
"""The core tells its fleet as soon as the link is open."""


async def run(config: Config, socket: Path) -> None:
    """Do everything until the data process says stop or has gone.

    Raises:
        LinkClosedError: Nobody listens at `socket`.
        ConfigError: The admin address cannot be bound, or may not be for want of a token.
    """
    link = await Link.connect(socket)
    connector = aiohttp.TCPConnector(limit=0, limit_per_host=CONNECTIONS_PER_SERVER, keepalive_timeout=KEEP_ALIVE_S)
    async with aiohttp.ClientSession(connector=connector) as http:
        fleet = FleetKeeper(
            config,
            http=http,
            clock=MonotonicClock(),
            send=link.send_fleet,
            open_tokenizer=verify.of_data_process(link, timeout_s=config.control.answer_timeout_s),
        )
        runner = web.AppRunner(Admin(config, link=link, fleet=fleet).application(), access_log=None)
        renewal = await _listen(runner, config.control)
        reading = asyncio.create_task(link.read())
        work = asyncio.create_task(_keep(fleet, link, config))
        try:
            await _first_of(reading, work, _termination())
        finally:
            for task in (work, *renewal):
                task.cancel()
            await asyncio.gather(work, *renewal, return_exceptions=True)
            await runner.cleanup()
            await link.close()


async def _keep(fleet: FleetKeeper, link: Link, config: Config) -> None:
    state = await link.first_state(timeout_s=FIRST_STATE_TIMEOUT_S)
    has_fleet = state is not None and bool(state.pools)
    await fleet.run(StaticDiscovery(config.fleet), core_has_fleet=has_fleet)


async def _listen(runner: web.AppRunner, control: ControlConfig) -> list[asyncio.Task[None]]:
    """Open the admin port; return what keeps its certificate current."""
    security.require_safe_admin(control)
    await runner.setup()
    address, tls = control.admin_listen, control.admin_tls
    host, _, port = address.rpartition(":")
    context = security.server_context(tls) if tls is not None else None
    try:
        await web.TCPSite(runner, host.strip("[]") or None, int(port), ssl_context=context).start()
    except OSError as error:
        raise ConfigError(f"control.admin_listen: cannot bind {address}: {error.strerror}") from error
    scheme = "http" if context is None else "https"
    logger.info("admin API on %s", ", ".join(f"{scheme}://{bound[0]}:{bound[1]}" for bound in runner.addresses))
    if tls is None or context is None:
        return []
    return [asyncio.create_task(security.follow_certificate(tls, context))]


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
