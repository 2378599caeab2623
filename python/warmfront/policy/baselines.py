"""The plain policies: what others ship, to compare with and to fall back on.

All break ties by the longest unused replica, so none prefers a position.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from warmfront.config import PolicyConfig
from warmfront.policy.affinity import ranked
from warmfront.policy.base import Fleet, ReplicaCost, Term, capped_tokens
from warmfront.types import Choice, Overlap, Request, Slot


def by_load(fleet: Fleet, slots: Iterable[Slot]) -> list[Slot]:
    """Order slots by requests in flight, then pending work, then the time since they were used."""
    in_flight, foreign, pending_s, last_used = fleet.in_flight, fleet.foreign, fleet.pending_s, fleet.last_used
    return sorted(slots, key=lambda slot: (in_flight[slot] + foreign[slot], pending_s[slot], last_used[slot]))


def choices(slots: Sequence[Slot], request: Request, overlap: Overlap, fleet: Fleet) -> list[Choice]:
    """Turn an order of slots into choices, each with the cached tokens to expect there."""
    device, tokens, sizes = overlap.device, request.prompt_tokens, fleet.block_size
    return [Choice(slot, capped_tokens(device[slot], tokens, sizes[slot])) for slot in slots[: fleet.choices_max]]


class _Baseline:
    """Shared by all: the explanation shows the load, which is all that most of them look at."""

    def __init__(self, config: PolicyConfig) -> None:
        self._config = config

    def explain(self, request: Request, overlap: Overlap, fleet: Fleet) -> list[ReplicaCost]:
        """Return requests in flight per replica, the only cost a baseline knows."""
        costs = []
        for slot in fleet.eligible:
            load = fleet.in_flight[slot] + fleet.foreign[slot]
            cached = capped_tokens(overlap.device[slot], request.prompt_tokens, fleet.block_size[slot])
            terms = [Term("requests in flight", "B", "requests", load)]
            factors = [Term("wait for compute", "W", "s", fleet.waiting_s(slot))]
            costs.append(ReplicaCost(slot, cached, terms, factors, load))
        return costs


class RoundRobin(_Baseline):
    """Take turns."""

    def choose(self, request: Request, overlap: Overlap, fleet: Fleet) -> Sequence[Choice]:
        """Rank by the time since a replica was used."""
        last_used = fleet.last_used
        return choices(sorted(fleet.eligible, key=lambda slot: last_used[slot]), request, overlap, fleet)


class Random(_Baseline):
    """Draw uniformly."""

    def choose(self, request: Request, overlap: Overlap, fleet: Fleet) -> Sequence[Choice]:
        """Rank a random sample."""
        size = min(fleet.choices_max, len(fleet.eligible))
        return choices(fleet.rng.sample(fleet.eligible, size), request, overlap, fleet)


class LeastLoaded(_Baseline):
    """Fewest requests in flight."""

    def choose(self, request: Request, overlap: Overlap, fleet: Fleet) -> Sequence[Choice]:
        """Rank by load."""
        return choices(by_load(fleet, fleet.eligible), request, overlap, fleet)


class PowerOfTwo(_Baseline):
    """The less loaded of two drawn at random."""

    def choose(self, request: Request, overlap: Overlap, fleet: Fleet) -> Sequence[Choice]:
        """Rank a random sample, the better of the first two first."""
        size = min(max(2, fleet.choices_max), len(fleet.eligible))
        drawn = fleet.rng.sample(fleet.eligible, size)
        return choices([*by_load(fleet, drawn[:2]), *drawn[2:]], request, overlap, fleet)


class Session(_Baseline):
    """One replica per session key; requests without a key go to the least loaded."""

    def choose(self, request: Request, overlap: Overlap, fleet: Fleet) -> Sequence[Choice]:
        """Rank by rendezvous hashing of the key: when a replica goes, only its sessions move."""
        if request.affinity_key is None:
            return choices(by_load(fleet, fleet.eligible), request, overlap, fleet)
        return choices(ranked(request.affinity_key, fleet.eligible, fleet.hash), request, overlap, fleet)


class PrefixHash(_Baseline):
    """One replica per beginning of a prompt, unless it carries more than its share."""

    def choose(self, request: Request, overlap: Overlap, fleet: Fleet) -> Sequence[Choice]:
        """Rank by hashing; replicas at `load_bound` times the mean load come last."""
        if request.route == "load" or request.basis == "none":
            return choices(by_load(fleet, fleet.eligible), request, overlap, fleet)
        in_flight = fleet.in_flight
        total = sum(in_flight[slot] for slot in fleet.eligible) + 1
        bound = math.ceil(self._config.load_bound * total / len(fleet.eligible))
        order = ranked(request.prefix_key, fleet.eligible, fleet.hash)
        within = [slot for slot in order if in_flight[slot] < bound]
        beyond = [slot for slot in order if in_flight[slot] >= bound]
        return choices([*within, *beyond], request, overlap, fleet)
