"""`warmfront plugins`: what is installed at each extension point."""

from __future__ import annotations

from importlib.metadata import entry_points

import click

from warmfront.cli.output import show, table

GROUPS = ("warmfront.policies", "warmfront.engines", "warmfront.discovery")
"""Entry point groups; built-ins register in them like everybody else."""


@click.command(name="plugins")
def command() -> None:
    """List installed plugins."""
    rows = table("group", "name", "object", "package")
    for group in GROUPS:
        for point in sorted(entry_points(group=group), key=lambda point: point.name):
            rows.add_row(group, point.name, point.value, point.dist.name if point.dist else "-")
    show(rows)
