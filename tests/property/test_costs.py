"""What an explanation shows is what a decision used: same arithmetic, whether all replicas were looked at or few."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from support.worlds import SLOTS, random_world
from warmfront.core import erfc
from warmfront.policy.affinity import ranked
from warmfront.policy.evaluation import Evaluation
from warmfront.policy.guard import CREDITS
from warmfront.policy.marginal_cost import MarginalCost
from warmfront.policy.prices import Costs
from warmfront.router.fleet import padded
from warmfront.types import Overlap, Request, Slot


class Decision:
    """A request that is about to be placed in a random world."""

    def __init__(self, draw: st.DataObject, *, credits: Sequence[float] = CREDITS) -> None:
        """Draw it; `credits`: how far the guard may trust affinity."""
        world = random_world(draw)
        self.fleet = fleet = world.router._pools["m"].fleet
        self.request: Request = world.new(
            prefix_key=draw.draw(st.integers(0, 4)),
            prompt_tokens=draw.draw(st.integers(0, 9000)),
            turn=draw.draw(st.integers(0, 9)),
            priority=draw.draw(st.sampled_from([0, 0, -2, 3])),
            adapter=draw.draw(st.sampled_from([None, None, "x", "y"])),
            route=draw.draw(st.sampled_from(["prefix", "prefix", "load"])),
        )
        fleet.held_s = draw.draw(st.sampled_from([0.0, 0.7]))
        for slot in range(SLOTS):
            fleet.net_s[slot] = draw.draw(st.sampled_from([0.0, 0.02, 0.3]))
            fleet.admission_s[slot] = draw.draw(st.sampled_from([0.0, 0.0, 2.5]))
            fleet.learned.residence_s[slot] = draw.draw(st.floats(0.1, 20.0))
            if draw.draw(st.booleans()):
                fleet.adapters.used(Slot(slot), "x", world.now_s)
        for factors in fleet.learned.credit.factor.values():
            factors[:] = [draw.draw(st.sampled_from([1.0, 0.9, 0.35])) for _ in factors]
        reuse = fleet.learned.reuse.factor
        reuse[:] = [draw.draw(st.sampled_from([1.0, 1.0, 0.0])) for _ in reuse]
        left_out = draw.draw(st.sets(st.integers(0, SLOTS - 1), max_size=SLOTS - 1))
        if left_out:
            fleet.allow([slot for slot in fleet.eligible if slot not in left_out])
        self.overlap: Overlap = padded(world.index.overlap(self.request), fleet.slots)
        policy = world.router._decider._policy(fleet).policy
        assert isinstance(policy, MarginalCost)
        self.policy = policy
        policy._watch._guard.credit = draw.draw(st.sampled_from(credits))

    def evaluation(self) -> Evaluation:
        return self.policy._evaluation(self.request, self.overlap, self.fleet)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(draw=st.data())
def test_terms_add_up_to_the_very_cost_that_decides(draw: st.DataObject) -> None:
    decision = Decision(draw, credits=(1.0,))
    fleet = decision.fleet
    explained = {cost.slot: cost for cost in decision.policy.explain(decision.request, decision.overlap, fleet)}
    assert sorted(explained) == fleet.eligible
    for cost in explained.values():
        assert math.isclose(sum(term.value for term in cost.terms), cost.total, rel_tol=1e-12)
        assert all(term.value >= 0 for term in cost.terms)
    count = min(fleet.choices_max, len(explained))
    used = decision.evaluation()._pruned(count)
    for cost in used:
        assert cost.total_s == explained[cost.slot].total
        assert cost.cached_tokens == explained[cost.slot].cached_tokens
    assert sorted(cost.total_s for cost in used)[:count] == sorted(cost.total for cost in explained.values())[:count]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(draw=st.data())
def test_the_core_knows_every_cost_to_the_last_bit(draw: st.DataObject) -> None:
    decision = Decision(draw)
    evaluation = decision.evaluation()
    costs, bounds = evaluation.costs(decision.fleet.eligible), evaluation._bounded().bounds_s()
    assert bounds == [(cost.total_s, cost.trusting_s, cost.blind_s) for cost in costs]
    assert evaluation.seen_s() == [cost.waiting_s + cost.decode_s + cost.memory_s + cost.net_s for cost in costs]


@given(x=st.floats(-30.0, 30.0))
def test_the_cores_error_function_is_the_platforms_but_for_the_last_bits(x: float) -> None:
    assert math.isclose(erfc(x), math.erfc(x), rel_tol=1e-13, abs_tol=1e-300)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(draw=st.data())
def test_a_key_prefers_the_same_replicas_as_on_any_other_router(draw: st.DataObject) -> None:
    decision = Decision(draw)
    key, fleet = draw.draw(st.integers(0, 2**64 - 1)), decision.fleet
    preferred = [cost.slot for cost in decision.evaluation().preferred(key, 3)]
    assert preferred == ranked(key, fleet.eligible, fleet.hash)[:3]


class Dearer(Evaluation):
    """Has a term that the core does not know."""

    __slots__ = ()

    def costs(self, slots: Sequence[Slot]) -> list[Costs]:
        def more(cost: Costs) -> Costs:
            term_s = 0.05 * (cost.slot * 7 % 5)
            return replace(cost, total_s=cost.total_s + term_s, blind_s=cost.blind_s + term_s)

        return [more(cost) for cost in super().costs(slots)]


def considered(decision: Decision, costs: list[Costs]) -> list[Slot]:
    """Return what the guard looks at, then the choices in order."""
    fleet, watch = decision.fleet, decision.policy._watch
    by_cost = decision.policy._ranked(decision.request, decision.overlap, fleet, costs)
    by_guard = watch.considered(decision.request, fleet, costs, by_cost)
    assert watch._first is not None
    assert watch._alternative is not None
    return [watch._first.slot, watch._alternative.slot, *(cost.slot for cost in by_guard[: fleet.choices_max])]


@pytest.mark.parametrize("kind", [Evaluation, Dearer])
@settings(max_examples=100, deadline=None, derandomize=True)
@given(draw=st.data())
def test_what_cannot_win_is_left_out_at_any_credit_and_changes_no_decision(
    kind: type[Evaluation], draw: st.DataObject
) -> None:
    decision = Decision(draw)
    evaluation = decision.evaluation()
    evaluation.__class__ = kind
    everything, used = evaluation.costs(decision.fleet.eligible), evaluation._pruned(decision.fleet.choices_max)
    assert all(cost in everything for cost in used)
    assert considered(decision, used) == considered(decision, everything)
