"""From the configuration to the discovery that the fleet follows."""

from __future__ import annotations

from pathlib import Path

import aiohttp

from warmfront.clock import Clock
from warmfront.config import DnsSource, FileSource, FleetConfig, HttpSource, SrvSource
from warmfront.control.discovery import Discovery, Source
from warmfront.control.discovery.combined import Combined
from warmfront.control.discovery.file import FileReader
from warmfront.control.discovery.http import HttpReader
from warmfront.control.discovery.static import StaticDiscovery, static_servers


def discovery_of(
    fleet: FleetConfig, *, http: aiohttp.ClientSession, clock: Clock, memory: Path | None = None
) -> Discovery:
    """Return what `fleet.servers` and `fleet.discovery` say together.

    Args:
        fleet: Validated.
        http: Session for sources that are asked over HTTP.
        clock: For the ages of lists.
        memory: File that keeps the last lists over a restart of this process.
    """
    if not fleet.discovery:
        return StaticDiscovery(fleet)
    sources = [_source(config, http) for config in fleet.discovery]
    return Combined(static_servers(fleet), sources, clock=clock, memory=memory)


def _source(config: FileSource | DnsSource | SrvSource | HttpSource, http: aiohttp.ClientSession) -> Source:
    match config:
        case FileSource():
            return FileReader(config)
        case DnsSource() | SrvSource():
            from warmfront.control.discovery import dns  # a third of this process's start, which few fleets need

            return dns.AddressReader(config) if isinstance(config, DnsSource) else dns.SrvReader(config)
        case HttpSource():
            return HttpReader(config, http)
