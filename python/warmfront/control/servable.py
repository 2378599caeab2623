"""What only starting would find out about a configuration: looked at before a start and before a reload."""

from __future__ import annotations

from pathlib import Path

from warmfront.config import Config, FleetConfig, with_variables
from warmfront.control import dialects
from warmfront.errors import ConfigError
from warmfront.policy import registry


def require_servable(config: Config) -> None:
    """Find what only starting would find: no servers, an unknown engine or policy, a tokenizer or template not there.

    Raises:
        ConfigError: The first of these.
    """
    if not config.fleet.servers and not config.fleet.discovery:
        raise ConfigError(
            "no servers: give --replica URL, or fleet.servers or fleet.discovery in the configuration file"
        )
    dialects.validate(config.fleet)
    registry.factory(config.router.policy.name)
    _require_variables(config.fleet)
    for field, path, expected in _files(config.fleet):
        if not Path(path).exists():
            raise ConfigError(f"{field}: {path} is not there; expected {expected}")


def _require_variables(fleet: FleetConfig) -> None:
    for number, server in enumerate(fleet.servers):
        for name, text in server.headers_from_env.items():
            try:
                with_variables(text)
            except ConfigError as error:
                raise ConfigError(f"fleet.servers[{number}].headers_from_env.{name}: {error}") from error


def _files(fleet: FleetConfig) -> list[tuple[str, str, str]]:
    tokenizer, template = "a model directory or a tokenizer.json", "a file with a chat template"
    named = [("fleet.tokenizer", fleet.tokenizer, tokenizer)]
    for name, model in fleet.models.items():
        named.append((f"fleet.models.{name}.tokenizer", model.tokenizer, tokenizer))
        named.append((f"fleet.models.{name}.chat_template", model.chat_template, template))
    return [(field, path, expected) for field, path, expected in named if path is not None]
