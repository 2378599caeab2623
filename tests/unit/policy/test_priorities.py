from __future__ import annotations

import pytest
from support.routing import World
from warmfront.config import CostConfig, PolicyConfig

PREFIX = 77


def price(world: World, slot: int = 0, **changes: object) -> float:
    factors = world.costs(world.new(prefix_key=PREFIX, **changes))[slot]["factors"]
    return float(next(each["value"] for each in factors if each["symbol"] == "X"))


def test_lower_numbers_weigh_more_and_no_number_weighs_without_bound() -> None:
    fleet = World(1).router._pools["m"].fleet
    weights = [fleet.weight_of(priority) for priority in (-1000, -1, 0, 1, 1000)]
    assert weights == [16.0, 2.0, 1.0, 0.5, 1 / 16]


def test_equal_priorities_decide_as_no_priorities_do() -> None:
    plain, urgent = World(3), World(3)
    for number in range(60):
        for world, priority in ((plain, 0), (urgent, -1)):
            world.now_s += 0.01
            dispatch = world.send(prefix_key=number % 7, prompt_tokens=400 + 90 * (number % 11), priority=priority)
            if number % 2:
                world.first_token(dispatch)
        assert plain.index.held == urgent.index.held


def test_delaying_urgent_requests_costs_more_than_delaying_patient_ones() -> None:
    urgent, patient = World(1), World(1)
    urgent.load(0, 8, priority=-2)
    patient.load(0, 8, priority=2)
    assert price(urgent) > 2 * price(patient)


def test_an_urgent_request_leaves_its_warm_replica_sooner_than_a_patient_one() -> None:
    waits = {}
    for priority in (-3, 3):
        world = World(2)
        world.index.held[(0, PREFIX)] = 16_000
        world.load(1, 4, prompt_tokens=160)
        waited = 0
        while (
            world.costs(world.new(prefix_key=PREFIX, prompt_tokens=16_000, priority=priority))[0]["total"]
            < (world.costs(world.new(prefix_key=PREFIX, prompt_tokens=16_000, priority=priority))[1]["total"])
        ):
            world.load(0, 1, prompt_tokens=2000)
            waited += 1
        waits[priority] = waited
    assert waits[-3] < waits[3]


def test_weights_leave_the_ledger_with_their_requests() -> None:
    world = World(1)
    dispatches = [world.send(priority=priority) for priority in (-2, 0, 3)]
    fleet = world.router._pools["m"].fleet
    assert fleet.weight[0] == pytest.approx(4 + 1 + 1 / 8)
    assert fleet.pending_weight[0] == fleet.weight[0]
    for dispatch in dispatches:
        world.first_token(dispatch)
    assert fleet.pending_weight[0] == 0.0
    for dispatch in dispatches:
        world.finish(dispatch)
    assert fleet.weight[0] == 0.0


def test_a_step_of_one_makes_all_priorities_equal() -> None:
    world = World(1, policy=PolicyConfig(cost=CostConfig(priority_step=1.0)))
    world.load(0, 8, priority=-2)
    other = World(1)
    other.load(0, 8)
    assert price(world) == price(other)
