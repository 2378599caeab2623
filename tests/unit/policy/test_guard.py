"""The guard on made-up outcomes: heavy tails, loads that wander, answers that come late and out of order."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from random import Random

import pytest
from warmfront.config import GuardConfig
from warmfront.policy.guard import BLOCKS_OPEN_MAX, CREDITS, WEALTH_ALARM, Guard, Wealth

Factor = Callable[[float], float]
"""What a rule's outcomes are multiplied by, given the credit in force."""


class Stream:
    """Decisions on which both rules differ, fed to a guard."""

    def __init__(self, seed: int, *, share: float = 0.05, hold_s: float = 300.0) -> None:
        self.guard = Guard(GuardConfig(share=share, hold_s=hold_s), scale_s=2.0)
        self.draws, self.world = Random(seed), Random(seed + 10**6)
        self.now_s, self.load = 0.0, 0.0
        self.late: list[tuple[float, int, bool, float, float]] = []

    def decide(self, by_cache: Factor, by_load: Factor) -> None:
        """Let one decision happen, and one that is over be told."""
        guard, world = self.guard, self.world
        self.now_s += 0.05
        self.load = 0.995 * self.load + world.gauss(0, 0.08)
        challenged, rival = guard.is_rivals_turn, guard.rival
        number = guard.entered(self.draws)
        expected_s = 0.6 * math.exp(self.load)
        factor = self._factor(by_cache, by_load, rival if challenged else None)
        took_s = expected_s * world.lognormvariate(-0.5, 1.0) * factor
        self.late.append((self.now_s + took_s, number, challenged, took_s - expected_s, expected_s))
        if len(self.late) > 40:
            self.late.sort()
            _, number, challenged, regret_s, cost_s = self.late.pop(0)
            guard.ended(number, self.now_s, by_rival=challenged, regret_s=regret_s, cost_s=cost_s)

    def _factor(self, by_cache: Factor, by_load: Factor, rival: str | None) -> float:
        credit = self.guard.credit
        if rival == "load":
            return by_load(credit)
        if rival == "cache":
            return by_cache(credit)
        return credit * by_cache(credit) + (1.0 - credit) * by_load(credit)

    def until(self, done: Callable[[Guard], bool], by_cache: Factor, by_load: Factor, limit: int) -> int | None:
        """Return after how many decisions the guard was as wanted, if it ever was."""
        for decision in range(limit):
            self.decide(by_cache, by_load)
            if done(self.guard):
                return decision
        return None


def good(_: float) -> float:
    return 1.0


def bad(_: float) -> float:
    return 2.0


def fell(guard: Guard) -> bool:
    return guard.credit < 1.0


def test_the_credit_falls_step_by_step_where_affinity_loses() -> None:
    stream = Stream(1, hold_s=1e6)
    credits = [stream.guard.credit]
    for _ in range(20_000):
        stream.decide(bad, good)
        if stream.guard.credit != credits[-1]:
            credits.append(stream.guard.credit)
    assert credits == [1.0, 0.5, 0.25, 0.0]
    assert stream.guard.alarms == 3


def test_the_credit_falls_within_two_thousand_decisions_where_affinity_doubles_costs() -> None:
    found = [Stream(seed).until(fell, bad, good, 2000) for seed in range(20)]
    assert None not in found


@pytest.mark.parametrize(("by_cache", "by_load"), [(good, bad), (good, good)], ids=["pays", "changes nothing"])
def test_false_alarms_are_rarer_than_one_in_a_hundred(by_cache: Factor, by_load: Factor) -> None:
    alarms = sum(Stream(seed).until(fell, by_cache, by_load, 1000) is not None for seed in range(200))
    assert alarms < 2


def test_the_credit_comes_back_when_affinity_pays_again() -> None:
    stream = Stream(3, hold_s=1e6)
    assert stream.until(lambda guard: guard.credit == 0.0, bad, good, 20_000) is not None
    assert stream.until(lambda guard: guard.credit == 1.0, good, bad, 20_000) is not None


def test_the_credit_comes_back_untested_where_single_requests_cannot_show_the_gain() -> None:
    stream = Stream(4, hold_s=60.0)
    assert stream.until(lambda guard: guard.credit == 0.0, bad, good, 20_000) is not None
    assert stream.until(lambda guard: guard.credit == 1.0, good, good, 40_000) is not None


def test_each_relapse_makes_the_next_untested_step_wait_longer() -> None:
    stream = Stream(5, hold_s=30.0)
    raised: list[float] = []
    credit = 1.0
    for _ in range(60_000):
        stream.decide(bad, good)
        if stream.guard.credit > credit:
            raised.append(stream.now_s)
        credit = stream.guard.credit
    waits = [later - earlier for earlier, later in pairwise(raised)]
    assert len(waits) >= 2
    assert waits[-1] > 2 * waits[0]
    assert stream.guard.credit < 1.0


def test_one_decision_of_a_block_is_the_rivals_at_a_drawn_position() -> None:
    guard, draws = Guard(GuardConfig(share=0.01), scale_s=2.0), Random(6)
    positions: list[int] = []
    for decision in range(10_000):
        if guard.is_rivals_turn:
            positions.append(decision % 100)
        guard.entered(draws)
    assert guard.rivals == len(positions) == 100
    assert len(set(positions)) > 50


def test_a_rule_that_wins_is_challenged_less_often_until_it_loses() -> None:
    guard, draws = Guard(GuardConfig(share=0.1), scale_s=2.0), Random(8)

    def rivals(decisions: int, regret_s: float) -> int:
        before = guard.rivals
        for _ in range(decisions):
            by_rival = guard.is_rivals_turn
            number = guard.entered(draws)
            guard.ended(number, 0.0, by_rival=by_rival, regret_s=0.0 if by_rival else regret_s, cost_s=1.0)
        return guard.rivals - before

    assert rivals(20, 0.0) == 2
    rivals(600, -0.5)
    assert 9 <= rivals(800, -0.5) <= 11  # one in eighty
    rivals(160, 0.01)
    assert 9 <= rivals(100, 0.01) <= 11


def test_the_same_seed_gives_the_same_course() -> None:
    def course() -> list[float]:
        stream = Stream(7)
        credits: list[float] = []
        for _ in range(6000):
            stream.decide(bad, good)
            credits.append(stream.guard.credit + stream.guard.gain_s)
        return credits

    assert course() == course()


def test_outcomes_that_never_come_cost_bounded_memory() -> None:
    guard, rng = Guard(GuardConfig(), scale_s=2.0), Random(8)
    for _ in range(50_000):
        guard.entered(rng)
    assert len(guard._blocks) <= BLOCKS_OPEN_MAX
    guard.ended(0, 1.0, by_rival=True, regret_s=9.0, cost_s=1.0)
    assert guard.credit == 1.0


def test_unknown_outcomes_are_left_out_of_their_block() -> None:
    guard, rng = Guard(GuardConfig(share=0.2), scale_s=2.0), Random(9)
    for _ in range(500):
        challenged = guard.is_rivals_turn
        number = guard.entered(rng)
        guard.ended(number, 0.0, by_rival=challenged, regret_s=None, cost_s=1.0)
    assert guard.evidence == guard.gain_s == 0.0


def test_the_measured_gain_is_the_difference_between_both_rules() -> None:
    guard, rng = Guard(GuardConfig(share=0.1), scale_s=2.0), Random(10)
    for _ in range(20_000):
        challenged = guard.is_rivals_turn
        number = guard.entered(rng)
        guard.ended(number, 0.0, by_rival=challenged, regret_s=1.5 if challenged else 0.5, cost_s=2.0)
    assert guard.gain_s == pytest.approx(1.0, rel=0.01)


def test_wealth_of_a_fair_game_seldom_reaches_the_alarm() -> None:
    reached = 0
    for seed in range(300):
        rng, wealth = Random(seed), Wealth()
        for _ in range(100):
            wealth.add(rng.choice((-1.0, 1.0)) * rng.random())
            reached += wealth.value >= WEALTH_ALARM
    assert reached <= 3


def test_levels_of_the_credit_lead_from_load_alone_to_full() -> None:
    assert CREDITS[0] == 0.0
    assert CREDITS[-1] == 1.0
    assert list(CREDITS) == sorted(CREDITS)
