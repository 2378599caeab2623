"""The admin address: taken when it is free, without ending anything when it is not.

For a moment two processes want it: the one before still answers while it finishes its streams. Discovery and probes
need no admin API, so they do not wait for it.
"""

from __future__ import annotations

import asyncio
import logging

from aiohttp import web

logger = logging.getLogger(__name__)

RETRY_S = 0.2
"""First pause before the address is tried again; doubles up to `RETRY_S_MAX`."""
RETRY_S_MAX = 5.0


async def listen(runner: web.AppRunner, address: str) -> None:
    """Listen at `host:port`, as soon as that can be done; says once why it cannot."""
    await runner.setup()
    host, _, port = address.rpartition(":")
    pause_s, is_told = RETRY_S, False
    while True:
        try:
            await web.TCPSite(runner, host.strip("[]") or None, int(port)).start()
            break
        except OSError as error:
            if not is_told:
                is_told = True
                logger.error("control.admin_listen: cannot bind %s: %s; tried again", address, error.strerror)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, RETRY_S_MAX)
    logger.info("admin API on %s", ", ".join(f"http://{bound[0]}:{bound[1]}" for bound in runner.addresses))
