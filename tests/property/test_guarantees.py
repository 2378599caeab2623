"""What `marginal_cost` promises whatever fleet, cache and traffic are. Stated in docs/explanation/policies.md."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.routing import World, replica
from support.worlds import SLOTS, random_world
from warmfront.config import CostConfig, PolicyConfig
from warmfront.policy.marginal_cost import MarginalCost
from warmfront.policy.prices import TIE_S, Costs
from warmfront.router.fleet import padded
from warmfront.types import Request, Slot

PREFIX = 77
PRICE_MAX = CostConfig().price_max
seeded = settings(max_examples=40, deadline=None, derandomize=True)


def evaluated(world: World, asked: Request) -> tuple[Costs, list[Costs]]:
    """Return the costs of the replica that would be chosen, and of all."""
    pool = world.router._pools["m"]
    policy = world.router._decider._policy(pool.fleet).policy
    assert isinstance(policy, MarginalCost)
    overlap = padded(world.index.overlap(asked), pool.fleet.slots)
    costs = policy._evaluation(asked, overlap, pool.fleet).costs(pool.fleet.eligible)
    chosen = policy.choose(asked, overlap, pool.fleet)[0].slot
    return next(cost for cost in costs if cost.slot == chosen), costs


def random_request(draw: st.DataObject, world: World) -> Request:
    return world.new(
        prefix_key=draw.draw(st.integers(0, 4)),
        prompt_tokens=draw.draw(st.integers(1, 9000)),
        turn=draw.draw(st.integers(0, 9)),
        priority=draw.draw(st.integers(-2, 2)),
        adapter=draw.draw(st.sampled_from([None, "poet"])),
    )


@seeded
@given(draw=st.data())
def test_the_wait_accepted_for_affinity_is_bounded_by_recomputations(draw: st.DataObject) -> None:
    world = random_world(draw)
    chosen, costs = evaluated(world, random_request(draw, world))
    for other in costs:
        recomputed_s = PRICE_MAX * other.paid_prefill_s + other.eviction_s
        differences_s = sum(
            getattr(other, term) - getattr(chosen, term) for term in ("decode_s", "memory_s", "future_s", "net_s")
        )
        assert chosen.waiting_s <= other.waiting_s + recomputed_s + differences_s + TIE_S


@seeded
@given(draw=st.data())
def test_no_wait_is_accepted_where_nothing_can_be_reused(draw: st.DataObject) -> None:
    """Unique prompts on equal replicas: never one that has as much of everything and longer to wait."""
    world = World(SLOTS)
    for _ in range(draw.draw(st.integers(0, 40))):
        world.now_s += draw.draw(st.floats(0, 0.2))
        dispatch = world.send(prompt_tokens=draw.draw(st.integers(100, 9000)))
        if draw.draw(st.booleans()):
            world.first_token(dispatch)
    chosen, costs = evaluated(world, world.new(prompt_tokens=draw.draw(st.integers(1, 9000))))
    fleet = world.router._pools["m"].fleet
    burdens = (fleet.weight, fleet.next_step_s, fleet.arrivals, fleet.work_s, fleet.output_tokens)
    for other in costs:
        if all(column[other.slot] <= column[chosen.slot] for column in burdens):
            assert chosen.waiting_s <= other.waiting_s + TIE_S


@seeded
@given(draw=st.data())
def test_without_credit_the_cache_decides_nothing(draw: st.DataObject) -> None:
    """η = 0: the choice is that of a router which knows of no cache, memory in use apart."""
    world = random_world(draw)
    credit = world.router._pools["m"].fleet.learned.credit
    for factors in credit.factor.values():
        factors[:] = [0.0] * len(factors)
    asked = random_request(draw, world)
    _, believed = evaluated(world, asked)
    world.index.held.clear()
    world.index.host.clear()
    _, blind = evaluated(world, asked)
    for with_index, without in zip(believed, blind, strict=True):
        loads_s = with_index.own_prefill_s - without.own_prefill_s  # a slower tier is loaded before it disappoints
        assert loads_s >= -1e-9
        assert with_index.paid_prefill_s - loads_s == pytest.approx(without.paid_prefill_s)


@seeded
@given(draw=st.data())
def test_memory_in_use_never_makes_a_replica_cheaper(draw: st.DataObject) -> None:
    world = random_world(draw)
    asked = random_request(draw, world)
    slot = draw.draw(st.integers(0, SLOTS - 1))
    _, before = evaluated(world, asked)
    world.index.in_use[-1] = (slot, 99, draw.draw(st.integers(1, 300_000)))  # type: ignore[index]  # nobody's
    _, after = evaluated(world, asked)
    assert after[slot].total_s >= before[slot].total_s - 1e-9
    assert after[slot].memory_s >= before[slot].memory_s - 1e-9


@seeded
@given(draw=st.data())
def test_a_slower_replica_is_never_cheaper(draw: st.DataObject) -> None:
    world = random_world(draw)
    asked = random_request(draw, world)
    slot = Slot(draw.draw(st.integers(0, SLOTS - 1)))
    _, before = evaluated(world, asked)
    world.router._pools["m"].fleet.learned.prefill.scale[slot] *= draw.draw(st.floats(1.0, 5.0))
    _, after = evaluated(world, asked)
    assert after[slot].total_s >= before[slot].total_s - 1e-9


@seeded
@given(draw=st.data())
def test_a_longer_way_costs_exactly_what_it_takes_longer(draw: st.DataObject) -> None:
    world = random_world(draw)
    asked = random_request(draw, world)
    slot = Slot(draw.draw(st.integers(0, SLOTS - 1)))
    _, before = evaluated(world, asked)
    ways_s = world.router._pools["m"].fleet.net_s
    longer_s = draw.draw(st.floats(0.0, 2.0))
    ways_s[slot] += longer_s
    _, after = evaluated(world, asked)
    for old, new in zip(before, after, strict=True):
        assert new.total_s - old.total_s == pytest.approx(longer_s if new.slot == slot else 0.0)
        assert new.first_token_s - old.first_token_s == pytest.approx(longer_s if new.slot == slot else 0.0)


@seeded
@given(draw=st.data())
def test_dearer_loads_make_nothing_cheaper_and_are_told(draw: st.DataObject) -> None:
    world = random_world(draw)
    asked = random_request(draw, world)
    loads = world.router._pools["m"].fleet.learned.loads
    _, before = evaluated(world, asked)
    loads.costs = [cost * draw.draw(st.floats(1.0, 80.0)) for cost in loads.costs]
    _, after = evaluated(world, asked)
    held = padded(world.index.overlap(asked), SLOTS)
    for old, new in zip(before, after, strict=True):
        assert new.own_prefill_s >= old.own_prefill_s - 1e-12
        tokens = held.host[new.slot] - held.device[new.slot]
        assert new.tier_load_s == pytest.approx(tokens * loads.host_s)


def copies_after(rate: float, *, seconds: float = 15.0) -> int:
    """Send one prefix at a steady rate to eight replicas and count those that hold it."""
    world = World(8)
    world.index.held[(0, PREFIX)] = 8000
    for _ in range(int(rate * seconds)):
        world.now_s += 1.0 / rate
        dispatch = world.send(prefix_key=PREFIX, prompt_tokens=8000)
        world.first_token(dispatch)
        world.finish(dispatch, cached_tokens=dispatch.choices[0].cached_tokens)
    return len({slot for slot, key in world.index.held if key == PREFIX})


def test_a_prefix_has_the_more_copies_the_more_often_it_is_asked_for() -> None:
    copies = [expected_copies(rate) for rate in (0.5, 4.0, 32.0)]
    assert copies == sorted(copies)
    assert copies[0] < copies[-1]


def expected_copies(rate: float) -> float:
    """Return N for a cold replica when one other holds the prefix: what a second copy would serve."""
    world = World(8)
    for _ in range(int(rate * 60)):
        world.index.held = {(0, PREFIX): 8000}
        world.now_s += 1.0 / rate
        dispatch = world.send(prefix_key=PREFIX, prompt_tokens=8000)
        world.first_token(dispatch)
        world.finish(dispatch, cached_tokens=7984)
    world.index.held = {(0, PREFIX): 8000}
    _, costs = evaluated(world, world.new(prefix_key=PREFIX, prompt_tokens=8000))
    return costs[1].copies_gain


@pytest.mark.parametrize("replicas", [3, 8])
def test_a_cold_replica_has_its_share_of_new_prefixes_within_ten_seconds(replicas: int) -> None:
    world = World(replicas)
    world.index.resident = dict.fromkeys(range(replicas), 200_000)
    for _ in range(60):
        world.now_s += 0.1
        world.first_token(world.send(prompt_tokens=4000))
    world.set_fleet([*world.states(), replica(replicas)])
    since = Counter[Any]()
    for _ in range(100):
        world.now_s += 0.1
        dispatch = world.send(prompt_tokens=4000)
        since[dispatch.choices[0].slot] += 1
        world.first_token(dispatch)
    assert since[replicas] >= 100 / (replicas + 1)


@seeded
@given(tokens=st.integers(1000, 16_000), busy=st.integers(0, 30))
def test_siblings_leave_when_waiting_costs_more_than_computing_again(tokens: int, busy: int) -> None:
    """The first one to leave finds a wait above one prefill and below `price_max` of them."""
    world = World(4, policy=PolicyConfig(cost=CostConfig(copy_horizon_s=0.0)))
    for slot in range(4):
        if busy:
            world.load(slot, busy, prompt_tokens=160)
    for flight in list(world.router._pools["m"].flights.values()):
        assert flight.slot is not None
        world.router._pools["m"].first_token(flight, world.now_s)
    home = world.slot(prefix_key=PREFIX, prompt_tokens=tokens)
    for _ in range(400):
        _, costs = evaluated(world, world.new(prefix_key=PREFIX, prompt_tokens=tokens))
        waiting_s = costs[home].waiting_s
        cold = [cost for cost in costs if cost.slot != home]
        if world.slot(prefix_key=PREFIX, prompt_tokens=tokens) != home:
            assert waiting_s <= PRICE_MAX * max(cost.own_prefill_s for cost in cold) + 1.0
            assert waiting_s + costs[home].own_prefill_s >= min(cost.own_prefill_s for cost in cold) - 2 * TIE_S
            return
    raise AssertionError("no sibling ever left")
