from __future__ import annotations

import pytest
from msgspec.structs import replace
from support.routing import request
from warmfront.config import CostConfig
from warmfront.policy.base import Ended
from warmfront.policy.estimators import Learned
from warmfront.policy.regret import Bet, regret_s
from warmfront.types import Slot

ALPHA = CostConfig().prefill_prior_s
TOKENS = 10_000
WARM_S, COLD_S = 1000 * ALPHA, TOKENS * ALPHA


def bet(**changes: object) -> Bet:
    """Bet on a replica that holds 9,000 of 10,000 tokens and has 0.2 s of prefill waiting."""
    price, waiting_s = 3.0, 0.2
    made = Bet(
        slot=Slot(0),
        block=0,
        by_rival=False,
        cost_s=waiting_s + WARM_S * price + 0.4,
        alternative_s=COLD_S * price + 0.4,
        waiting_s=waiting_s,
        prefill_s=WARM_S,
        price=price,
        token_s=0.02,
        token_weight=20.0,
    )
    return replace(made, **changes)


def regret(outcome: Ended, made: Bet | None = None) -> float | None:
    learned = Learned(CostConfig())
    learned.grow()
    return regret_s(made or bet(), request(1, prompt_tokens=TOKENS), outcome, learned)


def ended(**changes: object) -> Ended:
    values = {"slot": Slot(0), "first_token_s": 0.2 + WARM_S, "lasted_s": 2.0, "token_s": 0.02, "cached_tokens": 9000}
    return Ended(**{**values, **changes})  # type: ignore[arg-type]


def test_what_comes_as_expected_is_regretted_by_the_expected_difference() -> None:
    assert regret(ended()) == pytest.approx(0.2 + WARM_S * 3.0 - COLD_S * 3.0)


def test_a_late_first_token_is_regretted_second_by_second() -> None:
    assert regret(ended(first_token_s=5.2 + WARM_S)) == pytest.approx(regret(ended()) + 5.0)


def test_slow_tokens_are_regretted_by_the_weight_of_decoding() -> None:
    assert regret(ended(token_s=0.12)) == pytest.approx(regret(ended()) + 20.0 * 0.1)


def test_a_cache_that_did_not_hold_what_was_promised_is_regretted_at_the_price_of_the_work() -> None:
    missed = regret(ended(first_token_s=0.2 + COLD_S, cached_tokens=0))
    assert missed == pytest.approx(0.2 + COLD_S * 3.0 - COLD_S * 3.0)


def test_without_reported_tokens_the_first_token_tells_what_was_computed() -> None:
    assert regret(ended(cached_tokens=None)) == pytest.approx(regret(ended()))
    slow = ended(first_token_s=0.2 + COLD_S, cached_tokens=None)
    assert regret(slow) == pytest.approx(regret(ended(first_token_s=0.2 + COLD_S, cached_tokens=0)))


def test_a_client_that_gave_up_waiting_counts_as_late_as_it_left() -> None:
    gone = ended(first_token_s=None, lasted_s=8.0, token_s=None, cached_tokens=None)
    assert regret(gone) == pytest.approx(bet().cost_s + 8.0 - 0.2 - WARM_S - bet().alternative_s)


def test_a_client_that_left_at_once_tells_nothing() -> None:
    assert regret(ended(first_token_s=None, lasted_s=0.01, token_s=None, cached_tokens=None)) is None


@pytest.mark.parametrize("slot", [None, Slot(1)])
def test_an_answer_from_another_replica_tells_nothing_about_the_choice(slot: Slot | None) -> None:
    assert regret(ended(slot=slot)) is None
