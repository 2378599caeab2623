"""Preble's E2: exploit a cached prefix or explore for the least load.

Rule: when more of the prompt is cached somewhere than is not, the replica with the longest prefix serves (the least
loaded of equals), unless its load is above 1.5 times the least one's plus a second. Otherwise, and then, the smallest
sum of: load, the seconds of prefill and decoding sent there in the last 3 minutes; eviction, the seconds it would take
to compute again what this prompt pushes out, times the share of tokens that hit there; and the prompt's own missing
prefill.

Source: "Preble" (arXiv 2407.00023); window as in AIBrix's port of it. The bound of 1.5 and the price of decoding are
from a short description. Prefill seconds and the length of answers are the router's, learned from what it sees. Local
scheduling inside a replica, and copying a prefix when its queueing time doubles, are left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from warmfront.lab.peers.base import Members, View, cheapest_first, choices
from warmfront.policy.base import Fleet
from warmfront.types import Choice, Overlap, Request, Slot

WINDOW_S = 180.0
IMBALANCE = 1.5
IMBALANCE_SLACK_S = 1.0
"""Load over the least load above which a cached prefix is not exploited, and seconds that never matter."""
DECODE_TOKEN_S = 2e-3
"""Replica seconds that one output token takes in a well filled batch."""
BUCKET_S = 1.0
"""Load leaves the window in steps of this, which bounds its memory."""


class Window:
    """Seconds of work by slot that were sent within the last `WINDOW_S`."""

    def __init__(self) -> None:
        self.load_s: dict[Slot, float] = {}
        self._buckets: deque[tuple[float, dict[Slot, float]]] = deque()

    def add(self, slot: Slot, seconds: float, now_s: float) -> None:
        """Note work."""
        if not self._buckets or now_s - self._buckets[-1][0] >= BUCKET_S:
            self._buckets.append((now_s, {}))
        bucket = self._buckets[-1][1]
        bucket[slot] = bucket.get(slot, 0.0) + seconds
        self.load_s[slot] = self.load_s.get(slot, 0.0) + seconds

    def advance(self, now_s: float) -> None:
        """Let old work go."""
        while self._buckets and self._buckets[0][0] <= now_s - WINDOW_S:
            for slot, seconds in self._buckets.popleft()[1].items():
                if slot in self.load_s:
                    self.load_s[slot] = max(0.0, self.load_s[slot] - seconds)

    def forget(self, slot: Slot) -> None:
        """Forget a slot: its replica is gone."""
        self.load_s.pop(slot, None)
        for _, bucket in self._buckets:
            bucket.pop(slot, None)


class E2:
    """Exploitation and exploration."""

    def __init__(self, _view: View) -> None:
        self._window = Window()
        self._members = Members()
        self._hits: dict[Slot, tuple[float, float]] = {}
        """Tokens found and tokens asked for by slot."""

    def choose(self, request: Request, overlap: Overlap, fleet: Fleet) -> Sequence[Choice]:
        """Rank by the sum, the exploited replica first."""
        for slot in self._members.changed(fleet):
            self._window.forget(slot)
            self._hits.pop(slot, None)
        self._window.advance(fleet.now_s)
        costs = [self._cost_s(slot, request, overlap, fleet) for slot in fleet.eligible]
        order = cheapest_first(costs, fleet)
        home = self._exploited(request, overlap, fleet, order)
        if home is not None:
            order = [home, *(slot for slot in order if slot != home)]
        return choices(order, overlap.device, request, fleet)

    def chosen(self, request: Request, overlap: Overlap, fleet: Fleet, slot: Slot) -> None:
        """Add the work to the window."""
        learned = fleet.learned
        missing = _missing(slot, request, overlap)
        seconds = learned.prefill.seconds(slot, missing, request.prompt_tokens)
        seconds += learned.output_tokens * DECODE_TOKEN_S
        self._window.add(slot, seconds, fleet.now_s)
        found, asked = self._hits.get(slot, (0.0, 0.0))
        self._hits[slot] = (found + request.prompt_tokens - missing, asked + request.prompt_tokens)

    def _exploited(self, request: Request, overlap: Overlap, fleet: Fleet, order: Sequence[Slot]) -> Slot | None:
        """Return the replica whose prefix is used, or `None` to explore."""
        deepest = fleet.deepest(overlap.device)
        if 2 * deepest <= request.prompt_tokens:
            return None
        load = self._window.load_s
        home = min((slot for slot in order if overlap.device[slot] == deepest), key=lambda slot: load.get(slot, 0.0))
        least = min(load.get(slot, 0.0) for slot in fleet.eligible)
        return home if load.get(home, 0.0) <= IMBALANCE * least + IMBALANCE_SLACK_S else None

    def _cost_s(self, slot: Slot, request: Request, overlap: Overlap, fleet: Fleet) -> float:
        prompt, prefill = request.prompt_tokens, fleet.learned.prefill
        missing = _missing(slot, request, overlap)
        cost = self._window.load_s.get(slot, 0.0) + prefill.seconds(slot, missing, prompt)
        capacity = fleet.capacity_tokens[slot]
        if capacity:
            evicted = max(0, overlap.resident_tokens[slot] + missing - capacity)
            found, asked = self._hits.get(slot, (0.0, 0.0))
            cost += prefill.seconds(slot, evicted, evicted) * (found / asked if asked else 0.0)
        return cost


def _missing(slot: Slot, request: Request, overlap: Overlap) -> int:
    return max(1, request.prompt_tokens - overlap.device[slot])
