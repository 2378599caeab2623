"""What policies under test may look at beyond what the router hands to every policy.

Other routers see prompts as text, or scrape engines at intervals of their own. This is how the lab lets them.
"""

from __future__ import annotations

from collections.abc import Sequence

from warmfront import core
from warmfront.lab.model import SimRequest
from warmfront.ports.agenda import Agenda
from warmfront.types import EngineLoad, Request, RequestId


class SimView:
    """What peers may know that the router does not tell its policies."""

    def __init__(self, fleet: core.SimFleet, agenda: Agenda, *, block_size: int) -> None:
        self.block_size = block_size
        self.requests: dict[RequestId, SimRequest] = {}
        self.now_s = 0.0
        self._fleet = fleet
        self._agenda = agenda
        self._loads: dict[float, tuple[float, list[tuple[int, int, float]]]] = {}

    def blocks(self, request: Request) -> Sequence[int]:
        """Return the chained hashes of the prompt's full blocks: equal prefixes have equal hashes.

        Raises:
            UnknownRequestError: The request ended some time ago.
        """
        return self._fleet.blocks(request.id)

    def prompt(self, request: Request) -> SimRequest:
        """Return the request as the workload made it."""
        return self.requests[request.id]

    def load(self, interval_s: float) -> Sequence[EngineLoad]:
        """Return what a scraper with this interval saw last, one row a slot.

        The first call looks at once; from then on the engines are looked at every `interval_s`.
        """
        if interval_s not in self._loads:
            self._scrape(interval_s)
            self._agenda.every(interval_s, lambda: self._scrape(interval_s), first_s=self.now_s + interval_s)
        scraped_s, rows = self._loads[interval_s]
        age_s = self.now_s - scraped_s
        return [EngineLoad(running, waiting, kv_usage, age_s) for running, waiting, kv_usage in rows]

    def _scrape(self, interval_s: float) -> None:
        self._loads[interval_s] = (self.now_s, self._fleet.loads())
