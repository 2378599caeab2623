"""What engines report about themselves: one scrape counts once, however often the state of the fleet is told."""

from __future__ import annotations

import pytest
from support.routing import World, busy, replica

FULL = {"running": 4.0, "waiting": 40.0, "kv_usage": 0.2}


def tell(world: World, *, age_s: float, **load: float) -> None:
    world.set_fleet([busy(replica(0), age_s=age_s, **load), replica(1)])


def limit(world: World) -> float | None:
    return world.router._pools["m"].fleet.learned.sequences.limit[0]


def test_a_limit_of_sequences_is_learned_from_several_scrapes() -> None:
    world = World(2)
    for number in range(4):
        tell(world, age_s=0.1 + 0.001 * number, **FULL)  # no two ages are the same to the last digit
        world.now_s += 1.0
    assert limit(world) == 4.0


def test_one_scrape_that_is_told_again_and_again_counts_once() -> None:
    world = World(2)
    for number in range(8):
        tell(world, age_s=0.1 * number, **FULL)  # as the control process tells it, older each time
        world.now_s += 0.1
    assert limit(world) is None
    for _ in range(8):
        tell(world, age_s=0.7, **FULL)  # as the core tells it, for changes of its own
        world.now_s += 0.5
    assert limit(world) is None


def test_an_old_report_teaches_nothing() -> None:
    world = World(2)
    for number in range(8):
        tell(world, age_s=6.0 + 0.001 * number, **FULL)
        world.now_s += 1.0
    assert limit(world) is None


def test_a_saturated_engine_has_room_when_as_many_have_ended_as_waited_however_often_its_report_is_told() -> None:
    world = World(2)
    dispatches = []
    pool = world.router._pools["m"]
    while pool.fleet.in_flight[0] < 6:
        dispatches.append(world.send(prompt_tokens=100))
    tell(world, age_s=0.0, running=4.0, waiting=2.0, kv_usage=0.99)
    room = pool.saturated[0]
    assert room == pool.fleet.in_flight[0] - 2
    world.finish(next(each for each in dispatches if each.choices[0].slot == 0))
    world.now_s += 0.3
    tell(world, age_s=0.3, running=4.0, waiting=2.0, kv_usage=0.99)
    assert pool.saturated[0] == room
    world.now_s += 0.7
    tell(world, age_s=0.0, running=4.0, waiting=1.0, kv_usage=0.99)
    assert pool.saturated[0] == pool.fleet.in_flight[0] - 1


def test_a_way_of_milliseconds_is_no_difference_and_a_long_one_is() -> None:
    world = World(0)
    world.set_fleet([busy(replica(slot), rtt_s=rtt_s) for slot, rtt_s in enumerate([None, 0.0019, 0.0021, 0.08])])
    assert world.router._pools["m"].fleet.net_s == pytest.approx([0.0, 0.0, 0.0001, 0.078])
    world.set_fleet([busy(replica(3), rtt_s=None)])
    assert world.router._pools["m"].fleet.net_s == [0.0, 0.0, 0.0, 0.0]
