"""The prefix-cache algorithm of the AIBrix gateway (main branch, August 2026).

Rule: when the busiest replica has more than 2·(mean + 1) requests in flight and at least 8 more than the idlest, only
the idlest replicas are looked at. Among those that know a part of the prompt, by share (in whole percent) and then by
requests in flight, the first with at most mean + 1 standard deviation serves. Without any, the one with the fewest
requests in flight of all. Ties are drawn.

Source: `pkg/plugins/gateway/algorithms/prefix_cache.go`. Its read-me and older versions gate at a plain difference of
8, the documentation at 16, with a factor of 2 for the deviation; the code wins. The table holds 200,000 blocks for
20 minutes since their last use, for all replicas together. A block is 128 characters here, as documented; the code's
default of 4 would remember 200,000 tokens in all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from warmfront.lab.peers.base import CHARACTERS_PER_TOKEN, Members, View, choices, then_by_load
from warmfront.lab.peers.history import History
from warmfront.policy.base import Fleet
from warmfront.types import Choice, Overlap, Request, Slot

IMBALANCE_FACTOR = 2.0
IMBALANCE_GAP = 8
DEVIATIONS = 1.0
"""Standard deviations above the mean load at which a match is passed over."""
TABLE_BLOCKS = 200_000
BLOCK_CHARACTERS = 128
LIFETIME_S = 20 * 60.0
"""A block falls out this long after its last use."""


class PrefixCache:
    """Hash table behind two load gates."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._members = Members()
        table_tokens = TABLE_BLOCKS * BLOCK_CHARACTERS // CHARACTERS_PER_TOKEN
        self._table = History(max(1, table_tokens // view.block_size), together=True)

    def choose(self, request: Request, overlap: Overlap, fleet: Fleet) -> Sequence[Choice]:
        """Rank by match within the gates, else by load."""
        for slot in self._members.changed(fleet):
            self._table.forget(slot)
        self._table.expire(fleet.now_s - LIFETIME_S)
        blocks, size = self._view.blocks(request), self._view.block_size
        depths = self._table.depths(blocks, fleet.slots)
        percent = [100 * depth // len(blocks) if depth else None for depth in depths]
        first = self._pick(percent, fleet)
        return choices(then_by_load(first, fleet), [depth * size for depth in depths], request, fleet)

    def chosen(self, request: Request, overlap: Overlap, fleet: Fleet, slot: Slot) -> None:
        """Insert the prompt into the table."""
        self._table.insert(self._view.blocks(request), slot, fleet.now_s)

    @staticmethod
    def _pick(percent: Sequence[int | None], fleet: Fleet) -> Slot:
        """Choose by the share of the prompt that each slot knows; `None`: nothing."""
        draw, in_flight = fleet.rng.random, fleet.in_flight
        loads = [in_flight[slot] for slot in fleet.eligible]
        mean = sum(loads) / len(loads)
        bound = mean + DEVIATIONS * math.sqrt(sum((load - mean) ** 2 for load in loads) / len(loads))
        matches = [
            (-share, in_flight[slot], draw(), slot) for slot in gated(fleet) if (share := percent[slot]) is not None
        ]
        for _, load, _, slot in sorted(matches):
            if load <= bound:
                return slot
        return min(fleet.eligible, key=lambda slot: (in_flight[slot], draw()))


def gated(fleet: Fleet) -> list[Slot]:
    """Return the slots whose matches count: the idlest when load is severely uneven, all otherwise."""
    loads = [fleet.in_flight[slot] for slot in fleet.eligible]
    most, least, mean = max(loads), min(loads), sum(loads) / len(loads)
    if most <= IMBALANCE_FACTOR * (mean + 1.0) or most - least < IMBALANCE_GAP:
        return fleet.eligible
    return [slot for slot in fleet.eligible if fleet.in_flight[slot] == least]
