"""What a decision cost by what happened, against what load alone was expected to cost.

The cost of a decision is an estimate. Once the request has ended, three of its parts are known: the first token, the
gaps between tokens, and the tokens really computed, which are what others were made to wait for. Putting them in place
of their estimates gives the realised cost. What is easy to get wrong: the time to the first token alone is no verdict.
On a busy fleet one request alone is nearly always better off with a cold prefill on the emptiest replica, and a fleet
where all do that collapses; the work imposed on others must stay in the sum, at its price.
"""

from __future__ import annotations

from msgspec import Struct

from warmfront.policy.base import Ended
from warmfront.policy.estimators import Learned
from warmfront.types import Request, Slot


class Bet(Struct, frozen=True, gc=False):
    """What was expected of one decision. Seconds, but for counts."""

    slot: Slot
    block: int | None
    """Of the guard; `None`: both rules agreed."""
    by_rival: bool
    cost_s: float
    """Of the replica chosen, for this request alone: without later turns, without investment in a copy."""
    alternative_s: float
    """The same for the replica that load alone would have chosen."""
    waiting_s: float
    """The way there and back included."""
    prefill_s: float
    price: float
    """X: of a second of prefill."""
    token_s: float
    """Between two of its tokens."""
    token_weight: float
    """What a second of that is worth in seconds of first token."""


def regret_s(bet: Bet, request: Request, outcome: Ended, learned: Learned) -> float | None:
    """Return realised cost less the estimate for load alone.

    Args:
        bet: Made when the request was placed.
        request: The same.
        outcome: Of it. One that ended without a first token counts as if that had come at the end, if it ended late.
        learned: Of the pool, now.

    Returns:
        Seconds; positive: load alone would have been better. `None`: answered elsewhere, or without saying anything.
    """
    if outcome.slot != bet.slot:
        return None
    expected_s = bet.waiting_s + bet.prefill_s
    if outcome.first_token_s is None:
        late_s = outcome.lasted_s - expected_s
        return bet.cost_s + late_s - bet.alternative_s if late_s > 0 else None
    realised_s = bet.cost_s + outcome.first_token_s - expected_s
    if outcome.token_s is not None:
        realised_s += bet.token_weight * (outcome.token_s - bet.token_s)
    realised_s += (bet.price - 1.0) * (_computed_s(bet, request, outcome, learned) - bet.prefill_s)
    return realised_s - bet.alternative_s


def _computed_s(bet: Bet, request: Request, outcome: Ended, learned: Learned) -> float:
    """Return the seconds of prefill that the engine spent: from reported cached tokens, else from the first token."""
    tokens = request.prompt_tokens
    if outcome.cached_tokens is not None:
        return learned.prefill.seconds(bet.slot, max(1, tokens - outcome.cached_tokens), tokens)
    if outcome.first_token_s is None:
        return bet.prefill_s
    return max(0.0, min(learned.prefill.seconds(bet.slot, tokens, tokens), outcome.first_token_s - bet.waiting_s))
