"""Options that several commands share, and the configuration that follows from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from msgspec import Struct

from warmfront.config import Config, ConfigSources

Command = TypeVar("Command", bound=Callable[..., None])


class Options(Struct, frozen=True):
    """What was given on the command line, weakest first: file, `--set`, the rest."""

    config: Path | None
    settings: tuple[str, ...]
    replica: tuple[str, ...]
    tokenizer: str | None
    policy: str | None
    listen: str | None
    admin_listen: str | None

    def load(self) -> tuple[Config, dict[str, str]]:
        """Return the effective configuration, and the source of each value that is not a default.

        Raises:
            ConfigError: Some source is wrong.
        """
        return self.sources().load()

    def sources(self) -> ConfigSources:
        """Return where the configuration comes from, so that a running router can read it again."""
        path = None if self.config is None else str(self.config.absolute())
        return ConfigSources(path=path, overrides=list(self.settings), flags=self._flags())

    def _flags(self) -> dict[str, Any]:
        fleet = {"servers": [{"url": url} for url in self.replica], "tokenizer": self.tokenizer}
        tree = {
            "fleet": fleet,
            "router": {"policy": {"name": self.policy}},
            "front": {"listen": self.listen},
            "control": {"admin_listen": self.admin_listen},
        }
        return _given(tree)


def _given(tree: dict[str, Any]) -> dict[str, Any]:
    """Drop what was not given."""
    pruned = {name: _given(value) if isinstance(value, dict) else value for name, value in tree.items()}
    return {name: value for name, value in pruned.items() if value not in (None, [], {})}


_OPTIONS = [
    click.option(
        "--replica",
        multiple=True,
        metavar="URL",
        help="Base URL of an engine server; repeatable. Replaces `fleet.servers`.",
    ),
    click.option("--tokenizer", metavar="PATH", help="Model directory or tokenizer.json, for all models."),
    click.option(
        "--policy",
        metavar="NAME",
        help="How a replica is chosen: marginal_cost (default), round_robin, …; see `warmfront plugins`.",
    ),
    click.option("--listen", metavar="HOST:PORT", help="Address for clients; default 127.0.0.1:8080."),
    click.option("--admin-listen", metavar="HOST:PORT", help="Address of the admin API; default 127.0.0.1:8081."),
    click.option("--config", type=click.Path(path_type=Path), metavar="FILE", help="Configuration file in YAML."),
    click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="PATH=VALUE",
        help="One value of the configuration, for example log.level=debug; repeatable.",
    ),
]


def configuration(command: Command) -> Command:
    """Add the options of the configuration to a command; it gets them as keyword arguments of `Options`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


TOKEN_FILE, CA_FILE = "warmfront.admin_token_file", "warmfront.admin_ca"
"""Where the options of `admin` lie in `click.Context.meta`; `client.ask` looks there."""


def _keep(place: str) -> Callable[[click.Context, click.Parameter, Path | None], None]:
    def keep(context: click.Context, parameter: click.Parameter, value: Path | None) -> None:
        context.meta[place] = value

    return keep


_ADMIN_OPTIONS = [
    click.option(
        "--admin", default="http://127.0.0.1:8081", show_default=True, metavar="URL", help="Admin API of the router."
    ),
    click.option(
        "--admin-token-file",
        type=click.Path(path_type=Path),
        envvar="WARMFRONT_ADMIN_TOKEN_FILE",
        show_envvar=True,
        metavar="FILE",
        help="File with the token of the admin API (`control.admin_token_file`).",
        expose_value=False,
        callback=_keep(TOKEN_FILE),
    ),
    click.option(
        "--admin-ca",
        type=click.Path(path_type=Path),
        envvar="WARMFRONT_ADMIN_CA",
        show_envvar=True,
        metavar="FILE",
        help="Authority of the admin API's certificate; default: the system's.",
        expose_value=False,
        callback=_keep(CA_FILE),
    ),
]


def admin(command: Command) -> Command:
    """Add the options of commands that ask a running router; they get the URL as `admin`, `client.ask` the rest."""
    for option in reversed(_ADMIN_OPTIONS):
        command = option(command)
    return command


as_json = click.option("--json", "as_json", is_flag=True, help="Print the answer as it came.")
"""Option of commands that print tables."""
