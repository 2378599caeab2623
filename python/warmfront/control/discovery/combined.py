"""All sources together: one task each, one list out of all their last lists.

What one would get wrong: a source that fails must not take its servers away, also not after a restart of this process.
The last list of each source is therefore kept, in memory and in a private file, and used until there is a newer one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from warmfront.clock import Clock
from warmfront.config import ServerConfig
from warmfront.control.discovery import DiscoveryError, Source
from warmfront.control.files import write_private
from warmfront.types import SourceState

logger = logging.getLogger(__name__)


class LastList(Struct, frozen=True):
    """What a source said last."""

    servers: list[ServerConfig]
    read_s: float
    """On the machine's monotonic clock."""


class Combined:
    """Follows the sources; see `Discovery`."""

    def __init__(
        self, static: Sequence[ServerConfig], sources: Sequence[Source], *, clock: Clock, memory: Path | None = None
    ) -> None:
        """Prepare; nothing is asked yet.

        Args:
            static: Servers of the configuration; they come first.
            sources: Further ones, with names of their own.
            clock: For ages.
            memory: File that keeps the last lists over a restart; they hold the servers' headers, so it is private.
        """
        self._static = list(static)
        self._sources = list(sources)
        self._clock = clock
        self._memory = memory
        self._last = _remembered(memory)
        self._errors: dict[str, str] = {}
        self._untried = {source.name for source in sources}
        self._changed = asyncio.Event()

    def states(self) -> list[SourceState]:
        """Return how each source does."""
        return [self._state(source.name) for source in self._sources]

    async def servers(self) -> AsyncGenerator[list[ServerConfig]]:
        """Yield the union of all lists, again whenever it changes."""
        tasks = [asyncio.create_task(self._follow(source), name=source.name) for source in self._sources]
        given: list[ServerConfig] | None = None
        try:
            while True:
                servers = self._union()
                if not self._untried and servers != given:
                    given = servers
                    yield servers
                await self._changed.wait()
                self._changed.clear()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, source: Source) -> None:
        while True:
            try:
                self._take(source, await source.read())
            except DiscoveryError as error:
                self._fail(source, str(error))
            except Exception as error:  # the edge to a foreign place: one source must not end the others
                if source.name not in self._errors:
                    logger.exception("%s failed", source.name)
                self._fail(source, f"{type(error).__name__}: {error}")
            self._untried.discard(source.name)
            self._changed.set()
            await asyncio.sleep(source.interval_s)

    def _take(self, source: Source, servers: list[ServerConfig] | None) -> None:
        if self._errors.pop(source.name, None) is not None:
            logger.info("%s gives lists again", source.name)
        before = self._last.get(source.name)
        if servers is None:
            servers = before.servers if before else []
        self._last[source.name] = LastList(servers, self._clock.now_s())
        if before is None or before.servers != servers:
            logger.info("%s: %d servers", source.name, len(servers))
            self._remember()

    def _fail(self, source: Source, reason: str) -> None:
        if source.name not in self._errors:
            last = self._last.get(source.name)
            kept = f"its last list of {len(last.servers)} servers is kept" if last else "it never gave a list"
            logger.warning("%s: %s; %s", source.name, reason, kept)
        self._errors[source.name] = reason

    def _union(self) -> list[ServerConfig]:
        union = {server.url: server for server in self._static}
        for source in self._sources:
            last = self._last.get(source.name)
            for server in last.servers if last else []:
                union.setdefault(server.url, server)
        return list(union.values())

    def _state(self, name: str) -> SourceState:
        last = self._last.get(name)
        age_s = max(0.0, self._clock.now_s() - last.read_s) if last else None
        return SourceState(name, len(last.servers) if last else 0, age_s, self._errors.get(name))

    def _remember(self) -> None:
        if self._memory is None:
            return
        known = {source.name: self._last[source.name] for source in self._sources if source.name in self._last}
        try:
            write_private(self._memory, msgspec.json.encode(known))
        except OSError as error:
            logger.warning("the lists of servers cannot be kept over a restart: %s", error.strerror)


def _remembered(memory: Path | None) -> dict[str, LastList]:
    if memory is None or not memory.exists():
        return {}
    try:
        return msgspec.json.decode(memory.read_bytes(), type=dict[str, LastList])
    except (OSError, msgspec.DecodeError) as error:
        logger.warning("the kept lists of servers cannot be read: %s", error)
        return {}
