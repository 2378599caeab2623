"""`warmfront openapi`: the OpenAPI document of a port."""

from __future__ import annotations

import click

from warmfront.cli.output import show_json
from warmfront.openapi import document


@click.command(name="openapi")
@click.option("--admin", is_flag=True, help="Of the admin port instead of the clients' port.")
def command(admin: bool) -> None:
    """Print the OpenAPI document of a port as JSON."""
    show_json(document("admin" if admin else "clients"))
