"""The KV router of NVIDIA Dynamo 1.6.1.

Cost of a replica in blocks, for a prompt of `isl` tokens and blocks of `bs`:

    prefill = max(0, (active prefill tokens + isl) / bs - credit)
    credit  = C·dk·device + host·(further blocks in host memory) + disk·(further blocks on disk)
    dk      = 1 / (1 + decay·(active prefill tokens - least of all) / isl)
    decode  = distinct full blocks of requests in flight, plus this prompt's full blocks not among them
    cost    = P·prefill + decode + A·requests in flight

The lowest cost wins; exact ties are drawn. Active prefill tokens are uncached prompt tokens of requests without a first
token. Only KV events count as overlap: the predicted side index is off by default.

`Kv` has the defaults: C 1, P 1, A 0, no decay, and the device tier alone, as with an engine that announces no other.
`KvDecay` adds `decay` 1, `KvTiers` the default credits of the other tiers, 0.75 and 0.25. `KvAis` lets the oldest
prefill of a replica fade as time passes, by its predicted duration (prefill load model `ais`). `KvTuned` has the best
settings measured for a nearly saturated fleet: C 2, P 4 and A 16 blocks of 64 tokens.

Source: flags and stubs of the 1.6.1 wheels, checked there against logged costs (a prompt of 6,758 tokens on an idle
worker with blocks of 64 costs 6758/64 + 105).
"""

from __future__ import annotations

from collections.abc import Sequence

from warmfront.lab.peers.base import View, cheapest_first, choices, events_only
from warmfront.policy.base import Fleet
from warmfront.types import Choice, Overlap, Request

HOST_CREDIT = 0.75
DISK_CREDIT = 0.25
DECAY = 1.0
"""Credit decay of `KvDecay`; off by default in Dynamo."""
TUNED_CREDIT, TUNED_PREFILL, TUNED_REQUEST_TOKENS = 2.0, 4.0, 1024.0
"""C, P and A of `KvTuned`, the last in tokens, as it is a number of blocks that depends on their size."""


class Kv:
    """Active and new prefill blocks plus active decode blocks, at temperature 0."""

    credit = 1.0
    prefill_weight = 1.0
    request_tokens = 0.0
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
        host, disk = overlap.host, overlap.disk
        active = self.active_prefill(fleet)
        least = min(active)
        costs = []
        for slot, pending in zip(fleet.eligible, active, strict=True):
            kept = 1.0 / (1.0 + self.decay * (pending - least) / max(1, prompt))
            credit = self.credit * kept * device[slot]
            credit += self.host_credit * (host[slot] - overlap.device[slot])
            credit += self.disk_credit * (disk[slot] - host[slot])
            prefill = max(0.0, pending + prompt - credit)
            decode = overlap.active_tokens[slot] + full - overlap.active[slot]
            requests = self.request_tokens * fleet.in_flight[slot]
            costs.append((self.prefill_weight * prefill + decode + requests) / size)
        return costs

    def active_prefill(self, fleet: Fleet) -> list[float]:
        """Return active prefill tokens of the eligible slots."""
        return [float(fleet.pending_tokens[slot]) for slot in fleet.eligible]


class KvDecay(Kv):
    """The same with credit that fades as a replica's prefill backlog grows past the least one."""

    decay = DECAY


class KvTiers(Kv):
    """The same with credit for blocks in host memory and on disk."""

    host_credit = HOST_CREDIT
    disk_credit = DISK_CREDIT


class KvAis(Kv):
    """The same with a backlog that shrinks while the oldest prefill runs."""

    def active_prefill(self, fleet: Fleet) -> list[float]:
        """Take what has passed of the oldest prefill from the backlog, at most a mean prefill."""
        left = []
        for slot in fleet.eligible:
            tokens, seconds, requests = float(fleet.pending_tokens[slot]), fleet.pending_s[slot], fleet.pending[slot]
            if requests and seconds > 0.0:
                passed = max(0.0, fleet.now_s - fleet.busy_since_s[slot]) / seconds
                tokens *= 1.0 - min(1.0 / requests, passed)
            left.append(tokens)
        return left


class KvTuned(Kv):
    """The same with settings tuned for load."""

    credit = TUNED_CREDIT
    prefill_weight = TUNED_PREFILL
    request_tokens = TUNED_REQUEST_TOKENS
