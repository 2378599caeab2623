"""`warmfront serve`: the router itself."""

from __future__ import annotations

from typing import Any

import click

from warmfront.cli.options import Options, configuration, require_servable
from warmfront.obs import logs
from warmfront.ports import preflight


@click.command(name="serve")
@configuration
def command(**options: Any) -> None:
    """Route requests over a fleet of engine servers.

    Clients speak the OpenAI API to --listen. Ends on SIGTERM or SIGINT, after the streams in flight.
    """
    config, _ = Options(**options).load()
    require_servable(config)
    logs.configure(config.log.level)
    preflight.check(config)

    from warmfront.ports.live import serve  # loads the core, which no other command needs

    serve(preflight.within_descriptors(config))
