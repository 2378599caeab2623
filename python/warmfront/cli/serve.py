"""`warmfront serve`: the router itself."""

from __future__ import annotations

from typing import Any

import click

from warmfront.cli.options import Options, configuration
from warmfront.control.servable import require_servable
from warmfront.obs import logs
from warmfront.ports import preflight


@click.command(name="serve")
@configuration
def command(**options: Any) -> None:
    """Route requests over a fleet of engine servers.

    Clients speak the OpenAI API to --listen. Ends on SIGTERM or SIGINT, after the streams in flight; SIGHUP reads the
    configuration again.

    To upgrade without losing a connection, set front.handover to a path and start the new version with the same
    configuration: it takes the listening socket once its fleet is ready, and the old process ends after its streams.
    Sockets that systemd holds (LISTEN_FDS) are used, too.
    """
    sources = Options(**options).sources()
    config, _ = sources.load()
    require_servable(config)
    logs.configure(config.log.level)
    preflight.check(config)

    from warmfront.ports.live import serve  # loads the core, which no other command needs

    serve(preflight.within_descriptors(config), sources)
