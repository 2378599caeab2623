"""The command `warmfront`: one file a command, loaded when it is asked for, so that `--help` is fast.

Every error on purpose ends as one line and exit code 2, without a traceback.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import click

from warmfront.errors import WarmfrontError

COMMANDS = {
    "serve": "Route requests over a fleet of engine servers.",
    "check": "Validate a configuration and look at its servers once.",
    "fleet": "Show the replicas of a running router.",
    "reload": "Let a running router read its configuration again.",
    "drain": "Take a replica, or the whole router, out of service.",
    "explain": "Show where a request would go, and why.",
    "keys": "Make, list and revoke the API keys of clients.",
    "config": "Print the effective configuration.",
    "openapi": "Print the OpenAPI document of a port as JSON.",
    "replay": "Decide a recorded run again and compare.",
    "simulate": "Run policies against regimes, on virtual time.",
    "trace": "Make, inspect and import workload files.",
    "calibrate": "Time a live engine and fit the latency model to it.",
    "plugins": "List installed plugins.",
    "engine": "Serve an embedded engine without a GPU.",
    "demo": "Compare routing policies on embedded engines.",
}
"""Name → one line of help. The command itself is `command` in the module of that name."""


class RefusalError(click.ClickException):
    """One clear line, exit code 2."""

    exit_code = 2


class LazyGroup(click.Group):
    """Knows its commands by name and imports one when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of `COMMANDS`."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command."""
        if cmd_name not in COMMANDS:
            return None
        command = import_module(f"warmfront.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        """Run, turning our own errors into one line."""
        try:
            return super().invoke(ctx)
        except WarmfrontError as error:
            raise RefusalError(str(error)) from error


def _print_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if not wanted or ctx.resilient_parsing:
        return
    try:
        click.echo(f"warmfront {version('warmfront')}")
    except PackageNotFoundError:
        click.echo("warmfront (not installed)")
    ctx.exit()


@click.group(cls=LazyGroup, context_settings={"max_content_width": 100})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Show the version."
)
def main() -> None:
    """Route LLM requests to the replica that already holds their prefix."""
