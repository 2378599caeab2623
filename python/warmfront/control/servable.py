"""What only starting would find out about a configuration: looked at before a start and before a reload."""

from __future__ import annotations

from pathlib import Path

from warmfront.config import Config, FleetConfig
from warmfront.control import dialects
from warmfront.errors import ConfigError
from warmfront.policy import registry


def require_servable(config: Config) -> None:
    """Find what only starting would find: no servers, an unknown engine or policy, a tokenizer that is not there.

    Raises:
        ConfigError: The first of these.
    """
    if not config.fleet.servers and not config.fleet.discovery:
        raise ConfigError(
            "no servers: give --replica URL, or fleet.servers or fleet.discovery in the configuration file"
        )
    dialects.validate(config.fleet)
    registry.factory(config.router.policy.name)
    for field, path in _files(config.fleet):
        if not Path(path).exists():
            raise ConfigError(f"{field}: {path} is not there; expected a model directory or a tokenizer.json")


def _files(fleet: FleetConfig) -> list[tuple[str, str]]:
    named = [("fleet.tokenizer", fleet.tokenizer)]
    named += [(f"fleet.models.{name}.tokenizer", model.tokenizer) for name, model in fleet.models.items()]
    return [(field, path) for field, path in named if path is not None]
