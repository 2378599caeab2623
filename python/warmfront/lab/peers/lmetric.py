"""Scores from papers that multiply: LMetric, and SMetric on top of it.

LMetric takes the smallest product of prefill work and batch size: tokens queued for prefill plus this prompt's uncached
tokens, times requests in flight plus one. SMetric treats turns differently: the first turn of a session goes by
LMetric, later ones go where the longest prefix is, unless the backlog there would break a TTFT budget.

Source: "LMetric: Simple is Better" (arXiv 2603.15202): product of new prefill tokens and batch size. The SGLang
gateway's port of it counts only the request's own tokens and adds one to the load; the one is taken over here, the
queued tokens are kept. SMetric is known from a short description only.
"""

from __future__ import annotations

from collections.abc import Sequence

from warmfront.lab.peers.base import View, cheapest_first, choices
from warmfront.policy.base import Fleet
from warmfront.types import Choice, Overlap, Request, Slot

TTFT_BUDGET_S = 2.0
"""SMetric: how late the first token of a later turn may be before it is sent elsewhere."""


class LMetric:
    """Smallest (queued + own uncached tokens) · (requests in flight + 1)."""

    def __init__(self, _view: View) -> None:
        """Need nothing of the run."""

    def choose(self, request: Request, overlap: Overlap, fleet: Fleet) -> Sequence[Choice]:
        """Rank by the product."""
        return choices(cheapest_first(products(request, overlap, fleet), fleet), overlap.device, request, fleet)


class SMetric:
    """LMetric for first turns, the longest prefix within a TTFT budget for later ones."""

    def __init__(self, _view: View) -> None:
        """Need nothing of the run."""

    def choose(self, request: Request, overlap: Overlap, fleet: Fleet) -> Sequence[Choice]:
        """Rank by the product, the home of a later turn first while it is in time."""
        order = cheapest_first(products(request, overlap, fleet), fleet)
        home = self._home(request, overlap, fleet, order) if request.turn > 0 else None
        if home is not None:
            order = [home, *(slot for slot in order if slot != home)]
        return choices(order, overlap.device, request, fleet)

    @staticmethod
    def _home(request: Request, overlap: Overlap, fleet: Fleet, order: Sequence[Slot]) -> Slot | None:
        """Return the least loaded of the deepest holders if it answers within the budget."""
        deepest = fleet.deepest(overlap.device)
        if not deepest:
            return None
        holders = [slot for slot in order if overlap.device[slot] == deepest]
        home = min(holders, key=lambda slot: fleet.pending_tokens[slot])
        new_tokens = max(1, request.prompt_tokens - deepest)
        own_s = fleet.learned.prefill.seconds(home, new_tokens, request.prompt_tokens)
        return home if fleet.pending_s[home] + own_s <= TTFT_BUDGET_S else None


def products(request: Request, overlap: Overlap, fleet: Fleet) -> list[float]:
    """Return LMetric's score of each eligible slot, in token requests."""
    prompt, device = request.prompt_tokens, overlap.device
    pending, in_flight = fleet.pending_tokens, fleet.in_flight
    return [(pending[slot] + max(1, prompt - device[slot])) * (in_flight[slot] + 1.0) for slot in fleet.eligible]
