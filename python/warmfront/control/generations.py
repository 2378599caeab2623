"""One configuration after the other: everything that works under one ends before the next begins.

Probes, sources, reports and comparisons of a generation are tasks of its keeper, so none of them can go on under a
configuration that is not in force. What was found out about servers goes from one keeper to the next.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp

from warmfront.clock import Clock
from warmfront.config import Config
from warmfront.control import verify
from warmfront.control.discovery.build import discovery_of
from warmfront.control.drain import still_drained
from warmfront.control.fleet import FleetKeeper
from warmfront.control.link import Link

FIRST_STATE_TIMEOUT_S = 2.0
"""The core tells its fleet as soon as the link is open."""


class Generations:
    """The keeper in force, and its successors."""

    def __init__(
        self, config: Config, *, link: Link, http: aiohttp.ClientSession, clock: Clock, memory: Path | None
    ) -> None:
        """Prepare the first; `run` starts it.

        Args:
            config: Of the first generation.
            link: To the core.
            http: Session for probes and sources, shared.
            clock: For ages.
            memory: File in which discovery keeps its last lists.
        """
        self._link = link
        self._http = http
        self._clock = clock
        self._memory = memory
        self._next: asyncio.Queue[tuple[Config, asyncio.Future[None]]] = asyncio.Queue(1)
        self.config = config
        self.fleet = self._keeper(config, None)

    async def run(self) -> None:
        """Run one generation after the other; ends when one fails, with its error."""
        state = await self._link.first_state(timeout_s=FIRST_STATE_TIMEOUT_S)
        self.fleet.drained = still_drained(state)
        has_fleet = state is not None and bool(state.pools)
        while True:
            config, begun = await self._run_one(core_has_fleet=has_fleet)
            self.config, self.fleet, has_fleet = config, self._keeper(config, self.fleet), True
            begun.set_result(None)

    async def replace(self, config: Config) -> None:
        """Put another configuration in force; returns when nothing of the one before works any more."""
        begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await self._next.put((config, begun))
        await begun

    async def _run_one(self, *, core_has_fleet: bool) -> tuple[Config, asyncio.Future[None]]:
        """Work until another configuration is wanted, and return it."""
        discovery = discovery_of(self.config.fleet, http=self._http, clock=self._clock, memory=self._memory)
        working = asyncio.create_task(self.fleet.run(discovery, core_has_fleet=core_has_fleet))
        wanted = asyncio.create_task(self._next.get())
        try:
            await asyncio.wait({working, wanted}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
            return wanted.result()
        finally:
            working.cancel()
            wanted.cancel()
            await asyncio.gather(working, wanted, return_exceptions=True)

    def _keeper(self, config: Config, before: FleetKeeper | None) -> FleetKeeper:
        return FleetKeeper(
            config,
            http=self._http,
            clock=self._clock,
            send=self._link.send_fleet,
            open_tokenizer=verify.of_data_process(self._link, timeout_s=config.control.answer_timeout_s),
            before=before,
        )
