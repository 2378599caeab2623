"""`warmfront replay`: decide a recorded run again."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from warmfront.cli import options
from warmfront.cli.output import show_json
from warmfront.config import load


@click.command(name="replay")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--config", "config_path", type=click.Path(path_type=Path), metavar="FILE", help="YAML file.")
@click.option("--set", "settings", multiple=True, metavar="PATH=VALUE", help="One value; repeat.")
@options.as_json
def command(file: Path, config_path: Path | None, settings: tuple[str, ...], as_json: bool) -> None:
    """Decide a recorded run again and compare.

    FILE was written by a router with router.record set. Without --config and --set the recorded settings are used, and
    every command must be the same, byte for byte; with them the report says how many steps other settings would have
    decided otherwise. Exit code 0: identical; 1: not.
    """
    from warmfront.ports.replay import replay  # loads the router

    is_changed = config_path is not None or settings
    config = load(path=config_path, overrides=settings).router if is_changed else None
    report = replay(file, config=config)
    if as_json:
        show_json(msgspec.to_builtins(report))
    else:
        click.echo(f"{report.steps} steps, {report.events} events, {report.commands} commands")
        click.echo("identical" if report.is_identical else f"{report.differing_steps} steps differ")
        if report.first_difference is not None:
            click.echo(f"first: {report.first_difference}")
    raise SystemExit(0 if report.is_identical else 1)
