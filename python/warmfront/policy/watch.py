"""Between the cost policy and its guard: who would have chosen what, what was expected, what came of it.

One object per pool. A decision passes through in three steps: `evaluated` and `considered` while it is made, `placed`
once it stands, `ended` when the request is over. Only the last two change anything that lasts, so explanations may make
decisions that never stand.
"""

from __future__ import annotations

from warmfront.config import PolicyConfig
from warmfront.policy.base import Ended, Fleet, Guarded
from warmfront.policy.guard import Guard
from warmfront.policy.prices import TIE_S, decode_share
from warmfront.policy.regret import Bet, regret_s
from warmfront.types import Request, RequestId, Slot

Row = tuple[float, Slot, int, float, float, float, float, float, float]
"""One evaluated replica: cost that ranks it, slot, predicted cached tokens, cost of this request alone (no later turns,
no investment in a copy), cost with full credit, cost by load alone, price of prefill, wait, own prefill. A plain tuple,
since every decision makes several."""
_COST, _FULL_CREDIT, _LOAD_ALONE = 3, 4, 5


class Watch:
    """The guard of one pool and the decisions it waits for."""

    def __init__(self, config: PolicyConfig) -> None:
        self.enabled = config.guard.enabled
        self._guard = Guard(config.guard, scale_s=config.cost.ttft_target_s)
        self._token_weight = config.cost.ttft_target_s / config.cost.tpot_target_s
        self._bets: dict[RequestId, Bet] = {}
        """By request in flight."""
        self._best_by_load: Row | None = None
        self._best_by_cache: Row | None = None
        self._first: Row | None = None
        self._differs = self._by_rival = False
        self._decisions = self._differing = 0

    @property
    def credit(self) -> float:
        """Part of the cache's advantage that counts."""
        return self._guard.credit

    def evaluated(self, best_by_load: Row | None, best_by_cache: Row | None) -> None:
        """Remember which replica load alone would choose, and which one full credit would if it is not in force."""
        self._best_by_load, self._best_by_cache = best_by_load, best_by_cache

    def considered(self, request: Request, ranked: list[Row]) -> list[Row]:
        """Put the rival's choice first when it is the rival's turn."""
        self._first, self._differs, self._by_rival = ranked[0], False, False
        if not self.enabled or not request.stream or request.route == "load" or request.basis == "none":
            return ranked
        guard = self._guard
        rival, measure = (
            (self._best_by_load, _LOAD_ALONE) if guard.rival == "load" else (self._best_by_cache, _FULL_CREDIT)
        )
        if rival is None or rival[measure] + TIE_S >= ranked[0][measure]:
            return ranked
        self._differs = True
        if not guard.is_rivals_turn:
            return ranked
        self._first, self._by_rival = rival, True
        return [rival, *(row for row in ranked if row[1] != rival[1])]

    def placed(self, request: Request, fleet: Fleet, slot: Slot) -> None:
        """Note what is expected of a decision."""
        first, alternative = self._first, self._best_by_load
        if not self.enabled or first is None or first[1] != slot:
            return
        if alternative is None or alternative[_LOAD_ALONE] + TIE_S >= first[_LOAD_ALONE]:
            alternative = first
        learned = fleet.learned
        _, _, _, cost_s, _, _, price, waiting_s, prefill_s = first
        self._decisions += 1
        self._differing += self._differs
        self._bets[request.id] = Bet(
            slot,
            self._guard.entered(fleet.rng) if self._differs else None,
            self._by_rival,
            cost_s,
            alternative[_COST],
            waiting_s,
            prefill_s,
            price,
            fleet.next_step_s[slot] + learned.decode.per_token[slot] * request.prompt_tokens,
            self._token_weight * decode_share(request, learned.output_tokens),
        )
        self._first = None

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
