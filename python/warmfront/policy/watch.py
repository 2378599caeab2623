"""Between the cost policy and its guard: who would have chosen what, what was expected, what came of it.

One object per pool. A decision passes through in three steps: `considered` while it is made, `placed` once it stands,
`ended` when the request is over. Only the last two change anything that lasts, so explanations may make decisions that
never stand.
"""

from __future__ import annotations

from collections.abc import Sequence

from warmfront.config import PolicyConfig
from warmfront.policy.base import Ended, Fleet, Guarded
from warmfront.policy.guard import Guard
from warmfront.policy.prices import TIE_S, Costs, decode_share
from warmfront.policy.regret import Bet, regret_s
from warmfront.types import Request, RequestId, Slot


class Watch:
    """The guard of one pool and the decisions it waits for."""

    def __init__(self, config: PolicyConfig) -> None:
        self.enabled = config.guard.enabled
        self._guard = Guard(config.guard, scale_s=config.cost.ttft_target_s)
        self._token_weight = config.cost.ttft_target_s / config.cost.tpot_target_s
        self._bets: dict[RequestId, Bet] = {}
        """By request in flight."""
        self._first: Costs | None = None
        self._alternative: Costs | None = None
        self._differs = self._by_rival = False
        self._decisions = self._differing = 0

    @property
    def guard(self) -> Guard:
        """The test and controller, for the router's memory."""
        return self._guard

    @property
    def credit(self) -> float:
        """Part of the cache's advantage that counts."""
        return self._guard.credit

    def considered(self, request: Request, fleet: Fleet, costs: Sequence[Costs], ranked: list[Costs]) -> list[Costs]:
        """Look at a decision before it stands.

        Args:
            request: To be placed.
            fleet: Columns.
            costs: Of all replicas that either rule might choose.
            ranked: By the rule in force.

        Returns:
            The same, with the rival's choice in front when it is the rival's turn.
        """
        first = self._first = ranked[0]
        self._differs = self._by_rival = False
        if not request.stream:  # when its first token comes is not seen, so nothing can be compared
            self._alternative = None
            return ranked
        by_load = self._alternative = _cheapest(costs, fleet)
        if request.route == "load" or request.basis == "none":
            return ranked
        if self._guard.rival == "load":
            rival, gain_s = by_load, first.blind_s - by_load.blind_s
        else:
            rival = min(costs, key=lambda cost: (cost.trusting_s, fleet.last_used[cost.slot]))
            gain_s = first.trusting_s - rival.trusting_s
        self._differs = gain_s > TIE_S
        if not self._differs or not self._guard.is_rivals_turn:
            return ranked
        self._first, self._by_rival = rival, True
        return [rival, *(cost for cost in ranked if cost.slot != rival.slot)]

    def placed(self, request: Request, fleet: Fleet, slot: Slot) -> None:
        """Note what is expected of a decision that stands."""
        first, alternative = self._first, self._alternative
        if first is None or first.slot != slot:
            return
        self._first = None
        self._decisions += 1
        if alternative is None:
            return
        cost_s = alternative_s = first.single_s
        if alternative.blind_s + TIE_S < first.blind_s:
            alternative_s = alternative.single_s
        learned = fleet.learned
        context_tokens = fleet.context_tokens[slot] + request.prompt_tokens
        self._differing += self._differs
        self._bets[request.id] = Bet(
            slot,
            self._guard.entered(fleet.rng) if self._differs else None,
            self._by_rival,
            cost_s,
            alternative_s,
            first.waiting_s + first.net_s,
            first.own_prefill_s,
            first.price,
            learned.decode.seconds(slot, fleet.requests[slot] + 1.0, context_tokens),
            self._token_weight * decode_share(request, learned.output_tokens),
        )

    def ended(self, request: Request, fleet: Fleet, outcome: Ended) -> float | None:
        """Compare an outcome with its bet; return the regret in seconds, if it can be told."""
        bet = self._bets.pop(request.id, None)
        if bet is None:
            return None
        regret = regret_s(bet, request, outcome, fleet.learned)
        if bet.block is not None:
            self._guard.ended(bet.block, fleet.now_s, by_rival=bet.by_rival, regret_s=regret, cost_s=bet.alternative_s)
        return regret

    def report(self) -> Guarded:
        """Report how far affinity is trusted."""
        guard = self._guard
        return Guarded(
            enabled=self.enabled,
            credit=guard.credit,
            gain_s=guard.gain_s,
            evidence=guard.evidence,
            decisions=self._decisions,
            differing=self._differing,
            rivals=guard.rivals,
            alarms=guard.alarms,
        )


def _cheapest(costs: Sequence[Costs], fleet: Fleet) -> Costs:
    """Return the cheapest by load alone; among equals the one unused for longest."""
    cheapest, last_used = costs[0], fleet.last_used
    least_s = cheapest.blind_s
    for cost in costs:
        blind_s = cost.blind_s
        if blind_s < least_s or (blind_s == least_s and last_used[cost.slot] < last_used[cheapest.slot]):
            cheapest, least_s = cost, blind_s
    return cheapest
