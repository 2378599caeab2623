"""The prefix-affinity router of Ray Serve LLM 2.60.

Rule: unless queue lengths differ by more than a threshold, which is infinite by default, the replicas that were sent
the longest known prefix, if it is at least 0.1 of the prompt; below that, the replicas with the smallest tree. Of those
candidates the shortest queue serves, ties are drawn. An imbalanced fleet would be served by power of two.

Source: `routing_policies/prefix_aware/prefix_aware_router.py`. Eviction (400,000 to 360,000 characters) is off by
default and therefore here. The limit of ongoing requests for each replica, beyond which Serve takes its fallback
candidates, is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from warmfront.lab.peers.base import Members, Prompts, View, choices, then_by_load
from warmfront.lab.peers.history import History
from warmfront.policy.base import Fleet
from warmfront.types import Choice, Overlap, Request, Slot

IMBALANCED_THRESHOLD = math.inf
"""Difference of queue lengths above which affinity is given up."""
MATCH_RATE = 0.1
"""Share of the prompt that must be known for affinity to count."""
TREE_TOKENS_MAX = 1 << 24
"""The tree has no bound by default; this one, for each replica, keeps the lab's memory in bounds."""


class PrefixAffinity:
    """Character tree with a low threshold and no load gate."""

    def __init__(self, view: View, *, imbalanced_threshold: float = IMBALANCED_THRESHOLD) -> None:
        self._size = view.block_size
        self._blocks = Prompts(view)
        self._imbalanced_threshold = imbalanced_threshold
        self._members = Members()
        self._tree = History(max(1, TREE_TOKENS_MAX // view.block_size))

    def choose(self, request: Request, overlap: Overlap, fleet: Fleet) -> Sequence[Choice]:
        """Rank the candidates by queue length, the others behind them."""
        for slot in self._members.changed(fleet):
            self._tree.forget(slot)
        depths = [depth * self._size for depth in self._tree.depths(self._blocks(request), fleet.slots)]
        draw = fleet.rng.random
        candidates = self._candidates(depths, request, fleet)
        first = min(candidates, key=lambda slot: (fleet.in_flight[slot], draw()))
        return choices(then_by_load(first, fleet), depths, request, fleet)

    def chosen(self, request: Request, overlap: Overlap, fleet: Fleet, slot: Slot) -> None:
        """Insert the prompt into the tree."""
        self._tree.insert(self._blocks(request), slot, fleet.now_s)

    def _candidates(self, depths: Sequence[int], request: Request, fleet: Fleet) -> list[Slot]:
        queues = [fleet.in_flight[slot] for slot in fleet.eligible]
        if max(queues) - min(queues) > self._imbalanced_threshold:
            return fleet.rng.sample(fleet.eligible, min(2, len(fleet.eligible)))
        deepest = fleet.deepest(list(depths))
        if deepest and deepest >= MATCH_RATE * request.prompt_tokens:
            return [slot for slot in fleet.eligible if depths[slot] == deepest]
        smallest = min(self._tree.held(slot) for slot in fleet.eligible)
        return [slot for slot in fleet.eligible if self._tree.held(slot) == smallest]
