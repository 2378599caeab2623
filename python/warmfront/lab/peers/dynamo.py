"""The KV router of NVIDIA Dynamo 1.6.1.

Cost of a replica in blocks, for a prompt of `isl` tokens and blocks of `bs`:

    prefill = max(0, (active prefill tokens + isl) / bs - credit)
    credit  = C·dk·device + host·(further blocks in host memory) + disk·(further blocks on disk)
    dk      = 1 / (1 + decay·(active prefill tokens - least of all) / isl)
    decode  = distinct full blocks of requests in flight, plus this prompt's full blocks not among them
    cost    = prefill + decode

The lowest cost wins; exact ties are drawn. Active prefill tokens are uncached prompt tokens of requests without a first
token. Only KV events count as overlap: the predicted side index is off by default.

`Kv` knows the device tier alone, as with an engine that announces no other. `KvDecay` adds `decay` 1, `KvTiers` the
default credits of the other tiers, 0.75 and 0.25.

Source: flags and stubs of the 1.6.1 wheels, checked there against logged costs (a prompt of 6,758 tokens on an idle
worker with blocks of 64 costs 6758/64 + 105).
"""

from __future__ import annotations

from collections.abc import Sequence

from warmfront.lab.peers.base import View, cheapest_first, choices, events_only
from warmfront.policy.base import Fleet
from warmfront.types import Choice, Overlap, Request

OVERLAP_CREDIT = 1.0
"""C."""
HOST_CREDIT = 0.75
DISK_CREDIT = 0.25
DECAY = 1.0
"""Credit decay of `KvDecay`; off by default in Dynamo."""


class Kv:
    """Active and new prefill blocks plus active decode blocks, at temperature 0."""

    decay = 0.0
    host_credit = 0.0
    disk_credit = 0.0

    def __init__(self, view: View) -> None:
        self._block_size = view.block_size

    def choose(self, request: Request, overlap: Overlap, fleet: Fleet) -> Sequence[Choice]:
        """Rank by cost."""
        device = events_only(overlap, fleet)
        costs = self.costs(request, overlap, device, fleet)
        return choices(cheapest_first(costs, fleet), device, request, fleet)

    def costs(self, request: Request, overlap: Overlap, device: Sequence[int], fleet: Fleet) -> list[float]:
        """Return the cost of each eligible slot, in blocks; `device` is the overlap in tokens by slot."""
        size, prompt = self._block_size, request.prompt_tokens
        full = prompt // size * size
        pending, host, disk = fleet.pending_tokens, overlap.host, overlap.disk
        least = min(pending[slot] for slot in fleet.eligible)
        costs = []
        for slot in fleet.eligible:
            kept = 1.0 / (1.0 + self.decay * (pending[slot] - least) / max(1, prompt))
            credit = OVERLAP_CREDIT * kept * device[slot]
            credit += self.host_credit * (host[slot] - overlap.device[slot])
            credit += self.disk_credit * (disk[slot] - host[slot])
            prefill = max(0.0, pending[slot] + prompt - credit)
            decode = overlap.active_tokens[slot] + full - overlap.active[slot]
            costs.append((prefill + decode) / size)
        return costs


class KvDecay(Kv):
    """The same with credit that fades as a replica's prefill backlog grows past the least one."""

    decay = DECAY


class KvTiers(Kv):
    """The same with credit for blocks in host memory and on disk."""

    host_credit = HOST_CREDIT
    disk_credit = DISK_CREDIT
