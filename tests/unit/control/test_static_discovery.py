from __future__ import annotations

from warmfront.config import FleetConfig, ServerConfig
from warmfront.control.discovery.static import StaticDiscovery


async def test_the_configured_servers_come_once_and_without_a_trailing_slash() -> None:
    fleet = FleetConfig(servers=[ServerConfig(url="http://a:1/"), ServerConfig(url="http://b:1", block_size=32)])
    lists = [servers async for servers in StaticDiscovery(fleet).servers()]
    assert lists == [[ServerConfig(url="http://a:1"), ServerConfig(url="http://b:1", block_size=32)]]
