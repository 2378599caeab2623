"""Choices that went wrong elsewhere, on a router in virtual time."""

from __future__ import annotations

import pytest
from support.routing import World, fleet, replica
from warmfront.config import PolicyConfig
from warmfront.policy import registry
from warmfront.types import Dispatch, FleetChanged, FleetState

KEY = 7


@pytest.mark.bug(5)
def test_one_overloaded_replica_does_not_cost_the_others_their_affinity() -> None:
    world = World(3)
    warm = world.serve(prefix_key=KEY).choices[0].slot
    hot = (warm + 1) % 3
    world.load(hot, 60)
    for _ in range(4):
        assert world.serve(prefix_key=KEY).choices[0].slot == warm


@pytest.mark.bug(21, 23)
def test_of_two_holders_the_less_loaded_one_is_taken() -> None:
    world = World(2)
    for slot in (0, 1):
        world.index.held[slot, KEY] = 1600
    world.load(0, 20)
    assert world.slot(prefix_key=KEY) == 1


@pytest.mark.bug(2, 22)
@pytest.mark.parametrize("policy", ["round_robin", "marginal_cost", "least_loaded"])
def test_each_pool_spreads_its_requests_however_they_interleave_with_another_pools(policy: str) -> None:
    world = World(2, policy=PolicyConfig(name=policy))
    rows = [replica(slot) for slot in range(2)]
    pools = [*fleet(rows, pool="m").pools, *fleet(rows, pool="other").pools]
    world.step(FleetChanged(0.0, FleetState(2, pools)))
    for pool, rival in (("m", "other"), ("other", "m")):
        slots = []
        for _ in range(4):
            slots.append(world.serve(pool=pool, model=pool).choices[0].slot)
            world.serve(pool=rival, model=rival)  # a shared turn would give one of them every other slot
        assert {0, 1} == set(slots), (pool, slots)


@pytest.mark.bug(19)
def test_every_dispatched_prompt_is_recorded_whatever_it_matched() -> None:
    world = World(2)
    for key in range(5):
        slot = world.slot(prefix_key=key)
        assert world.index.held[slot, key] == 1600


@pytest.mark.bug(25)
@pytest.mark.parametrize("policy", sorted(registry.BUILTIN))
def test_empty_prompts_are_placed_by_every_policy(policy: str) -> None:
    world = World(3, policy=PolicyConfig(name=policy))
    sent = [world.send(prompt_tokens=0, blocks=0, route="load", basis="none", prefix_key=None) for _ in range(6)]
    assert all(isinstance(each, Dispatch) for each in sent)


@pytest.mark.bug(3, 189)
def test_a_hot_prefix_has_a_second_replica_long_before_sixty_four_requests_are_in_flight() -> None:
    world = World(2)
    world.serve(prefix_key=KEY)
    slots = {world.slot(prefix_key=KEY, prompt_tokens=1600, output_tokens_max=2000) for _ in range(24)}
    assert slots == {0, 1}
