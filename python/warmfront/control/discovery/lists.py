"""Lists of servers as files and HTTP sources give them.

An item is a URL or a mapping as in `fleet.servers`. A list is taken whole or not at all: half a fleet because of one
bad line would be worse than yesterday's. An empty list is a list: whoever writes one means it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from warmfront.config import ServerConfig, in_words
from warmfront.control.discovery import DiscoveryError
from warmfront.engines import DIALECTS

SERVERS_MAX = 4096
"""Servers of one source; a longer list is refused."""
LIST_BYTES_MAX = 16 * 1024 * 1024
"""A longer text is not read."""


def servers_of(items: Any) -> list[ServerConfig]:
    """Return the servers of a list.

    Args:
        items: What was parsed.

    Raises:
        DiscoveryError: It is no list of servers; the message names the item.
    """
    if not isinstance(items, list):
        raise DiscoveryError(f"expected a list of servers, got {type(items).__name__}")
    if len(items) > SERVERS_MAX:
        raise DiscoveryError(f"a list of {len(items)} servers; at most {SERVERS_MAX} are taken")
    servers = [_server(number, item) for number, item in enumerate(items)]
    urls = [server.url for server in servers]
    if len(set(urls)) < len(urls):
        twice = sorted({url for url in urls if urls.count(url) > 1})
        raise DiscoveryError(f"servers are listed twice: {', '.join(twice)}")
    return servers


def _server(number: int, item: Any) -> ServerConfig:
    try:
        server = msgspec.convert({"url": item} if isinstance(item, str) else item, ServerConfig)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `$")
        place = f"item {number}{where.rstrip('`')}"
        raise DiscoveryError(f"{place}: {in_words(message)}") from error
    if server.engine not in ("auto", *DIALECTS):
        raise DiscoveryError(f"item {number}.engine: no engine named {server.engine!r}")
    return msgspec.structs.replace(server, url=server.url.rstrip("/"))
