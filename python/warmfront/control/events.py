"""Where a server publishes KV events: the configuration says, or the engine, or the default port shows it.

Engines name the address they bind (`tcp://*:5557`), so the host by which we reach their API is put in. Rank r
publishes at port + r; the engine's own answer has that shift already.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from warmfront.config import EventsConfig, ServerConfig
from warmfront.engines import EventDefaults
from warmfront.types import EventSource

RANKS_MAX = 1024
"""More ranks behind one URL are not believed."""

UNSPECIFIED_HOSTS = EventDefaults().unspecified_hosts
"""Bind addresses to be replaced by the host the engine was reached at."""

_GREETING_BYTES = 10


class PublisherConfig(Struct, frozen=True):
    """One value of vLLM's `/kv_event_sources`."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    publisher: str | None = None
    enable_kv_cache_events: bool = True


def configured(server: ServerConfig, config: EventsConfig, ranks: Iterable[int]) -> dict[int, EventSource]:
    """Return the sources that the configuration names, one per rank."""
    host = _host(server.url)
    return {
        rank: EventSource(
            endpoint=reachable(shifted(config.endpoint, rank), host),
            replay=reachable(shifted(config.replay, rank), host) if config.replay else None,
            topic=config.topic,
            origin="configuration",
        )
        for rank in ranks
    }


def announced(server: ServerConfig, body: bytes) -> dict[int, EventSource]:
    """Read an answer of `/kv_event_sources`.

    Raises:
        msgspec.DecodeError: It is not the expected JSON; validation errors are of this class too.
    """
    publishers = msgspec.json.decode(body, type=dict[int, PublisherConfig])
    host = _host(server.url)
    return {
        rank: EventSource(
            endpoint=reachable(publisher.endpoint, host),
            replay=reachable(publisher.replay_endpoint, host) if publisher.replay_endpoint else None,
            topic=publisher.topic,
            origin="engine",
        )
        for rank, publisher in sorted(publishers.items())[:RANKS_MAX]
        if publisher.enable_kv_cache_events and publisher.publisher != "null"
    }


def by_default_port(
    server: ServerConfig, listening: Mapping[int, bool], *, port: int, topic: str = ""
) -> dict[int, EventSource]:
    """Return a source for each rank at whose default port a publisher was seen."""
    host = _host(server.url)
    return {
        rank: EventSource(endpoint=f"tcp://{host}:{port + rank}", topic=topic, origin="default_port")
        for rank, is_listening in listening.items()
        if is_listening
    }


async def listening(server: ServerConfig, ranks: Iterable[int], *, port: int, timeout_s: float) -> dict[int, bool]:
    """Find out per rank whether something that speaks ZMTP listens at `port` + rank."""
    host, asked = _host(server.url).strip("[]"), list(ranks)
    answers = await asyncio.gather(*(_greets(host, port + rank, timeout_s) for rank in asked))
    return dict(zip(asked, answers, strict=True))


async def _greets(host: str, port: int, timeout_s: float) -> bool:
    """Connect and read the ZMTP signature, which a ZeroMQ socket sends unasked: 0xFF, eight bytes, 0x7F."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                greeting = await reader.readexactly(_GREETING_BYTES)
            finally:
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return False
    return greeting[0] == 0xFF and greeting[-1] == 0x7F


def reachable(endpoint: str, host: str) -> str:
    """Put `host` in the place of a wildcard; other addresses, `ipc://` among them, stay.

    Args:
        endpoint: As the engine binds it.
        host: As in the server's URL; IPv6 in brackets.
    """
    scheme, _, rest = endpoint.partition("://")
    name, colon, port = rest.rpartition(":")
    return f"{scheme}://{host}:{port}" if scheme == "tcp" and colon and name in UNSPECIFIED_HOSTS else endpoint


def shifted(endpoint: str, rank: int) -> str:
    """Add `rank` to the port of a TCP endpoint; others cannot be shifted and stay."""
    base, colon, port = endpoint.rpartition(":")
    return f"{base}:{int(port) + rank}" if endpoint.startswith("tcp://") and colon and port.isdecimal() else endpoint


def _host(url: str) -> str:
    """Host part of a URL; IPv6 keeps its brackets."""
    netloc = urlsplit(url).netloc
    return netloc[: netloc.index("]") + 1] if netloc.startswith("[") else netloc.partition(":")[0]
