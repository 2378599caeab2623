"""Two routing logics of the vLLM production stack's router.

`PrefixAware`: a hash trie over pieces of 128 characters, which never forgets. The replicas that were sent the longest
known prefix are candidates, and one is drawn; with nothing known that is any replica. Load plays no part.

`LoadAware`: the share of the prompt that a replica holds, less `beta` times its relative load,
`(load - mean) / max(1, mean)`, with requests in flight as load. The highest score wins, equal scores go to the first.
When no replica holds anything, sessions go by consistent hashing and the rest to the lowest request rate.

Source: `prefix/hashtrie.py` and `routers/routing_logic.py` of the main branch in August 2026 (`loadaware`: PR 1035).
"""

from __future__ import annotations

from collections.abc import Sequence

from warmfront.lab.peers.base import Members, Prompts, View, choices, events_only, then_by_load
from warmfront.lab.peers.history import History
from warmfront.policy.affinity import ranked
from warmfront.policy.base import Fleet
from warmfront.types import Choice, Overlap, Request, Slot

# Chunks have 128 characters, 32 tokens at four each. Blocks of the pool stand in for them: prefixes end with a block.
TRIE_TOKENS_MAX = 1 << 24
"""The trie has no bound of its own; this one, for each replica, keeps the lab's memory in bounds."""
BETA = 1.0
"""What a replica at twice the mean load loses, in full cache hits."""


class PrefixAware:
    """Longest match in a trie without end, drawn among equals."""

    def __init__(self, view: View) -> None:
        self._size = view.block_size
        self._blocks = Prompts(view)
        self._members = Members()
        self._trie = History(max(1, TRIE_TOKENS_MAX // view.block_size))

    def choose(self, request: Request, overlap: Overlap, fleet: Fleet) -> Sequence[Choice]:
        """Draw among the longest matches."""
        for slot in self._members.changed(fleet):
            self._trie.forget(slot)
        depths = [depth * self._size for depth in self._trie.depths(self._blocks(request), fleet.slots)]
        deepest = fleet.deepest(depths)
        first = fleet.rng.choice([slot for slot in fleet.eligible if depths[slot] == deepest])
        return choices(then_by_load(first, fleet), depths, request, fleet)

    def chosen(self, request: Request, overlap: Overlap, fleet: Fleet, slot: Slot) -> None:
        """Insert the prompt into the trie."""
        self._trie.insert(self._blocks(request), slot, fleet.now_s)


class LoadAware:
    """Match minus beta times load."""

    def __init__(self, _view: View) -> None:
        """Need nothing of the run."""

    def choose(self, request: Request, overlap: Overlap, fleet: Fleet) -> Sequence[Choice]:
        """Rank by score, or by session and rate when nothing is held anywhere."""
        depths = events_only(overlap, fleet)
        if fleet.deepest(depths):
            scores = dict(zip(fleet.eligible, self._scores(depths, request, fleet), strict=True))
            order = sorted(fleet.eligible, key=lambda slot: -scores[slot])
        elif request.affinity_key is not None:
            order = ranked(request.affinity_key, fleet.eligible, fleet.hash)
        else:
            order = sorted(fleet.eligible, key=lambda slot: fleet.arrivals[slot])
        return choices(order, depths, request, fleet)

    @staticmethod
    def _scores(depths: Sequence[int], request: Request, fleet: Fleet) -> list[float]:
        loads = [fleet.in_flight[slot] for slot in fleet.eligible]
        mean = sum(loads) / len(loads)
        prompt = request.prompt_tokens
        return [
            min(depths[slot], prompt) / max(1, prompt) - BETA * (load - mean) / max(1.0, mean)
            for slot, load in zip(fleet.eligible, loads, strict=True)
        ]
