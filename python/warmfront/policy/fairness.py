"""Who uses a pool, and who uses more than a fair share of it.

Counts what flow control counts: by flow, tokens to compute and to produce, of every dispatch and not only of requests
that were held, decayed. A flow's fair share is its weight over the weights of all flows that were seen lately. What is
easy to get wrong: to use more than others is no wrong where others do not want more; so the overdraft stops nobody. It
makes the work of a flow dearer by what that work costs others, who otherwise pay for it with their waiting.

Source: docs/explanation/policies.md, section "Fairness between flows".
"""

from __future__ import annotations

import math
from collections.abc import Mapping

WINDOW_S = 60.0
"""Time constant of a flow's use."""
REBASE_AFTER_S = 10 * WINDOW_S
"""Scaled counts are rebased beyond this age, so that they never overflow."""
TOKENS_MIN = 100.0
"""A flow that used less, decayed, is not there any more."""
FLOWS_MAX = 4096
"""Flows whose use is remembered; of more, the one first seen goes."""


class Shares:
    """Use of one pool by flow."""

    def __init__(self) -> None:
        self.weights: Mapping[str, float] = {}
        """Of flows that do not weigh 1: `router.flow.weights`."""
        self._used: dict[str, float] = {}
        """Tokens by flow, times e^(age of `_origin_s` / `WINDOW_S`)."""
        self._total = 0.0
        self._weight = 0.0
        """Of all flows in `_used`."""
        self._origin_s = 0.0
        self._swept_s = 0.0

    def add(self, flow: str, tokens: float, now_s: float) -> None:
        """Count a dispatch."""
        if now_s - self._swept_s > WINDOW_S:
            self._sweep(now_s)
        scaled = tokens * math.exp((now_s - self._origin_s) / WINDOW_S)
        if flow not in self._used:
            if len(self._used) >= FLOWS_MAX:
                self._total -= self._used.pop(next(iter(self._used)))
            self._used[flow] = 0.0
            self._weight = sum([self.weights.get(name, 1.0) for name in self._used])
        self._used[flow] += scaled
        self._total += scaled

    def overdraft(self, flow: str) -> float:
        """Return how far a flow is above its fair share: 0 at or below it, 1 when it uses everything."""
        used = self._used.get(flow, 0.0)
        if used <= 0.0 or len(self._used) < 2:
            return 0.0
        fair = self.weights.get(flow, 1.0) / self._weight
        return max(0.0, (used / self._total - fair) / (1.0 - fair))

    def reweigh(self, weights: Mapping[str, float]) -> None:
        """Use other weights from now on."""
        self.weights = weights
        self._weight = sum([weights.get(name, 1.0) for name in self._used])

    def _sweep(self, now_s: float) -> None:
        """Forget flows that are gone, and bring all counts to the present now and then."""
        self._swept_s = now_s
        age_s = now_s - self._origin_s
        factor = math.exp(-age_s / WINDOW_S)
        self._used = {flow: used for flow, used in self._used.items() if used * factor >= TOKENS_MIN}
        if age_s > REBASE_AFTER_S:
            self._used = {flow: used * factor for flow, used in self._used.items()}
            self._origin_s = now_s
        self._total = sum(self._used.values())
        self._weight = sum([self.weights.get(name, 1.0) for name in self._used])
