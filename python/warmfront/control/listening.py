"""The admin address: taken when it is free, without ending anything when it is not.

For a moment two processes want it: the one before still answers while it finishes its streams. Discovery and probes
need no admin API, so they do not wait for it.
"""

from __future__ import annotations

import asyncio
import logging
import ssl

from aiohttp import web

from warmfront.config import ControlConfig, TlsConfig
from warmfront.control.security import Watched, load_files, server_context

logger = logging.getLogger(__name__)

RETRY_S = 0.2
"""First pause before the address is tried again; doubles up to `RETRY_S_MAX`."""
RETRY_S_MAX = 5.0
WATCH_INTERVAL_S = 1.0
"""How often the certificate of the admin port is looked at."""


async def listen(runner: web.AppRunner, control: ControlConfig) -> None:
    """Listen where the configuration says, as soon as that can be done; says once why it cannot.

    With TLS it goes on for ever, to keep the certificate current.

    Raises:
        ConfigError: The certificate cannot be read.
    """
    await runner.setup()
    address, tls = control.admin_listen, control.admin_tls
    host, _, port = address.rpartition(":")
    context = None if tls is None else server_context(tls)
    pause_s, is_told = RETRY_S, False
    while True:
        try:
            await web.TCPSite(runner, host.strip("[]") or None, int(port), ssl_context=context).start()
            break
        except OSError as error:
            if not is_told:
                is_told = True
                logger.error("control.admin_listen: cannot bind %s: %s; tried again", address, error.strerror)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, RETRY_S_MAX)
    scheme = "http" if context is None else "https"
    logger.info("admin API on %s", ", ".join(f"{scheme}://{bound[0]}:{bound[1]}" for bound in runner.addresses))
    if tls is not None and context is not None:
        await follow_certificate(tls, context)


async def follow_certificate(tls: TlsConfig, context: ssl.SSLContext) -> None:
    """Put a renewed certificate into the context of an open port, until cancelled; open connections keep theirs."""

    def renew() -> None:
        server_context(tls)  # on its own first: a context that failed half-way would be neither old nor new
        load_files(context, cert=tls.cert, key=tls.key, ca=None)

    watched = Watched("control.admin_tls", [tls.cert, tls.key], renew)
    while True:
        await asyncio.sleep(WATCH_INTERVAL_S)
        watched.current()
