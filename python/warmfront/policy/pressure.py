"""A lower bound of what makes prefill dear where others arrive, kept for a tenth of a second.

The price of prefill work holds λ̃/(1 − ρ̃), which takes a third of the arithmetic of a bound and hardly moves between two
decisions. Both rates decay with `RATE_WINDOW_S` and otherwise only grow, as long as the replicas that may be chosen are
the same; so what they were, decayed by as long as it may be used, is never more than they are. What is easy to get
wrong: the mean part is over those replicas, so another list of them needs another column.
"""

from __future__ import annotations

import math

from warmfront.config import CostConfig
from warmfront.policy.base import RATE_WINDOW_S, Fleet
from warmfront.types import Slot

KEPT_S = 0.1
"""How long a column is used."""
_DECAY = math.exp(-KEPT_S / RATE_WINDOW_S)


class Pressure:
    """The bound of one pool."""

    def __init__(self, config: CostConfig) -> None:
        self._mix, self._busy_max = config.fleet_mix, config.utilisation_max
        self._column: list[float] = []
        self._eligible: list[Slot] | None = None
        self._made_s = 0.0

    def column(self, fleet: Fleet) -> list[float]:
        """Return at most λ̃/(1 − ρ̃), with arrivals by weight, by slot."""
        # The very list, not an equal one: rows of replicas that left begin anew, and a new list comes with that.
        if self._eligible is not fleet.eligible or not 0.0 <= fleet.now_s - self._made_s <= KEPT_S:
            self._column, self._eligible, self._made_s = self._made(fleet), fleet.eligible, fleet.now_s
        return self._column

    def _made(self, fleet: Fleet) -> list[float]:
        _, _, arrivals, work_s = fleet.burden()
        decay = _DECAY * fleet.decay() / RATE_WINDOW_S
        own, mean, busy_max = (1.0 - self._mix) * decay, self._mix * decay / len(fleet.eligible), self._busy_max
        rates = zip(fleet.arrivals, fleet.work_s, strict=True)
        return [
            (mean * arrivals + own * slot_arrivals) / (1.0 - min(busy_max, mean * work_s + own * slot_work_s))
            for slot_arrivals, slot_work_s in rates
        ]
