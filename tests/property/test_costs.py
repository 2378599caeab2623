"""What an explanation shows is what a decision used: same arithmetic, pruned or not."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from support.routing import PlainIndex, World, replica
from warmfront.policy.marginal_cost import MarginalCost
from warmfront.policy.prices import TIE_S
from warmfront.router.fleet import padded
from warmfront.types import EngineLoad, Slot

SLOTS = 12


def random_world(draw: st.DataObject) -> World:
    """Make a fleet of unlike replicas with work in flight and something in every cache."""
    world = World(0)
    states = []
    for slot in range(SLOTS):
        capacity = draw.draw(st.sampled_from([None, 8000, 200_000]))
        block_size = draw.draw(st.sampled_from([None, 16, 32]))
        running = draw.draw(st.sampled_from([None, 0.0, 12.0]))
        events = draw.draw(st.sampled_from(["live", "stale"]))
        state = replica(slot, capacity_tokens=capacity, block_size=block_size, events=events)
        states.append(replace(state, replica=replace(state.replica, load=EngineLoad(running=running, kv_usage=0.5))))
    world.set_fleet(states)
    learned = world.router._pools["m"].fleet.learned
    for slot in range(SLOTS):
        learned.prefill.scale[slot] = draw.draw(st.floats(0.3, 3.0))
        fill(world.index, slot, draw)
    for _ in range(draw.draw(st.integers(0, 25))):
        world.now_s += draw.draw(st.floats(0, 0.5))
        dispatch = world.send(prefix_key=draw.draw(st.integers(0, 3)), prompt_tokens=draw.draw(st.integers(1, 9000)))
        if draw.draw(st.booleans()):
            world.first_token(dispatch)
        if draw.draw(st.booleans()):
            world.finish(dispatch, cached_tokens=draw.draw(st.integers(0, 2000)))
    return world


def fill(index: PlainIndex, slot: int, draw: st.DataObject) -> None:
    index.resident[slot] = draw.draw(st.integers(0, 200_000))
    index.evicted[slot] = draw.draw(st.integers(0, 10_000))
    index.regretted[slot] = draw.draw(st.integers(0, index.evicted[slot]))
    for key in range(4):
        index.held[(slot, key)] = draw.draw(st.sampled_from([0, 0, 64, 1600, 8000]))
        index.host[(slot, key)] = draw.draw(st.sampled_from([0, 0, 3200]))


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
