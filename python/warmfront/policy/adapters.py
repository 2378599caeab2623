"""Which adapters each replica has loaded, and what loading one more costs.

Engines keep a few adapters in memory and load another one when a request names it, which stops their whole batch. They
do not say which ones they hold, so it is inferred from our own dispatches: the last `adapters_resident_max` distinct
ones are there. What is easy to get wrong: a load is an investment like the copy of a prefix. Charging it in full to the
first request would keep every adapter on one replica for ever.
"""

from __future__ import annotations

from collections.abc import Sequence

from warmfront.config import CostConfig
from warmfront.policy.rates import Rates
from warmfront.types import Slot

RATE_WINDOW_S = 60.0
"""Time constant of an adapter's request rate."""
NAMES_MAX = 4096
"""Adapters whose rate is remembered; the one asked for longest ago goes first."""


class Adapters:
    """Adapters of one pool."""

    def __init__(self, config: CostConfig) -> None:
        self._horizon_s = config.copy_horizon_s
        self._resident_max = config.adapters_resident_max
        self._resident: list[dict[str, None]] = []
        """By slot, the one used longest ago first."""
        self.rates = Rates[str](window_s=RATE_WINDOW_S, keys_max=NAMES_MAX)

    def grow(self) -> None:
        """Add a row."""
        self._resident.append({})

    def reset(self, slot: Slot) -> None:
        """Forget a replica: the slot belongs to another one now."""
        self._resident[slot] = {}

    def used(self, slot: Slot, adapter: str, now_s: float) -> None:
        """Note a dispatch."""
        resident = self._resident[slot]
        resident.pop(adapter, None)
        resident[adapter] = None
        if len(resident) > self._resident_max:
            del resident[next(iter(resident))]
        self.rates.count(adapter, now_s)

    def resident(self, slot: Slot) -> list[str]:
        """Return what is believed to be loaded, the one used longest ago first."""
        return list(self._resident[slot])

    def restore(self, slot: Slot, adapters: Sequence[str]) -> None:
        """Believe what was loaded before this process began, as older than what has been used since."""
        known = [*(name for name in adapters if name not in self._resident[slot]), *self._resident[slot]]
        self._resident[slot] = dict.fromkeys(known[-self._resident_max :])

    def has(self, slot: Slot, adapter: str) -> bool:
        """Return whether a replica is taken to have an adapter loaded."""
        return adapter in self._resident[slot]

    def loads_s(self, adapter: str | None, now_s: float, load_s: float) -> list[tuple[float, float]] | None:
        """Say what loading an adapter costs at each replica.

        Args:
            adapter: Of the request.
            now_s: Present.
            load_s: Seconds that one load takes.

        Returns:
            By slot, seconds of the load itself, and what of them this request answers for: its share of a load that
            later requests use too, plus the expected load of the adapter that must go. `None`: nothing to load.
        """
        if adapter is None or not load_s:
            return None
        copies = sum([adapter in resident for resident in self._resident])
        if copies == len(self._resident):
            return None
        share_s = load_s / (1.0 + self._expected(adapter, now_s) / (copies + 1))
        return [
            (0.0, 0.0) if adapter in resident else (load_s, share_s + load_s * self._displaced(resident, now_s))
            for resident in self._resident
        ]

    def _displaced(self, resident: dict[str, None], now_s: float) -> float:
        """Return how likely the adapter that must go is asked for again soon."""
        if len(resident) < self._resident_max:
            return 0.0
        return min(1.0, self._expected(next(iter(resident)), now_s))

    def _expected(self, adapter: str, now_s: float) -> float:
        """Return the requests for an adapter in the horizon of an investment."""
        return self.rates.requests(adapter, now_s) / RATE_WINDOW_S * self._horizon_s
