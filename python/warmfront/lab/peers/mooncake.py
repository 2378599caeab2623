"""Least time to first token, as the conductor of Mooncake chooses a prefill instance.

Rule: the smallest sum of prefill queued at a replica and prefill of the uncached part of this prompt; equal sums go to
the fewest requests in flight. There is no term for decoding and none for what the request does to others.

Source: "Mooncake: Trading More Storage for Less Computation" (FAST 2025), cache-aware prefill scheduling. Mooncake
predicts seconds from profiles made before; here work is counted in tokens, which orders equal replicas the same way.
Transfers of KV between instances and early rejection are left out.
"""

from __future__ import annotations

from collections.abc import Sequence

from warmfront.lab.peers.base import View, choices
from warmfront.policy.base import Fleet
from warmfront.types import Choice, Overlap, Request, Slot


class MinTtft:
    """Least prefill work before the first token."""

    def __init__(self, _view: View) -> None:
        """Need nothing of the run."""

    def choose(self, request: Request, overlap: Overlap, fleet: Fleet) -> Sequence[Choice]:
        """Rank by tokens to compute before the first token."""
        draw, in_flight = fleet.rng.random, fleet.in_flight
        work = {
            slot: fleet.pending_tokens[slot] + max(1, request.prompt_tokens - overlap.device[slot])
            for slot in fleet.eligible
        }
        order = sorted(fleet.eligible, key=lambda slot: (work[slot], in_flight[slot], draw()))
        return choices(order, overlap.device, request, fleet)


def predicted_ttft_s(slot: Slot, request: Request, overlap: Overlap, fleet: Fleet) -> float:
    """Add the seconds queued at a replica and those of this request's uncached tokens, as this router has learned."""
    new_tokens = max(1, request.prompt_tokens - overlap.device[slot])
    return fleet.pending_s[slot] + fleet.learned.prefill.seconds(slot, new_tokens, request.prompt_tokens)
