"""What an explanation shows is what a decision used: same arithmetic, pruned or not."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st
from support.worlds import SLOTS, random_world
from warmfront.policy.evaluation import ROUNDING_S
from warmfront.policy.guard import CREDITS
from warmfront.policy.marginal_cost import MarginalCost
from warmfront.policy.prices import TIE_S
from warmfront.router.fleet import padded
from warmfront.types import Slot


@settings(max_examples=60, deadline=None, derandomize=True)
@given(draw=st.data())
def test_terms_add_up_to_the_very_cost_that_decides(draw: st.DataObject) -> None:
    world = random_world(draw)
    asked = world.new(
        prefix_key=draw.draw(st.integers(0, 4)),
        prompt_tokens=draw.draw(st.integers(0, 9000)),
        turn=draw.draw(st.integers(0, 9)),
    )
    pool = world.router._pools["m"]
    policy = world.router._decider._policy(pool.fleet)[0]
    assert isinstance(policy, MarginalCost)
    overlap = padded(world.index.overlap(asked), pool.fleet.slots)
    explained = {cost.slot: cost for cost in policy.explain(asked, overlap, pool.fleet)}
    assert set(explained) == {Slot(slot) for slot in range(SLOTS)}
    for cost in explained.values():
        assert math.isclose(sum(term.value for term in cost.terms), cost.total, rel_tol=1e-12)
        assert all(term.value >= 0 for term in cost.terms)
    count = pool.fleet.choices_max
    used = policy._evaluation(asked, overlap, pool.fleet)._pruned(pool.fleet.eligible, count)
    assert len(used) >= count
    for cost in used:
        assert cost.total_s == explained[cost.slot].total
        assert cost.cached_tokens == explained[cost.slot].cached_tokens
    totals = sorted(cost.total for cost in explained.values())
    within_tie = [total for total in totals if total <= totals[count - 1] + TIE_S]
    assert sorted(cost.total_s for cost in used)[: len(within_tie)] == within_tie


@settings(max_examples=40, deadline=None, derandomize=True)
@given(draw=st.data())
def test_a_bound_never_exceeds_the_cost_whatever_happened_since_the_pressure_was_measured(draw: st.DataObject) -> None:
    world = random_world(draw)
    pool = world.router._pools["m"]
    policy = world.router._decider._policy(pool.fleet)[0]
    assert isinstance(policy, MarginalCost)
    policy._pressure.column(pool.fleet)
    for _ in range(draw.draw(st.integers(0, 4))):
        world.now_s += draw.draw(st.floats(0, 0.04))
        world.send(prefix_key=draw.draw(st.integers(0, 4)), prompt_tokens=draw.draw(st.integers(1, 9000)))
    asked = world.new(prefix_key=draw.draw(st.integers(0, 4)), prompt_tokens=draw.draw(st.integers(1, 9000)))
    overlap = padded(world.index.overlap(asked), pool.fleet.slots)
    evaluation = policy._evaluation(asked, overlap, pool.fleet)
    costs = evaluation.costs(pool.fleet.eligible)
    trusting, blind = evaluation._bounds()
    for low, high, cost in zip(trusting, blind, costs, strict=True):
        assert low <= cost.trusting_s + ROUNDING_S
        assert low <= high <= cost.blind_s + ROUNDING_S


@settings(max_examples=60, deadline=None, derandomize=True)
@given(draw=st.data())
def test_what_cannot_win_is_left_out_at_any_credit_and_changes_no_decision(draw: st.DataObject) -> None:
    world = random_world(draw)
    asked = world.new(
        prefix_key=draw.draw(st.integers(0, 4)),
        prompt_tokens=draw.draw(st.integers(0, 9000)),
        turn=draw.draw(st.integers(0, 9)),
    )
    fleet = world.router._pools["m"].fleet
    policy = world.router._decider._policy(fleet)[0]
    assert isinstance(policy, MarginalCost)
    policy._watch._guard.credit = draw.draw(st.sampled_from(CREDITS))
    overlap = padded(world.index.overlap(asked), fleet.slots)
    evaluation = policy._evaluation(asked, overlap, fleet)
    everything, used = evaluation.costs(fleet.eligible), evaluation._pruned(fleet.eligible, fleet.choices_max)
    assert all(cost in everything for cost in used)
    rules = ("total_s", "trusting_s", "blind_s") if evaluation.doubt else ("total_s", "trusting_s")
    for rule in rules:
        cheapest = min([getattr(cost, rule) for cost in everything])
        assert {cost.slot for cost in used if getattr(cost, rule) == cheapest} == {
            cost.slot for cost in everything if getattr(cost, rule) == cheapest
        }
    ranked = [cost.slot for cost in policy._ranked(asked, overlap, fleet, everything)]
    assert [cost.slot for cost in policy._ranked(asked, overlap, fleet, used)][: fleet.choices_max] == (
        ranked[: fleet.choices_max]
    )
