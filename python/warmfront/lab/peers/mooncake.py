"""Least time to first token, as the conductor of Mooncake chooses a prefill instance.

Rule: predicted prefill seconds queued at a replica plus predicted seconds for the uncached part of this prompt; the
smallest sum wins. There is no term for decoding and none for what the request does to others.

Source: "Mooncake: Trading More Storage for Less Computation" (FAST 2025), cache-aware prefill scheduling. Mooncake
predicts from profiles made before; here both predictions are the router's, learned from what it sees. Transfers of KV
between instances and early rejection are left out.
"""

from __future__ import annotations

from collections.abc import Sequence

from warmfront.lab.peers.base import View, cheapest_first, choices
from warmfront.policy.base import Fleet
from warmfront.types import Choice, Overlap, Request, Slot


class MinTtft:
    """Smallest predicted TTFT."""

    def __init__(self, _view: View) -> None:
        """Need nothing of the run."""

    def choose(self, request: Request, overlap: Overlap, fleet: Fleet) -> Sequence[Choice]:
        """Rank by predicted TTFT."""
        costs = [predicted_ttft_s(slot, request, overlap, fleet) for slot in fleet.eligible]
        return choices(cheapest_first(costs, fleet), overlap.device, request, fleet)


def predicted_ttft_s(slot: Slot, request: Request, overlap: Overlap, fleet: Fleet) -> float:
    """Add the seconds queued at a replica and those of this request's uncached tokens."""
    new_tokens = max(1, request.prompt_tokens - overlap.device[slot])
    return fleet.pending_s[slot] + fleet.learned.prefill.seconds(slot, new_tokens, request.prompt_tokens)
