"""CacheRoute: a plan of which keys live where, made from counts, renewed each minute.

Rule: requests are counted by key: their session, or else the beginning of the prompt. Every 60 s the planner takes keys
from the most asked for on, gives each `ceil(rate / cap)` copies (`cap`: half the mean rate of a replica) until 80 % of
the fleet's KV memory is spoken for, and places the copies on the least planned replicas, largest rates first. Placed
copies stay while their number does and their replica is not above 1.1 times the mean. A request of a planned key goes
to the copy with the fewest requests in flight, one of a key that found no room to the better of two drawn at random. A
key that is new since the last plan begins like that and stays there until the next one.

Source: a short description of the system; its own text was not available, so constants are those of that description.
The planner here sees the past: counts halve at each plan. A router that has just started plans after 1, 2, 4, … s, as
one in service for a while has counts already.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Sequence

from warmfront.lab.peers.base import View, choices, then_by_load
from warmfront.policy.base import Fleet
from warmfront.types import Choice, Overlap, Request, Slot

INTERVAL_S = 60.0
FIRST_INTERVAL_S = 1.0
"""Doubles until it reaches the interval."""
RATE_CAP = 0.5
"""A key gets another copy for each such share of the mean rate of a replica."""
MEMORY_SHARE = 0.8
"""Of the fleet's KV memory that is planned."""
PROMPT_TOKENS_MIN = 256.0
"""The mean prompt counts at least this much in the memory of the plan."""
OVERLOAD = 1.1
"""Planned rate over the mean above which a replica's placements are made anew."""
COUNT_MIN = 0.2
"""Keys whose decayed count is lower are forgotten."""
KEYS_MAX = 1 << 18
"""Keys counted; the one asked for longest ago goes first."""


class Popularity:
    """Decayed counts and mean lengths by key."""

    def __init__(self) -> None:
        self._counts: OrderedDict[int, tuple[float, float]] = OrderedDict()
        """Key → count and tokens of its last prompt."""

    def count(self, key: int, prompt_tokens: int) -> int | None:
        """Count one request; return a key that had to be forgotten for it."""
        before, _ = self._counts.pop(key, (0.0, 0.0))
        self._counts[key] = (before + 1.0, float(prompt_tokens))
        return self._counts.popitem(last=False)[0] if len(self._counts) > KEYS_MAX else None

    def halve(self) -> None:
        """Let the past count half."""
        kept = ((key, (0.5 * count, tokens)) for key, (count, tokens) in self._counts.items())
        self._counts = OrderedDict((key, value) for key, value in kept if value[0] >= COUNT_MIN)

    def ranked(self) -> list[tuple[int, float]]:
        """Return keys and counts, the most asked for first."""
        return sorted(((key, count) for key, (count, _) in self._counts.items()), key=lambda each: -each[1])

    def mean_tokens(self) -> float:
        """Return the mean prompt over keys."""
        return sum(tokens for _, tokens in self._counts.values()) / max(1, len(self._counts))


class CacheRoute:
    """Planned keys by their plan, everything else by power of two."""

    def __init__(self, _view: View) -> None:
        self._popularity = Popularity()
        self._membership = -1
        self._plan: dict[int, list[Slot]] = {}
        self._left_out: set[int] = set()
        """Keys for which the last plan had no room."""
        self._homes: dict[int, Slot] = {}
        """Where keys that are new since then began; as bounded as the counts."""
        self._interval_s = FIRST_INTERVAL_S
        self._next_s = FIRST_INTERVAL_S

    def choose(self, request: Request, overlap: Overlap, fleet: Fleet) -> Sequence[Choice]:
        """Rank by the plan."""
        self._renew(fleet)
        return choices(then_by_load(self._pick(request, fleet), fleet), overlap.device, request, fleet)

    def chosen(self, request: Request, overlap: Overlap, fleet: Fleet, slot: Slot) -> None:
        """Count the key and remember where a new one began."""
        key = _key(request)
        forgotten = self._popularity.count(key, request.prompt_tokens)
        if forgotten is not None:
            self._homes.pop(forgotten, None)
        if key not in self._plan and key not in self._left_out:
            self._homes.setdefault(key, slot)

    def _pick(self, request: Request, fleet: Fleet) -> Slot:
        key = _key(request)
        copies = [slot for slot in self._plan.get(key, ()) if fleet.is_eligible[slot]]
        if copies:
            draw = fleet.rng.random
            return min(copies, key=lambda slot: (fleet.in_flight[slot], draw()))
        home = self._homes.get(key)
        if home is not None and fleet.is_eligible[home]:
            return home
        first, second = fleet.rng.choice(fleet.eligible), fleet.rng.choice(fleet.eligible)
        return first if fleet.in_flight[first] <= fleet.in_flight[second] else second

    def _renew(self, fleet: Fleet) -> None:
        """Plan when it is time, and when replicas came or went."""
        joined_or_left = self._membership not in (-1, fleet.membership)
        self._membership = fleet.membership
        due = fleet.now_s >= self._next_s
        if not due and not joined_or_left:
            return
        if due:
            if self._interval_s >= INTERVAL_S:
                self._popularity.halve()
            self._interval_s = min(INTERVAL_S, 2.0 * self._interval_s)
            self._next_s = fleet.now_s + self._interval_s
        self._plan = planned(self._popularity, self._plan, fleet)
        self._left_out = {key for key, _ in self._popularity.ranked() if key not in self._plan}
        self._homes.clear()


def _key(request: Request) -> int:
    return request.prefix_key if request.affinity_key is None else request.affinity_key


def planned(popularity: Popularity, before: dict[int, list[Slot]], fleet: Fleet) -> dict[int, list[Slot]]:
    """Return key → replicas: kept from `before` where that is still right, placed anew elsewhere."""
    ranked = popularity.ranked()
    replicas = fleet.eligible
    admitted = _admitted(ranked, popularity.mean_tokens(), fleet)
    mean = sum(count for key, count in ranked if key in admitted) / len(replicas)
    load = dict.fromkeys(replicas, 0.0)
    counts = dict(ranked)
    plan: dict[int, list[Slot]] = {}
    for key, copies in admitted.items():
        old = before.get(key, [])
        if len(old) == copies and all(slot in load for slot in old):
            plan[key] = old
            for slot in old:
                load[slot] += counts[key] / copies
    for key, slots in list(plan.items()):
        if max(load[slot] for slot in slots) > OVERLOAD * mean:
            del plan[key]
            for slot in slots:
                load[slot] -= counts[key] / len(slots)
    heap = [(planned_rate, slot) for slot, planned_rate in load.items()]
    heapq.heapify(heap)
    for key, copies in admitted.items():
        if key not in plan:
            least = [heapq.heappop(heap) for _ in range(copies)]
            plan[key] = [slot for _, slot in least]
            for rate, slot in least:
                heapq.heappush(heap, (rate + counts[key] / copies, slot))
    return plan


def _admitted(ranked: Sequence[tuple[int, float]], mean_tokens: float, fleet: Fleet) -> dict[int, int]:
    """Return key → copies for the keys that fit, the most asked for first."""
    replicas = len(fleet.eligible)
    cap = RATE_CAP * sum(count for _, count in ranked) / replicas
    capacities = [fleet.capacity_tokens[slot] for slot in fleet.eligible]
    room = math.inf
    if all(capacities):
        room = sum(int(MEMORY_SHARE * (tokens or 0) / max(PROMPT_TOKENS_MIN, mean_tokens)) for tokens in capacities)
    admitted: dict[int, int] = {}
    for key, count in ranked:
        copies = min(replicas, max(1, math.ceil(count / cap)))
        room -= copies
        if room < 0:
            break
        admitted[key] = copies
    return admitted
