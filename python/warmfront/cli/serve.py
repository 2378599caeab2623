"""`warmfront serve`: the router itself."""

from __future__ import annotations

import socket
from typing import Any

import click

from warmfront.cli.options import Options, configuration, require_servable
from warmfront.errors import ConfigError
from warmfront.obs import logs


@click.command(name="serve")
@configuration
def command(**options: Any) -> None:
    """Route requests over a fleet of engine servers.

    Clients speak the OpenAI API to --listen. Ends on SIGTERM or SIGINT, after the streams in flight.
    """
    config, _ = Options(**options).load()
    require_servable(config)
    _require_free(config.control.admin_listen)
    logs.configure(config.log.level)

    from warmfront.ports.live import serve  # loads the core, which no other command needs

    serve(config)


def _require_free(address: str) -> None:
    """Find at once that the admin address is taken: the control process would be started again and again.

    Raises:
        ConfigError: It cannot be bound.
    """
    host, _, port = address.rpartition(":")
    try:
        family, _, _, _, where = socket.getaddrinfo(host.strip("[]") or None, int(port), flags=socket.AI_PASSIVE)[0]
        socket.create_server(where[:2], family=family).close()
    except OSError as error:
        raise ConfigError(
            f"control.admin_listen: cannot bind {address}: {error.strerror}; is a router running?"
        ) from error
