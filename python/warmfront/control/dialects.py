"""Which dialect a server is asked in."""

from __future__ import annotations

from warmfront.config import DnsSource, FleetConfig, SrvSource
from warmfront.engines import DIALECTS, Dialect
from warmfront.errors import ConfigError

AUTO = "auto"


def questions(engine: str) -> Dialect:
    """Return the dialect whose paths a server is asked, for the value of `fleet.servers[].engine`.

    `auto` asks in the first dialect, which knows every question; a server that does not know a path says so.
    """
    return next(iter(DIALECTS.values())) if engine == AUTO else DIALECTS[engine]


def validate(fleet: FleetConfig) -> None:
    """Check the engine names of a configuration.

    Raises:
        ConfigError: There is no such engine.
    """
    named = [(f"fleet.servers[{number}]", server.engine) for number, server in enumerate(fleet.servers)]
    named += [
        (f"fleet.discovery[{number}]", source.engine)
        for number, source in enumerate(fleet.discovery)
        if isinstance(source, DnsSource | SrvSource)  # the others tell it with each server
    ]
    for where, engine in named:
        if engine not in (AUTO, *DIALECTS):
            known = ", ".join((AUTO, *DIALECTS))
            raise ConfigError(f"{where}.engine: no engine named {engine!r}; known: {known}")
