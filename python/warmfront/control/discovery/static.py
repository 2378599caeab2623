"""The list in the configuration: known at once, never changes."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import msgspec

from warmfront.config import FleetConfig, ServerConfig
from warmfront.types import SourceState


def static_servers(fleet: FleetConfig) -> list[ServerConfig]:
    """Return `fleet.servers` with URLs that carry no trailing slash."""
    return [msgspec.structs.replace(server, url=server.url.rstrip("/")) for server in fleet.servers]


class StaticDiscovery:
    """Yields `fleet.servers` once."""

    def __init__(self, fleet: FleetConfig) -> None:
        self._servers = static_servers(fleet)

    async def servers(self) -> AsyncGenerator[list[ServerConfig]]:
        """Yield the servers."""
        yield self._servers

    def states(self) -> list[SourceState]:
        """Return nothing: the configuration cannot be down."""
        return []
