"""The prefix-cache algorithm of the AIBrix gateway (main branch, August 2026).

Rule: when requests in flight differ by more than 16, the one with the fewest. Otherwise, among those that know a part
of the prompt, by share (in whole percent) and then by requests in flight, the first with at most mean + 2 standard
deviations. Without any, the one with the fewest requests in flight. Ties are drawn.

Source: `pkg/plugins/gateway/algorithms/prefix_cache.go` and its read-me; constants as documented. The code's own
defaults are a difference of 8, 1 deviation and blocks of 4 characters: its table of 200,000 blocks, for all replicas
together and 20 minutes after their last use, would then remember 200,000 tokens in all, against 6.4 million with the
documented blocks of 128. A later version gates at 2·(mean + 1) and a difference of 8.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from warmfront.lab.peers.base import CHARACTERS_PER_TOKEN, Members, Prompts, View, choices, then_by_load
from warmfront.lab.peers.history import History
from warmfront.policy.base import Fleet
from warmfront.types import Choice, Overlap, Request, Slot

IMBALANCE = 16
"""Difference of requests in flight above which matches do not count."""
DEVIATIONS = 2.0
"""Standard deviations above the mean load at which a match is passed over."""
TABLE_BLOCKS = 200_000
BLOCK_CHARACTERS = 128
LIFETIME_S = 20 * 60.0
"""A block falls out this long after its last use."""


class PrefixCache:
    """Hash table behind two load gates."""

    def __init__(self, view: View) -> None:
        self._size = view.block_size
        self._blocks = Prompts(view)
        self._members = Members()
        table_tokens = TABLE_BLOCKS * BLOCK_CHARACTERS // CHARACTERS_PER_TOKEN
        self._table = History(max(1, table_tokens // view.block_size), together=True)

    def choose(self, request: Request, overlap: Overlap, fleet: Fleet) -> Sequence[Choice]:
        """Rank by match within the gates, else by load."""
        for slot in self._members.changed(fleet):
            self._table.forget(slot)
        self._table.expire(fleet.now_s - LIFETIME_S)
        blocks = self._blocks(request)
        depths = self._table.depths(blocks, fleet.slots)
        percent = [100 * depth // len(blocks) if depth else None for depth in depths]
        first = self._pick(percent, fleet)
        return choices(then_by_load(first, fleet), [depth * self._size for depth in depths], request, fleet)

    def chosen(self, request: Request, overlap: Overlap, fleet: Fleet, slot: Slot) -> None:
        """Insert the prompt into the table."""
        self._table.insert(self._blocks(request), slot, fleet.now_s)

    @staticmethod
    def _pick(percent: Sequence[int | None], fleet: Fleet) -> Slot:
        """Choose by the share of the prompt that each slot knows; `None`: nothing."""
        draw, in_flight = fleet.rng.random, fleet.in_flight
        loads = [in_flight[slot] for slot in fleet.eligible]
        mean = sum(loads) / len(loads)
        bound = mean + DEVIATIONS * math.sqrt(sum((load - mean) ** 2 for load in loads) / len(loads))
        if max(loads) - min(loads) <= IMBALANCE:
            known = [(share, slot) for slot in fleet.eligible if (share := percent[slot]) is not None]
            for _, load, _, slot in sorted((-share, in_flight[slot], draw(), slot) for share, slot in known):
                if load <= bound:
                    return slot
        return min(fleet.eligible, key=lambda slot: (in_flight[slot], draw()))
