"""The cache-aware policy of the SGLang model gateway (sglang-router 0.3.2).

Rule: when requests in flight differ by more than 64 and by more than half again, the shortest queue. Otherwise the
replica that was the first to be sent the deepest known prefix, if that prefix is more than 0.3 of the prompt; else the
shortest queue. Equal queues go to the first replica by position.

Source: `sgl-model-gateway/src/policies/cache_aware.rs` and `tree.rs`; defaults from the launcher's help. Position as
tie rule and the missing forgetting after a restart were seen live: unrelated requests one after another all go to the
first of two workers. Older versions send a prompt without a match to the smallest tree; 0.3.2 does not, as that same
run shows. A node of the tree keeps the replica that made it as its answer, under the name of a last one. A small
re-statement elsewhere takes the smallest tree and draws among holders: the running system wins.
"""

from __future__ import annotations

from collections.abc import Sequence

from warmfront.lab.peers.base import CHARACTERS_PER_TOKEN, Members, Prompts, View, choices, then_by_load
from warmfront.lab.peers.history import History
from warmfront.policy.base import Fleet
from warmfront.types import Choice, Overlap, Request, Slot

CACHE_THRESHOLD = 0.3
"""Share of the prompt that must be known for affinity to count."""
BALANCE_ABS = 64
"""Difference of requests in flight above which the fleet may be imbalanced."""
BALANCE_REL = 1.5
"""And ratio."""
TREE_CHARACTERS_MAX = 1 << 26
"""Bound of the tree for each replica; what was used least recently goes first, leaves before their parents."""


class CacheAware:
    """History tree behind a load gate."""

    def __init__(self, view: View) -> None:
        self._size = view.block_size
        self._blocks = Prompts(view)
        self._members = Members()
        self._tree = History(TREE_CHARACTERS_MAX // CHARACTERS_PER_TOKEN // view.block_size, owned=True)

    def choose(self, request: Request, overlap: Overlap, fleet: Fleet) -> Sequence[Choice]:
        """Rank by the gate, then by the tree."""
        for slot in self._members.changed(fleet):
            self._tree.forget(slot)
        blocks = self._blocks(request)
        depths = [depth * self._size for depth in self._tree.depths(blocks, fleet.slots)]
        return choices(then_by_load(self._pick(request, blocks, max(depths), fleet), fleet), depths, request, fleet)

    def chosen(self, request: Request, overlap: Overlap, fleet: Fleet, slot: Slot) -> None:
        """Insert the prompt into the tree."""
        self._tree.insert(self._blocks(request), slot, fleet.now_s)

    def _pick(self, request: Request, blocks: Sequence[int], matched: int, fleet: Fleet) -> Slot:
        shortest = min(fleet.eligible, key=lambda slot: fleet.in_flight[slot])
        if is_imbalanced([fleet.in_flight[slot] for slot in fleet.eligible]):
            return shortest
        if matched <= CACHE_THRESHOLD * request.prompt_tokens:
            return shortest
        holder = self._tree.owner(blocks[matched // self._size - 1])
        if holder is None or not fleet.is_eligible[holder]:
            return fleet.eligible[0]
        return holder


def is_imbalanced(loads: Sequence[int]) -> bool:
    """Tell whether requests in flight differ too much, by both measures."""
    most, least = max(loads), min(loads)
    return most - least > BALANCE_ABS and most > BALANCE_REL * least
