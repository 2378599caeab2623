"""Fixed prices of the cost policy that are neither learned nor the operator's, and the table that explains costs.

The order of `TERMS` is the order in which `Evaluation.costs` adds them up.
"""

from __future__ import annotations

import math

from msgspec import Struct

from warmfront.core import erfc
from warmfront.policy.base import ReplicaCost, Term
from warmfront.types import Request, Slot

STALL_MIX = 0.25
"""Share of the fleet mean in the answers that a prefill stalls: most of them run where it goes, but not all run still
when it begins."""
TIE_S = 1e-3
"""Costs this close are equal: the emptier memory wins, then the hash of the prefix."""
SESSION_MARGIN = 0.1
"""Part of its own prefill by which the replica of a session may cost more than the cheapest: a prior, not a fact."""
SESSION_LOOKS = 2
"""Replicas that a session key may prefer, in its order; the cheapest is next."""
TARGET_PER_PATIENCE = 4.0
"""S_ttft over the wait above which a request is better held than sent."""
MEMORY_FULL = 0.97
"""Share of KV memory in use above which requests wait for memory."""
OUTPUT_HELD = 0.5
"""Part of its expected output that a request in flight holds in memory: they are at all points of their answers."""
MEMORY_UTILISATION_MAX = 0.9
"""Cap of the utilisation in the price of memory."""
MEMORY_QUEUE_MAX = 30.0
"""Cap of the number of requests that a scarce memory delays."""
MEMORY = (MEMORY_FULL, MEMORY_UTILISATION_MAX, MEMORY_QUEUE_MAX, OUTPUT_HELD)
"""The same for the core."""
LIMIT_UTILISATION_MAX = 0.85
"""Mean utilisation of the fleet from which on `ttft_limit_s` is not enforced."""
COST_WINDOW_S = 30.0
"""Time constant of a replica's mean cost."""
COST_INTERVAL_S = 0.1
"""Mean costs are updated no more often than this: it bounds the work of a decision. The mean is over time, so the
arrivals in between, seen a moment later, would hardly move it."""
POPULARITY_WINDOW_S = 60.0
"""Time constant of a prefix's request rate."""
PREFIXES_MAX = 65_536
"""Prefixes whose rate is remembered; the one asked for longest ago goes first."""


class Costs(Struct, frozen=True, gc=False):
    """All that one evaluation computed for one replica. Seconds unless the name says otherwise."""

    total_s: float
    slot: Slot
    cached_tokens: int
    waiting_s: float
    prefill_s: float
    eviction_s: float
    decode_s: float
    memory_s: float
    future_s: float
    net_s: float
    withheld_s: float
    blind_s: float
    new_tokens: float
    own_prefill_s: float
    paid_prefill_s: float
    compute_wait_s: float
    memory_wait_s: float
    price: float
    credit: float
    memory_used: float
    copies_gain: float
    later_turns: float
    tier_load_s: float
    adapter_load_s: float
    weight: float
    overdraft: float

    @property
    def first_token_s(self) -> float:
        """Expected time to the first token."""
        return self.waiting_s + self.own_prefill_s + self.net_s

    @property
    def trusting_s(self) -> float:
        """The cost with full credit."""
        return self.total_s - self.withheld_s

    @property
    def single_s(self) -> float:
        """The cost of this request alone: nothing withheld, no later turns, no investment in a copy."""
        unshared_s = (self.own_prefill_s - self.paid_prefill_s) * self.price
        return self.total_s - self.withheld_s - self.future_s + unshared_s

    def explained(self) -> ReplicaCost:
        """Return the costs as named terms and factors."""
        return ReplicaCost(
            slot=self.slot,
            cached_tokens=self.cached_tokens,
            terms=[Term(name, symbol, "s", getattr(self, field)) for name, symbol, field in TERMS],
            factors=[Term(name, symbol, unit, float(getattr(self, field))) for name, symbol, unit, field in FACTORS],
            total=self.total_s,
        )


def chance_of_full(used: float, size: float, requests: float) -> float:
    """φ: the chance that a replica's memory fills while a request is there.

    The number of requests in flight varies as the root of itself, and memory with it. Where many small ones share it,
    92 % of it may be safe; where few large ones do, 80 % is not.

    Args:
        used: Share of the memory that is in use on average.
        size: Of all its requests together, as a share of the memory; blocks that several use count once for each.
        requests: Their number, above 0.
    """
    deviation = size / math.sqrt(requests)
    if deviation <= 0.0:
        return 1.0 if used >= MEMORY_FULL else 0.0
    return 0.5 * erfc((MEMORY_FULL - used) / (math.sqrt(2.0) * deviation))


def decode_share(request: Request, mean_output_tokens: float) -> float:
    """h: how much of a usual request's decoding this one does; an answer of one word does not mind slow tokens."""
    limit = request.output_tokens_max
    if limit is None:
        return 1.0
    return min(1.0, (limit - 1) / max(1.0, mean_output_tokens))


TERMS = (
    ("waiting", "max(W, M)", "waiting_s"),
    ("prefill", "p̃·X", "prefill_s"),
    ("eviction", "ev·X", "eviction_s"),
    ("decode", "T", "decode_s"),
    ("memory", "mem", "memory_s"),
    ("future turns", "F", "future_s"),
    ("way there and back", "net", "net_s"),
    ("withheld by the guard", "(1 − c)·(p₀ − p̃)·X", "withheld_s"),
)
"""Name, symbol and field of what is added up."""

FACTORS = (
    ("tokens to compute", "n", "tokens", "new_tokens"),
    ("own prefill", "p", "s", "own_prefill_s"),
    ("prefill after investment", "p̃", "s", "paid_prefill_s"),
    ("wait for compute", "W", "s", "compute_wait_s"),
    ("wait for memory or a sequence", "M", "s", "memory_wait_s"),
    ("price of prefill work", "X", "1", "price"),
    ("reuse credit", "η", "1", "credit"),
    ("share of KV memory in use", "u", "1", "memory_used"),
    ("requests that pay a new copy back", "N", "requests", "copies_gain"),
    ("later turns", "N_T", "requests", "later_turns"),
    ("loading from slower tiers", "ℓ·e", "s", "tier_load_s"),
    ("adapter load", "ℓ_a", "s", "adapter_load_s"),
    ("weight of this request's priority", "w", "1", "weight"),
    ("its flow's use above a fair share", "o", "1", "overdraft"),
    ("cost by load alone", "C₀", "s", "blind_s"),
)
"""Name, symbol, unit and field of what the terms were made of."""
