"""The default policy: send where a request's own delay plus the delay it imposes on others is smallest.

Everything is in seconds of time to first token. There is no term for affinity and none for balance: a warm replica
needs less work and memory, a busy one makes wait. `Evaluation` computes all costs, for decisions and for explanations
alike; a decision leaves out replicas that cannot win. What is easy to get wrong: only own work is priced (`p·X`), never
the work already queued, which is sunk.

Source: docs/explanation/policies.md, section "marginal_cost", with the same symbols.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter

from warmfront.config import PolicyConfig
from warmfront.policy import prices
from warmfront.policy.affinity import mix
from warmfront.policy.base import RATE_WINDOW_S, Ended, Fleet, Guarded, ReplicaCost
from warmfront.policy.evaluation import Evaluation
from warmfront.policy.prices import Costs
from warmfront.policy.rates import Rates
from warmfront.policy.watch import Watch
from warmfront.types import Choice, Overlap, Request, Slot

_by_cost = attrgetter("total_s")
"""Sorts the costs of ascending slots: equal ones stay in that order."""


class MarginalCost:
    """Social marginal cost. State: the rate of hot prefixes, each replica's mean cost, and the guard."""

    def __init__(self, config: PolicyConfig) -> None:
        self._config = config.cost
        self.patience_s = config.cost.ttft_target_s / prices.TARGET_PER_PATIENCE
        """See `policy.base.Patient`."""
        self._watch = Watch(config)
        self.prefixes = Rates[int](window_s=prices.POPULARITY_WINDOW_S, keys_max=prices.PREFIXES_MAX)
        """How often each prefix is asked for, by sequence hash; the router's memory keeps it."""
        self._mean_cost_s: list[float] = []
        self._ids: list[str | None] = []
        self._membership = -1
        self._averaged_s: float | None = None
        self._seen_s: list[float] | None = None
        """What of each eligible replica's costs the request in hand saw for the means, when they are due."""

    def choose(self, request: Request, overlap: Overlap, fleet: Fleet) -> Sequence[Choice]:
        """Rank replicas by cost. Nearly equal ones are told apart by free memory, then by hash or by rotation."""
        evaluation = self._evaluation(request, overlap, fleet)
        costs = evaluation.best(fleet.choices_max)
        is_due = self._averaged_s is None or fleet.now_s - self._averaged_s >= prices.COST_INTERVAL_S
        self._seen_s = evaluation.seen_s() if is_due else None
        ranked = self._ranked(request, overlap, fleet, costs)
        if self._config.ttft_limit_s is not None and request.priority <= 0:
            ranked = _within_limit(evaluation, fleet, ranked, self._config.ttft_limit_s)
        if self._watch.enabled:
            ranked = self._watch.considered(request, fleet, costs, ranked)
        if request.affinity_key is not None and overlap.frontier_key is None:  # the guard learns nothing from these
            ranked = _with_session(request.affinity_key, evaluation, ranked)
        return [Choice(cost.slot, cost.cached_tokens) for cost in ranked[: fleet.choices_max]]

    def chosen(self, request: Request, overlap: Overlap, fleet: Fleet, slot: Slot) -> None:
        """Count the prefix and fold the costs that this arrival saw into the means."""
        if overlap.frontier_key is not None:
            self.prefixes.count(overlap.frontier_key, fleet.now_s)
        if self._watch.enabled:
            self._watch.placed(request, fleet, slot)
        if self._seen_s is None:
            return
        elapsed_s = prices.COST_INTERVAL_S if self._averaged_s is None else fleet.now_s - self._averaged_s
        weight = 1.0 - math.exp(-elapsed_s / prices.COST_WINDOW_S)
        mean_s = self._mean_cost_s
        for replica, seen_s in zip(fleet.eligible, self._seen_s, strict=True):
            mean_s[replica] += weight * (seen_s - mean_s[replica])
        self._averaged_s, self._seen_s = fleet.now_s, None

    def ended(self, request: Request, fleet: Fleet, outcome: Ended) -> float | None:
        """Compare an outcome with what was expected, and tell the guard; return the regret in seconds."""
        return self._watch.ended(request, fleet, outcome)

    @property
    def watch(self) -> Watch:
        """What compares outcomes with expectations, for the router's memory."""
        return self._watch

    def guarded(self) -> Guarded:
        """Report how far affinity is trusted."""
        return self._watch.report()

    def explain(self, request: Request, overlap: Overlap, fleet: Fleet) -> list[ReplicaCost]:
        """Return every term for every eligible replica."""
        costs = self._evaluation(request, overlap, fleet).costs(fleet.eligible)
        return [cost.explained() for cost in costs]

    def _evaluation(self, request: Request, overlap: Overlap, fleet: Fleet) -> Evaluation:
        self._follow(fleet)
        key = overlap.frontier_key
        rate = 0.0 if key is None else self.prefixes.requests(key, fleet.now_s) / prices.POPULARITY_WINDOW_S
        return Evaluation(
            request,
            overlap,
            fleet,
            self._config,
            prefix_rate=rate,
            mean_cost_s=self._mean_cost_s,
            doubt=1.0 - self._watch.credit,
        )

    def _follow(self, fleet: Fleet) -> None:
        """Give new replicas a mean cost of zero: they attract new conversations."""
        if fleet.membership == self._membership:
            return
        known = {name: mean for name, mean in zip(self._ids, self._mean_cost_s, strict=True) if name is not None}
        self._ids = list(fleet.id)
        self._mean_cost_s = [0.0 if name is None else known.get(name, 0.0) for name in self._ids]
        self._membership = fleet.membership

    @staticmethod
    def _ranked(request: Request, overlap: Overlap, fleet: Fleet, costs: list[Costs]) -> list[Costs]:
        """Order by cost, the best choice among those that tie with the cheapest first."""
        ranked = sorted(costs, key=_by_cost)
        bound = ranked[0].total_s + prices.TIE_S
        if len(ranked) == 1 or ranked[1].total_s > bound:
            return ranked
        capacity, in_use, outputs = fleet.capacity_tokens, overlap.active_tokens, fleet.output_tokens
        tied = [cost.slot for cost in ranked if cost.total_s <= bound]
        used = [(in_use[slot] + outputs[slot]) / (capacity[slot] or 1) for slot in tied]
        least = min(used)
        emptiest = [slot for slot, share in zip(tied, used, strict=True) if share <= least]
        first = emptiest[0] if len(emptiest) == 1 else _favourite(request, fleet, emptiest)
        if first != ranked[0].slot:
            ranked.insert(0, ranked.pop(tied.index(first)))
        return ranked


def _with_session(key: int, evaluation: Evaluation, ranked: list[Costs]) -> list[Costs]:
    """Put a replica in front that a session's key prefers, if it is hardly dearer than the cheapest.

    For prompts of which nothing is known anywhere: another router, or this one before it was restarted, may have sent
    the same session there. Every router prefers the same replicas, and a key whose replica is gone or busy moves on.
    """
    bound = ranked[0].total_s + prices.TIE_S + prices.SESSION_MARGIN * ranked[0].prefill_s
    for cost in evaluation.preferred(key, prices.SESSION_LOOKS):
        if cost.total_s <= bound:
            return [cost, *(other for other in ranked if other.slot != cost.slot)]
    return ranked


def _within_limit(evaluation: Evaluation, fleet: Fleet, ranked: list[Costs], limit_s: float) -> list[Costs]:
    """Leave a replica whose first token would come too late for those where it comes in half the limit.

    Only while the fleet has room: in a saturated one the requests moved would make the others late too.
    """
    busy = fleet.decay() / RATE_WINDOW_S * fleet.total(fleet.work_s) / len(fleet.eligible)
    if busy >= prices.LIMIT_UTILISATION_MAX or ranked[0].first_token_s <= limit_s:
        return ranked
    everywhere = sorted(evaluation.costs(fleet.eligible), key=_by_cost)
    return [cost for cost in everywhere if cost.first_token_s < 0.5 * limit_s] or ranked


def _favourite(request: Request, fleet: Fleet, slots: list[Slot]) -> Slot:
    """Choose among equals: by the prefix, so that equal prompts meet, or by rotation when there is none."""
    if request.route == "load" or request.basis == "none":
        return min(slots, key=lambda slot: fleet.last_used[slot])
    key, hashes = request.prefix_key, fleet.hash
    return max(slots, key=lambda slot: mix(key, hashes[slot]))
