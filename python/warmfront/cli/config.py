"""`warmfront config`: what is in force, and where it came from."""

from __future__ import annotations

from typing import Any

import click
import yaml

from warmfront.cli.options import Options, configuration
from warmfront.cli.output import show_json
from warmfront.config import redacted


@click.command(name="config")
@configuration
@click.option("--schema", is_flag=True, help="Print the JSON Schema of the file instead.")
def command(schema: bool, **options: Any) -> None:
    """Print the effective configuration.

    The output is a valid configuration file, except that header values are hidden. Comments name the source of each
    value that is not a default.
    """
    if schema:
        from warmfront import config_schema  # reads the source, which only this needs

        show_json(config_schema.schema())
        return
    config, sources = Options(**options).load()
    for path, source in sources.items():
        click.echo(f"# {path}: {source}")
    click.echo(yaml.safe_dump(redacted(config), sort_keys=False, allow_unicode=True), nl=False)
