"""The placement policies of the llm-d router (v0.10.0 and the guides up to August 2026).

`Default` is the weighted sum of scorers that an endpoint picker has run with since its first releases: queue 2, KV use
2, prefix 3, over the router's own routing history (the approximate producer, which a scorer gets unless the precise one
is named). `Precise` is the "precise prefix" guide until v0.9: KV events instead of history, and a fourth scorer, no-hit
LRU 2. `AffinityFilter` is the rule of the guides since August 2026, "sticky until saturated": keep the replicas that
know 80 % of the prompt unless they are 18 s behind, then the fewest uncached tokens in flight.

Source: llm-d-router at 2026-08-22, plugin catalogue and guides. Metrics are scraped every 50 ms. Weights are per
scorer, scores from 0 to 1, the highest sum wins, ties are drawn. The filter compares queues only and the token scorer
knows nothing of the request itself: neither has a term for the request's own uncached tokens. A small re-statement
elsewhere adds one; the real system wins.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from warmfront.lab.peers.base import Members, Prompts, View, cheapest_first, choices, events_only
from warmfront.lab.peers.history import History
from warmfront.policy.base import Fleet
from warmfront.types import Choice, Overlap, Request, Slot

SCRAPE_S = 0.05
"""Tick of the metrics collector."""
QUEUE_WEIGHT, KV_WEIGHT, PREFIX_WEIGHT, NO_HIT_WEIGHT = 2.0, 2.0, 3.0, 2.0
ROUTER_BLOCK_TOKENS = 64
"""The history's blocks are never smaller, whatever the engine's are."""
LRU_BLOCKS = 31_250
"""Blocks remembered for each replica whose engine does not tell its own number of blocks."""
MATCH_BLOCKS_MAX = 2048
"""Blocks of a prompt that are looked up: 131,072 tokens."""
NO_HIT_REPLICAS_MAX = 1024
"""Replicas in the order of the no-hit scorer."""

AFFINITY_SHARE = 0.80
"""A replica is sticky when it knows at least this share of the prompt."""
TTFT_PENALTY_S = 18.0
"""Stickiness ends when the best sticky replica is later than the best other one by more than this."""
PREFILL_TOKENS_PER_S = 15_928.0
"""Default peak prefill rate of the filter, measured for Qwen3-32B on two H100."""
TOKEN_QUEUE_MAX = 4_194_304
"""In-flight tokens at which the token scorer gives 0."""


class ApproximatePrefix:
    """The approximate producer: a history that counts hits with gaps and forgets the head of a prompt first.

    Its capacity in blocks is the engine's, but its blocks have at least 64 tokens, so that an engine with blocks of 16
    is credited with four times its cache. It is fixed when a replica is first recorded; the first one's figure serves
    for all.
    """

    def __init__(self, view: View) -> None:
        self._size = view.block_size
        self._prompt = Prompts(view)
        self._members = Members()
        self._history: History | None = None

    def depths(self, request: Request, fleet: Fleet) -> list[int]:
        """Return known tokens by slot, shape (slots,)."""
        if self._history is None:
            return [0] * fleet.slots
        for slot in self._members.changed(fleet):
            self._history.forget(slot)
        return [hits * self._size for hits in self._history.hits(self._blocks(request), fleet.slots)]

    def record(self, request: Request, slot: Slot, fleet: Fleet) -> None:
        """Note where a request went."""
        if self._history is None:
            self._members.changed(fleet)
            self._history = History(self._blocks_max(fleet.capacity_tokens[slot]), head_first=True)
        self._history.insert(self._blocks(request), slot, fleet.now_s)

    def _blocks(self, request: Request) -> Sequence[int]:
        return self._prompt(request)[: matchable_tokens(request, self._size) // self._size]

    def _blocks_max(self, capacity_tokens: int | None) -> int:
        router_blocks = capacity_tokens // self._size if capacity_tokens else LRU_BLOCKS
        return max(1, router_blocks * max(ROUTER_BLOCK_TOKENS, self._size) // self._size)


class Default:
    """Queue 2, KV use 2, prefix 3, from history."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._prefix = ApproximatePrefix(view)

    def choose(self, request: Request, overlap: Overlap, fleet: Fleet) -> Sequence[Choice]:
        """Rank by the weighted sum."""
        depths = self._prefix.depths(request, fleet)
        scores = weighted(self._view, depths, request, fleet)
        return choices(cheapest_first([-score for score in scores], fleet), depths, request, fleet)

    def chosen(self, request: Request, overlap: Overlap, fleet: Fleet, slot: Slot) -> None:
        """Record the request."""
        self._prefix.record(request, slot, fleet)


class Precise:
    """Queue 2, KV use 2, prefix 3 from KV events, no-hit LRU 2. Speculative entries are off, as by default."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._cold: OrderedDict[Slot, None] = OrderedDict()
        """Replicas by their last request without a hit anywhere, the oldest first."""

    def choose(self, request: Request, overlap: Overlap, fleet: Fleet) -> Sequence[Choice]:
        """Rank by the weighted sum."""
        depths = events_only(overlap, fleet)
        scores = weighted(self._view, depths, request, fleet)
        if not any(depths[slot] for slot in fleet.eligible):
            scores = [score + NO_HIT_WEIGHT * rank for score, rank in zip(scores, self._ranks(fleet), strict=True)]
        return choices(cheapest_first([-score for score in scores], fleet), depths, request, fleet)

    def chosen(self, request: Request, overlap: Overlap, fleet: Fleet, slot: Slot) -> None:
        """Move a replica that got a cold request to the end of the order."""
        depths = events_only(overlap, fleet)
        if any(depths[each] for each in fleet.eligible):
            return
        self._cold[slot] = None
        self._cold.move_to_end(slot)
        if len(self._cold) > NO_HIT_REPLICAS_MAX:
            self._cold.popitem(last=False)

    def _ranks(self, fleet: Fleet) -> list[float]:
        """Score the eligible slots from 1 (never used or longest ago) to 0 (last used)."""
        if len(fleet.eligible) == 1:
            return [1.0]
        never = [slot for slot in fleet.eligible if slot not in self._cold]
        used = [slot for slot in self._cold if fleet.is_eligible[slot]]
        places = {slot: place for place, slot in enumerate([*never, *used])}
        return [1.0 - places[slot] / (len(places) - 1) for slot in fleet.eligible]


class AffinityFilter:
    """Sticky until saturated, then the fewest uncached tokens in flight."""

    def __init__(self, view: View) -> None:
        self._size = view.block_size
        self._prefix = ApproximatePrefix(view)

    def choose(self, request: Request, overlap: Overlap, fleet: Fleet) -> Sequence[Choice]:
        """Rank the kept replicas by tokens in flight, the others behind them."""
        depths = self._prefix.depths(request, fleet)
        kept = set(sticky(depths, matchable_tokens(request, self._size), fleet))
        pending = fleet.pending_tokens
        loads = [min(1.0, pending[slot] / TOKEN_QUEUE_MAX) + (0.0 if slot in kept else 2.0) for slot in fleet.eligible]
        return choices(cheapest_first(loads, fleet), depths, request, fleet)

    def chosen(self, request: Request, overlap: Overlap, fleet: Fleet, slot: Slot) -> None:
        """Record the request."""
        self._prefix.record(request, slot, fleet)


def sticky(depths: Sequence[int], prompt_tokens: int, fleet: Fleet) -> list[Slot]:
    """Return the slots that the affinity filter keeps: all of them when none is sticky or the sticky ones are late."""
    warm = [slot for slot in fleet.eligible if prompt_tokens and depths[slot] >= AFFINITY_SHARE * prompt_tokens]
    cold = [slot for slot in fleet.eligible if slot not in warm]
    if not warm or not cold:
        return fleet.eligible
    pending = fleet.pending_tokens
    behind = min(pending[slot] for slot in warm) - min(pending[slot] for slot in cold)
    return fleet.eligible if behind / PREFILL_TOKENS_PER_S > TTFT_PENALTY_S else warm


def weighted(view: View, depths: Sequence[int], request: Request, fleet: Fleet) -> list[float]:
    """Sum the three scorers for the eligible slots, in their order."""
    seen = view.load(SCRAPE_S)
    known = [seen[slot] if slot < len(seen) else None for slot in fleet.eligible]
    waiting = [(load.waiting or 0.0) if load else 0.0 for load in known]
    usage = [(load.kv_usage or 0.0) if load else 0.0 for load in known]
    most, least = max(waiting), min(waiting)
    prompt = matchable_tokens(request, view.block_size)
    return [
        QUEUE_WEIGHT * ((most - queue) / (most - least) if most > least else 1.0)
        + KV_WEIGHT * (1.0 - used)
        + PREFIX_WEIGHT * (depths[slot] / prompt if prompt else 0.0)
        for slot, queue, used in zip(fleet.eligible, waiting, usage, strict=True)
    ]


def matchable_tokens(request: Request, block_size: int) -> int:
    """Return the tokens of a prompt in the blocks that are looked up: full ones, up to the limit."""
    full = request.prompt_tokens // block_size * block_size
    return min(full, MATCH_BLOCKS_MAX * max(ROUTER_BLOCK_TOKENS, block_size))
