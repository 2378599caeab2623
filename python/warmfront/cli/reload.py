"""`warmfront reload`: another configuration for a running router."""

from __future__ import annotations

import click

from warmfront.cli import client, options
from warmfront.cli.output import show, show_json


@click.command(name="reload")
@options.admin
@options.as_json
def command(admin: str, as_json: bool) -> None:
    """Let a running router read its configuration again.

    File, environment and command line are those it was started with. A configuration that is wrong changes nothing: the
    reason is printed, and the exit code is 2.
    """
    answer = client.ask(admin, "/admin/reload", b"")
    if as_json:
        show_json(answer)
        return
    show(f"changed: {', '.join(answer['applied']) or 'nothing'}")
    if answer["restart_needed"]:
        show(f"needs a restart: {', '.join(answer['restart_needed'])}")
