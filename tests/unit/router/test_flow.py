"""Flow control: who waits, in which order, for how long, and who is refused."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from support.routing import World, busy, codes, fleet, replica, request
from warmfront.config import FlowConfig, PolicyConfig, RouterConfig
from warmfront.router.admission import BEHIND, REPORT_S_MAX
from warmfront.types import (
    Arrived,
    Cancelled,
    Command,
    Dispatch,
    Failed,
    Finished,
    FirstToken,
    FleetChanged,
    FleetState,
    RequestId,
    Shed,
    Slot,
    Stopping,
    Tick,
)

LONG = 8000
"""Tokens that take more than a quarter of the target to compute, by the prior: 0.88 s."""


def limited(replicas: int = 1, *, policy: str = "least_loaded", **flow: Any) -> World:
    """Make a fleet whose replicas take one request each."""
    config = FlowConfig(**{"in_flight_max_per_replica": 1, **flow})
    return World(replicas, policy=PolicyConfig(name=policy), flow=config)


def patient(replicas: int = 1, **flow: Any) -> World:
    """Make a fleet whose policy estimates how long a request would wait."""
    return World(replicas, flow=FlowConfig(**flow))


def sent(commands: Iterable[Command]) -> list[int]:
    return [command.id for command in commands if isinstance(command, Dispatch)]


def refused(commands: Iterable[Command]) -> list[int]:
    return [command.id for command in commands if isinstance(command, Shed)]


def arrive(world: World, count: int, **changes: Any) -> list[int]:
    """Let requests wait that cannot be sent; return their numbers."""
    made = [world.new(**changes) for _ in range(count)]
    assert world.step(*[Arrived(each) for each in made]) == []
    return [each.id for each in made]


def finish(world: World, number: int, slot: int = 0) -> list[Command]:
    return world.step(Finished(RequestId(number), world.now_s, replica(slot).slot, 200, None, 5))


def drain(world: World, first: Dispatch, count: int) -> list[int]:
    """End requests one after another on a fleet of one; return the order in which the waiting ones are sent."""
    order: list[int] = []
    for _ in range(count):
        order += sent(finish(world, order[-1] if order else first.id))
    return order


# -- holding


@pytest.mark.bug(123)
def test_a_request_is_held_while_every_replica_would_make_it_wait_and_goes_to_the_one_that_frees() -> None:
    world = patient(2)
    first = [world.send(prompt_tokens=LONG) for _ in range(2 * BEHIND)]
    (held,) = arrive(world, 1)
    freed = next(dispatch for dispatch in first if dispatch.choices[0].slot == 1)
    (command,) = world.step(FirstToken(freed.id, 0.1, freed.choices[0].slot))
    assert isinstance(command, Dispatch)
    assert (command.id, command.choices[0].slot) == (held, 1)


def test_an_engine_always_has_a_request_behind_the_one_it_computes_whatever_the_estimate_says() -> None:
    world = patient(3)
    slots = Counter(world.slot(prompt_tokens=50 * LONG) for _ in range(3 * BEHIND))
    assert slots == {0: BEHIND, 1: BEHIND, 2: BEHIND}
    arrive(world, 1)


def test_a_request_is_held_while_no_replica_has_memory_for_it_and_sent_when_a_request_ends() -> None:
    world = patient(1)
    world.set_fleet([replica(0, capacity_tokens=60_000)])
    world.router._pools["m"].fleet.learned.output_tokens = 10_000.0
    decoding = []
    for _ in range(4):
        decoding.append(world.send(output_tokens_max=20_000))
        world.first_token(decoding[-1])
    for _ in range(BEHIND):  # these wait for memory at the engine
        world.send(output_tokens_max=20_000)
    (held,) = arrive(world, 1, output_tokens_max=20_000)
    assert world.pass_time(0.25) == []
    for dispatch in decoding[:-1]:
        assert sent(world.step(Cancelled(dispatch.id, world.now_s))) == []
    assert sent(world.step(Cancelled(decoding[-1].id, world.now_s))) == [held]


def test_a_request_that_waits_for_memory_is_sent_when_a_replica_with_memory_is_taken_back() -> None:
    world = patient(2)
    world.set_fleet([replica(slot, capacity_tokens=60_000) for slot in range(2)])
    world.router._pools["m"].fleet.learned.output_tokens = 10_000.0
    first = world.send(stream=False)
    away = first.choices[0].slot
    world.step(Failed(first.id, world.now_s, "rejected", [away], True, 429, 2.0, False))
    for _ in range(4):
        decoding = world.send(output_tokens_max=20_000)
        assert decoding.choices[0].slot != away
        world.first_token(decoding)
    for _ in range(BEHIND):
        world.send(output_tokens_max=20_000)
    (held,) = arrive(world, 1, output_tokens_max=20_000)
    assert sent(world.pass_time(0.25)) == []
    assert sent(world.pass_time(2.0)) == [held]


FULL = {"running": 40.0, "waiting": 2.0, "kv_usage": 0.97}


def test_an_engine_with_a_queue_and_full_memory_gets_nothing_while_the_others_have_room() -> None:
    world = patient(4)
    first, *others = world.states()
    world.index.held[(0, 77)] = 1600
    world.set_fleet([busy(first, **FULL), *others])
    assert 0 not in {world.slot(prompt_tokens=100, prefix_key=77) for _ in range(5)}
    for age_s in (0.0, REPORT_S_MAX + 0.1):
        world.pass_time(age_s)
        assert world.router._admission.unsaturated(world.router._pools["m"], [Slot(0)]) == ([Slot(0)] if age_s else [])


def test_a_warm_engine_is_not_left_out_when_so_many_are_saturated_that_the_rest_would_follow() -> None:
    world = patient(2)
    world.index.held[(0, 77)] = 16_000
    world.set_fleet([busy(world.states()[0], **FULL), world.states()[1]])
    assert world.slot(prompt_tokens=16_000, prefix_key=77) == 0


def test_requests_are_held_while_all_engines_have_queues_and_full_memory() -> None:
    world = patient(2)
    states = world.states()
    world.set_fleet([busy(each, **FULL) for each in states])
    (held,) = arrive(world, 1)
    assert sent(world.set_fleet([busy(states[0], running=40.0, waiting=0.0, kv_usage=0.97), states[1]])) == [held]


def test_a_saturated_engine_has_room_again_when_as_many_ended_as_waited() -> None:
    world = patient(1)
    first = [world.send(prompt_tokens=100) for _ in range(4)]
    world.set_fleet([busy(world.states()[0], running=2.0, waiting=2.0, kv_usage=0.99)])
    (held,) = arrive(world, 1)
    assert sent(finish(world, first[0].id)) == []
    assert sent(finish(world, first[1].id)) == [held]


@pytest.mark.parametrize("policy", ["least_loaded", "round_robin", "session", "prefix_hash", "random", "power_of_two"])
def test_policies_without_estimates_hold_nothing_unless_a_limit_is_set(policy: str) -> None:
    world = World(2, policy=PolicyConfig(name=policy), flow=FlowConfig())
    full = {"running": 40.0, "waiting": 9.0, "kv_usage": 1.0}
    world.set_fleet([busy(each, **full) for each in world.states()])
    assert len(sent(world.step(*[Arrived(world.new(prompt_tokens=LONG)) for _ in range(50)]))) == 50


def test_late_binding_can_be_switched_off() -> None:
    world = patient(1, late_binding=False)
    assert len(sent(world.step(*[Arrived(world.new(prompt_tokens=LONG)) for _ in range(50)]))) == 50


@pytest.mark.bug(109)
def test_by_default_a_burst_of_any_size_is_sent_or_held_and_none_is_refused() -> None:
    world = patient(2)
    commands = world.step(*[Arrived(world.new(prompt_tokens=LONG)) for _ in range(3000)])
    assert refused(commands) == []
    assert len(sent(commands)) == 3000 - FlowConfig().queue_max


# -- order


def test_a_lower_number_goes_first_whenever_it_came_and_equal_ones_go_in_order() -> None:
    world = limited()
    first = world.send()
    later = arrive(world, 2, priority=3) + arrive(world, 2)
    urgent = arrive(world, 2, priority=-1)
    assert drain(world, first, 6) == urgent + later[2:] + later[:2]


def test_priorities_beyond_the_bands_count_as_the_outermost() -> None:
    world = limited()
    first = world.send()
    low = arrive(world, 1, priority=9) + arrive(world, 1, priority=2**62)
    high = arrive(world, 1, priority=-(2**62)) + arrive(world, 1, priority=-9)
    assert drain(world, first, 4) == high + low


def test_the_most_urgent_of_a_batch_gets_the_only_place() -> None:
    world = limited()
    requests = [world.new(priority=priority) for priority in (2, 0, 1)]
    assert sent(world.step(*[Arrived(each) for each in requests])) == [requests[1].id]


def test_flows_of_one_band_share_tokens_by_weight() -> None:
    world = limited(weights={"paying": 3.0}, queue_timeout_s=1e6)
    first = world.send()
    of_flow = {number: flow for flow in ("paying", "free") for number in arrive(world, 400, flow=flow)}
    counts = Counter(of_flow[number] for number in drain(world, first, 200))
    assert 148 <= counts["paying"] <= 152


def test_a_flow_of_long_requests_gets_as_many_tokens_as_one_of_short_ones() -> None:
    world = limited(queue_timeout_s=1e6)
    first = world.send()
    long = set(arrive(world, 50, flow="long", prompt_tokens=16_000 - 100))
    arrive(world, 400, flow="short", prompt_tokens=1600 - 100)
    order = drain(world, first, 220)
    assert 18 <= len(long.intersection(order)) <= 22


def test_a_newcomer_is_served_before_the_backlog_of_a_flow_that_came_earlier() -> None:
    world = limited(queue_timeout_s=1e6)
    first = world.send()
    arrive(world, 100, flow="bulk")
    served = drain(world, first, 10)
    (newcomer,) = arrive(world, 1, flow="new")
    assert newcomer in drain(world, world_last(served), 2)


def world_last(served: list[int]) -> Dispatch:
    return Dispatch(RequestId(served[-1]), [], "")


def test_a_request_that_could_not_be_delivered_goes_before_those_of_its_flow_that_came_later() -> None:
    flow = FlowConfig(in_flight_max_per_replica=1)
    world = World(2, config=RouterConfig(choices_max=1, flow=flow))
    first, second = world.send(), world.send()
    arrive(world, 2)
    assert sent(world.fail(first)) == [3], "the replica that failed is free for others"
    assert sent(finish(world, second.id, second.choices[0].slot)) == [first.id]


# -- deadlines


def test_a_request_whose_deadline_passed_is_shed_and_never_sent_although_there_is_room_now() -> None:
    world = limited()
    first = world.send()
    (late,) = arrive(world, 1, deadline_s=2.0)
    world.now_s = 2.0
    commands = world.step(Finished(first.id, 2.0, first.choices[0].slot, 200, None, 5))
    assert (refused(commands), codes(commands), sent(commands)) == ([late], ["queue_timeout"], [])


def test_the_earlier_of_the_clients_deadline_and_our_own_counts() -> None:
    world = limited(queue_timeout_s=5.0)
    world.send()
    early, ours = arrive(world, 1, deadline_s=2.0) + arrive(world, 1, deadline_s=9.0)
    assert refused(world.pass_time(2.0)) == [early]
    assert refused(world.pass_time(2.9)) == []
    assert refused(world.pass_time(0.1)) == [ours]


def test_a_request_that_arrives_after_its_deadline_is_not_sent() -> None:
    world = World(1)
    world.pass_time(3.0)
    assert codes([world.arrive(deadline_s=2.5)]) == ["queue_timeout"]


def test_a_request_that_only_an_estimate_holds_back_is_sent_when_our_own_bound_on_waiting_is_over() -> None:
    world = patient(1, queue_timeout_s=5.0)
    for _ in range(BEHIND):
        world.send(prompt_tokens=LONG)
    impatient, ours = arrive(world, 1, prompt_tokens=LONG, deadline_s=3.0) + arrive(world, 1, prompt_tokens=LONG)
    assert (refused(world.pass_time(3.0)), sent(world.pass_time(1.9))) == ([impatient], [])
    flow = world.router._flow
    before_s = flow._mean_wait_s
    assert sent(world.pass_time(0.1)) == [ours]
    assert flow._mean_wait_s == pytest.approx(before_s + 0.1 * (5.0 - before_s)), "a wait as any other"


def test_nothing_waits_beyond_the_grace_time() -> None:
    world = limited()
    world.send()
    held = arrive(world, 3)
    assert world.step(Stopping(0.0, 2.0)) == []
    assert sorted(refused(world.pass_time(2.0))) == held


# -- bounds


def test_beyond_the_bound_the_newest_of_the_least_urgent_is_shed() -> None:
    world = limited(queue_max=3, overflow="shed")
    world.send()
    arrive(world, 1, priority=1)
    newest = arrive(world, 1, priority=1)
    arrive(world, 1)
    commands = world.step(Arrived(world.new()))
    assert (refused(commands), codes(commands)) == (newest, ["fleet_saturated"])
    shed = commands[0]
    assert isinstance(shed, Shed)
    assert shed.retry_after_s is not None


def test_a_flow_over_its_share_is_shed_before_others() -> None:
    world = limited(queue_max=6, weights={"big": 4.0})
    world.send()
    arrive(world, 3, flow="big")
    bulk = arrive(world, 2, flow="bulk")
    arrive(world, 1, flow="small")
    assert refused(world.step(Arrived(world.new(flow="small2")))) == [bulk[1]]


def test_each_flow_is_bounded_by_itself() -> None:
    world = limited(queue_max_per_flow=2)
    world.send()
    arrive(world, 2, flow="bulk", priority=4)
    arrive(world, 2, flow="other")
    assert refused(world.step(Arrived(world.new(flow="bulk", priority=-1)))) == [3]
    assert refused(world.step(Arrived(world.new(flow="bulk", priority=4)))) == [7]


def test_a_full_queue_sends_on_what_only_an_estimate_held_back_in_fair_order() -> None:
    world = patient(1, queue_max=2)
    for _ in range(BEHIND):
        world.send(prompt_tokens=LONG)
    arrive(world, 1, prompt_tokens=LONG, priority=1)
    (urgent,) = arrive(world, 1, prompt_tokens=LONG)
    commands = world.step(Arrived(world.new(prompt_tokens=LONG, priority=1)))
    assert (sent(commands), refused(commands)) == ([urgent], [])


def test_a_full_queue_sheds_what_an_estimate_held_back_if_told_so() -> None:
    world = patient(1, queue_max=1, overflow="shed")
    for _ in range(BEHIND):
        world.send(prompt_tokens=LONG)
    arrive(world, 1, prompt_tokens=LONG)
    assert codes(world.step(Arrived(world.new(prompt_tokens=LONG)))) == ["fleet_saturated"]


def test_the_limit_of_a_pool_counts_what_is_in_flight_anywhere_in_it() -> None:
    world = limited(4, in_flight_max_per_replica=None, in_flight_max=3)
    first = [world.send() for _ in range(3)]
    (held,) = arrive(world, 1)
    assert sent(finish(world, first[1].id, first[1].choices[0].slot)) == [held]


@pytest.mark.bug(106, 107)
def test_a_place_is_free_again_whichever_way_its_request_ends() -> None:
    world = limited(2)
    ends: list[Callable[[Dispatch], list[Command]]] = [
        lambda each: world.step(Cancelled(each.id, 0.0)),
        lambda each: world.fail(each, began=True),
        lambda each: finish(world, each.id, each.choices[0].slot),
    ]
    first, second = world.send(), world.send()
    for end in ends:
        left, stays = arrive(world, 2)
        assert world.step(Cancelled(RequestId(left), 0.0)) == []
        (first,) = (command for command in end(first) if isinstance(command, Dispatch))
        assert first.id == stays
    assert len(world.router._flow) == 0
    finish(world, first.id, first.choices[0].slot)
    finish(world, second.id, second.choices[0].slot)
    assert len({world.slot(), world.slot()}) == 2


def test_a_saturated_pool_does_not_hold_up_another() -> None:
    world = limited(1)
    pools = [*fleet([replica(0)]).pools, *fleet([replica(0)], pool="other").pools]
    world.step(FleetChanged(0.0, fleet([]).__class__(2, pools)))
    world.send()
    arrive(world, 20)
    assert world.slot(pool="other") == 0


def test_a_request_that_only_a_full_replica_serves_does_not_hold_up_other_flows() -> None:
    world = limited(2)
    pool = fleet([replica(0), replica(1, lacks=["adapter"])]).pools[0]
    models = {"m": None, "adapter": "adapter"}
    world.step(FleetChanged(0.0, fleet([]).__class__(2, [type(pool)("m", models, "exact", None, pool.replicas)])))
    assert world.slot(model="adapter", flow="a") == 0
    arrive(world, 2, model="adapter", flow="a")
    assert world.slot(flow="b") == 1


# -- cost


def calls(world: World, *events: Any) -> int:
    """Count the Python calls of one step."""
    count = 0

    def counted(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(counted)
    try:
        world.step(*events)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("flows", [1, 10_000])
def test_a_step_costs_the_same_whether_ten_or_ten_thousand_requests_wait(flows: int) -> None:
    def waiting(count: int) -> World:
        world = limited(queue_max=20_000, queue_timeout_s=1e6)
        world.send()
        world.step(*[Arrived(world.new(flow=str(number % flows))) for number in range(count)])
        world.pass_time(0.25)
        return world

    def events(world: World) -> list[list[Any]]:
        done = Finished(RequestId(1), world.now_s, replica(0).slot, 200, None, 5)
        return [[Tick(world.now_s)], [Arrived(world.new(flow="x"))], [Cancelled(RequestId(5), world.now_s)], [done]]

    few, many = waiting(10), waiting(10_000)
    for for_few, for_many in zip(events(few), events(many), strict=True):
        assert calls(many, *for_many) <= calls(few, *for_few) + 8


def test_gauges_tell_what_waits_by_band_how_long_and_why() -> None:
    gauges: dict[tuple[str, tuple[str, ...]], float] = {}

    class Board:
        def count(self, name: str, labels: tuple[str, ...], n: float) -> None:
            gauges[(name, labels)] = gauges.get((name, labels), 0) + n

        def observe(self, name: str, labels: tuple[str, ...], value: float) -> None:
            pass

        def set(self, name: str, labels: tuple[str, ...], value: float) -> None:
            gauges[(name, labels)] = value

    world = limited(queue_max=3)
    world.router._meter = Board()
    world.send()
    arrive(world, 2)
    world.pass_time(0.5)
    arrive(world, 1, priority=-2)
    world.step(Arrived(world.new(priority=1)))
    world.router.step([])
    assert {key: value for key, value in gauges.items() if key[0].startswith("warmfront_w")} == {
        ("warmfront_waiting_requests", ("m",)): 3,
        ("warmfront_waiting_band_requests", ("m", "0")): 2,
        ("warmfront_waiting_band_requests", ("m", "-2")): 1,
    }
    assert gauges[("warmfront_oldest_wait_seconds", ("m",))] == 0.5
    assert gauges[("warmfront_pool_requests", ("m",))] == 1
    assert gauges[("warmfront_held_total", ("m", "in_flight_limit"))] == 4
    assert gauges[("warmfront_shed_total", ("m", "fleet_saturated"))] == 1
    world.pass_time(1.0)
    gauges.clear()
    world.step(FleetChanged(world.now_s, FleetState(3, [])))
    world.router.step([])
    assert not any(labels[0] == "m" for (name, labels) in gauges if name != "warmfront_shed_total"), (
        "the core drops the series of a pool that is gone: whoever sets one brings it back"
    )


def test_without_requests_nothing_is_kept() -> None:
    world = limited(queue_max=50)
    for number in range(300):
        world.step(Arrived(request(10_000 + number, flow=f"flow-{number}")))
    for number in range(300):
        world.step(Cancelled(RequestId(10_000 + number), 0.0))
    queue = world.router._flow.queue("m")
    assert queue is not None
    assert (len(queue), queue.of_flow, queue.requests) == (0, {}, {})
    assert all(not band._lines and not band._turns and not band._fullest for band in queue._bands.values())
    assert len(world.router._flow._deadlines) < 300
    world.step(FleetChanged(0.0, FleetState(2, [])))
    assert world.router._flow.queue("m") is None
