"""Whether a request that failed goes to another replica.

Three bounds: decisions for one request, one budget for the whole fleet (a share of the arrivals plus a small floor, so
that retries never multiply an overload), and what may have been worked on stays failed unless configured. What is easy
to get wrong: a refused connection burdens nobody, so it needs no budget; everything that an engine has seen does.
"""

from __future__ import annotations

from typing import Literal

from warmfront.config import RouterConfig
from warmfront.types import Failed

BURST_S = 10.0
"""The budget saves up its floor for so long."""
BURST_RETRIES = 100.0
"""Most that it saves up from arrivals."""

Answer = Literal["again", "used_up", "worked_on", "no_budget", "no_replica"]


class Retries:
    """The budget, and the rules before it."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._tokens = self._tokens_max
        self._now_s = 0.0

    @property
    def _tokens_max(self) -> float:
        retries = self._config.retries
        saved = BURST_RETRIES if retries.budget_share else 0.0
        return max(saved, BURST_S * retries.budget_min_per_s)

    def reconfigure(self, config: RouterConfig) -> None:
        """Use other bounds from now on."""
        self._config = config

    def arrived(self) -> None:
        """Note a new request, which pays its share into the budget."""
        self._tokens = min(self._tokens_max, self._tokens + self._config.retries.budget_share)

    def ask(self, failed: Failed, *, attempts: int, now_s: float) -> Answer:
        """Decide, and take what it costs. Called where another replica is left: `no_replica` is the caller's to say.

        Args:
            failed: The failure; the client has seen nothing of it.
            attempts: Decisions made for the request so far.
            now_s: Present, in seconds.
        """
        if attempts > self._config.retries_max:
            return "used_up"
        if failed.accepted and not self._config.retries.after_accept:
            return "worked_on"
        if not failed.accepted and failed.status is None:
            return "again"
        earned = max(0.0, now_s - self._now_s) * self._config.retries.budget_min_per_s
        self._tokens = min(self._tokens_max, self._tokens + earned)
        self._now_s = max(self._now_s, now_s)
        if self._tokens < 1.0:
            return "no_budget"
        self._tokens -= 1.0
        return "again"
