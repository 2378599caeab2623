"""The list in the configuration: known at once, never changes."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from warmfront.config import FleetConfig, ServerConfig


class StaticDiscovery:
    """Yields `fleet.servers` once."""

    name = "configuration"

    def __init__(self, fleet: FleetConfig) -> None:
        self._servers = [msgspec.structs.replace(server, url=server.url.rstrip("/")) for server in fleet.servers]

    async def servers(self) -> AsyncIterator[list[ServerConfig]]:
        """Yield the servers; their URLs carry no trailing slash."""
        yield self._servers
