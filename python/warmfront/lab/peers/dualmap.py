"""DualMap: two candidates for each prefix, by two independent hashes.

Rule: the beginning of a prompt is mapped on two rings, which gives two candidates. The one with more of the prompt in
its cache serves while its predicted TTFT is within the SLO, or is the smaller of the two anyway; else the other. Equal
caches go to the smaller backlog. The beginning that is hashed is 1,024 tokens long; where that prefix draws more than
2 / replicas of recent requests, 512 tokens are added, until it does not.

Source: "DualMap" (arXiv 2602.06502, ICLR 2026): dual mapping, SLO-aware routing, adaptive prefix length. The lengths
and the share are from a short description. Moving queued requests between the candidates (hotspot-aware rebalancing) is
out of a router's reach. Rendezvous hashing stands for the rings: both move only the keys of a replica that comes or
goes.
"""

from __future__ import annotations

from collections.abc import Sequence

from warmfront.lab.peers.base import Prompts, View, choices, then_by_load
from warmfront.lab.peers.mooncake import predicted_ttft_s
from warmfront.policy.affinity import mix
from warmfront.policy.base import Fleet
from warmfront.types import Choice, Overlap, Request, Slot

TTFT_SLO_S = 2.0
"""The operator's target; the default of this project."""
PREFIX_TOKENS = 1024
STEP_TOKENS = 512
HOT_SHARE = 2.0
"""A prefix is hot above this over the number of replicas, as a share of recent requests."""
RECENT_MIN = 50.0
"""Requests seen before any prefix counts as hot."""
RECENT_MAX = 2000.0
"""Beyond it all counts are halved, and those below `COUNT_MIN` forgotten: a few thousand prefixes at most."""
COUNT_MIN = 0.3
_RINGS = (0x243F6A8885A308D3, 0x13198A2E03707344)
"""What makes two rings of one hash."""


class DualMap:
    """The better of two candidates by cache, then by TTFT."""

    def __init__(self, view: View) -> None:
        self._size = view.block_size
        self._blocks = Prompts(view)
        self._counts: dict[int, float] = {}
        self._requests = 0.0

    def choose(self, request: Request, overlap: Overlap, fleet: Fleet) -> Sequence[Choice]:
        """Rank the two candidates."""
        key, _ = self._key(request, fleet)
        first = self._better(*candidates(key, fleet), request=request, overlap=overlap, fleet=fleet)
        return choices(then_by_load(first, fleet), overlap.device, request, fleet)

    def chosen(self, request: Request, overlap: Overlap, fleet: Fleet, slot: Slot) -> None:
        """Count every prefix of the request up to the one that was hashed."""
        _, counted = self._key(request, fleet)
        for key in counted:
            self._counts[key] = self._counts.get(key, 0.0) + 1.0
        self._requests += 1.0
        if self._requests > RECENT_MAX:
            self._requests *= 0.5
            halved = ((key, 0.5 * count) for key, count in self._counts.items())
            self._counts = {key: count for key, count in halved if count >= COUNT_MIN}

    def _key(self, request: Request, fleet: Fleet) -> tuple[int, list[int]]:
        """Return the hash of the beginning that is neither hot nor longer than needed, and all that were tried."""
        blocks, size = self._blocks(request), self._size
        if not blocks:
            return request.prefix_key, []
        depth, step = max(1, PREFIX_TOKENS // size), max(1, STEP_TOKENS // size)
        tried = [blocks[min(depth, len(blocks)) - 1]]
        while depth < len(blocks) and self._is_hot(tried[-1], fleet):
            depth += step
            tried.append(blocks[min(depth, len(blocks)) - 1])
        return tried[-1], tried

    def _is_hot(self, key: int, fleet: Fleet) -> bool:
        share = HOT_SHARE / len(fleet.eligible)
        return self._requests >= RECENT_MIN and self._counts.get(key, 0.0) > share * self._requests

    @staticmethod
    def _better(one: Slot, other: Slot, *, request: Request, overlap: Overlap, fleet: Fleet) -> Slot:
        if overlap.device[one] == overlap.device[other]:
            return one if fleet.pending_tokens[one] <= fleet.pending_tokens[other] else other
        warm, cold = (one, other) if overlap.device[one] > overlap.device[other] else (other, one)
        warm_s = predicted_ttft_s(warm, request, overlap, fleet)
        if warm_s <= TTFT_SLO_S or warm_s <= predicted_ttft_s(cold, request, overlap, fleet):
            return warm
        return cold


def candidates(key: int, fleet: Fleet) -> tuple[Slot, Slot]:
    """Return the slot that each ring gives; the same one twice only where there is no other."""
    hashes = fleet.hash
    ones, others = (mix(key, ring) for ring in _RINGS)
    first = max(fleet.eligible, key=lambda slot: mix(ones, hashes[slot]))
    rest = [slot for slot in fleet.eligible if slot != first]
    return first, max(rest, key=lambda slot: mix(others, hashes[slot]), default=first)
