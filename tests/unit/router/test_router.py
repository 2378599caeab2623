from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from support.routing import Notebook, PlainIndex, World, codes, fleet, replica, request
from warmfront.config import Config, FlowConfig, PolicyConfig, RouterConfig
from warmfront.policy import registry
from warmfront.policy.base import Fleet
from warmfront.router import Router
from warmfront.types import (
    Answered,
    Arrived,
    Asked,
    Cancelled,
    Choice,
    ConfigChanged,
    Dispatch,
    Failed,
    Finished,
    FleetChanged,
    FleetState,
    Moved,
    Overlap,
    Paced,
    Request,
    RequestId,
    Shed,
    Slot,
    Stopping,
    Usage,
)


def test_a_pool_that_nobody_serves_is_refused_at_once() -> None:
    shed = World(1).arrive(pool="elsewhere")
    assert isinstance(shed, Shed)
    assert shed.code == "no_ready_replica"
    assert shed.retry_after_s is not None


def test_requests_wait_while_nothing_is_ready_and_go_in_order_when_something_is() -> None:
    world = World(0)
    requests = [world.new() for _ in range(5)]
    assert world.step(*[Arrived(each) for each in requests]) == []
    commands = world.set_fleet([replica(0), replica(1)])
    assert [command.id for command in commands] == [each.id for each in requests]


@pytest.mark.bug(141)
def test_a_request_that_waited_for_a_ready_replica_in_vain_is_told_so_and_when_to_come_back() -> None:
    world = World(0, flow=FlowConfig(queue_timeout_s=5.0))
    assert world.step(Arrived(world.new())) == []
    assert world.pass_time(4.9) == []
    (shed,) = world.pass_time(0.2)
    assert codes([shed]) == ["no_ready_replica"]
    assert isinstance(shed, Shed)
    assert shed.retry_after_s is not None
    assert 1.0 <= shed.retry_after_s <= 5.0


def test_the_newest_beyond_the_bound_are_shed() -> None:
    world = World(0, flow=FlowConfig(queue_max=2))
    commands = world.step(*[Arrived(world.new()) for _ in range(4)])
    assert [(command.id, command.code) for command in commands if isinstance(command, Shed)] == [
        (4, "fleet_saturated"),
        (3, "fleet_saturated"),
    ]


def test_without_a_queue_nobody_waits() -> None:
    world = World(0, flow=FlowConfig(queue_max=0))
    assert codes(world.step(Arrived(world.new()))) == ["no_ready_replica"]


def test_one_pool_without_replicas_does_not_block_another() -> None:
    world = World(2, flow=FlowConfig(queue_max=1))
    pools = [*fleet([replica(0)]).pools, *fleet([], pool="empty").pools]
    world.step(FleetChanged(0.0, FleetState(2, pools)))
    commands = world.step(*[Arrived(world.new(pool=pool)) for pool in ("empty", "empty", "m", "empty", "m")])
    assert [command.id for command in commands if isinstance(command, Dispatch)] == [3, 5]
    assert codes(commands) == ["fleet_saturated", "fleet_saturated"]


def test_requests_of_a_pool_that_disappears_are_refused() -> None:
    world = World(0)
    world.step(Arrived(world.new()))
    assert codes(world.step(FleetChanged(1.0, FleetState(2, [])))) == ["no_ready_replica"]


def test_a_client_that_leaves_the_queue_gets_no_command() -> None:
    world = World(0)
    made = world.new()
    world.step(Arrived(made))
    assert world.step(Cancelled(made.id, 0.0)) == []
    assert world.set_fleet([replica(0)]) == []


def test_arrival_and_departure_in_one_batch_give_no_command() -> None:
    world = World(2)
    made = world.new()
    assert world.step(Arrived(made), Cancelled(made.id, 0.0)) == []


@pytest.mark.bug(6)
def test_decisions_of_one_batch_see_one_another() -> None:
    world = World(4)
    commands = world.step(*[Arrived(world.new()) for _ in range(4)])
    assert sorted(command.choices[0].slot for command in commands if isinstance(command, Dispatch)) == [0, 1, 2, 3]


@pytest.mark.bug(113, 119)
def test_a_request_that_reached_nobody_is_tried_once_more_elsewhere() -> None:
    world = World(2, config=RouterConfig(choices_max=1))
    first = world.send()
    (again,) = world.fail(first)
    assert isinstance(again, Dispatch)
    assert again.reason == "retry"
    assert again.choices[0].slot != first.choices[0].slot
    assert codes(world.fail(again)) == ["deliver"]


def test_a_request_whose_replica_left_waits_for_another_one_in_the_same_slot() -> None:
    world = World(1, config=RouterConfig(retries_max=0))
    dispatch = world.send()
    world.set_fleet([])
    assert world.step(Failed(dispatch.id, 0.0, "left", [], False)) == []
    again, *_ = world.set_fleet([replica(0, id="http://10.0.0.9:8000")])
    assert isinstance(again, Dispatch)
    assert (again.id, again.choices[0].slot, again.reason == "retry") == (dispatch.id, 0, False)
    assert rows(world)[0]["standing"] == "slow_start", "no failure of the one that is new there"


def test_a_request_whose_replica_left_with_its_pool_is_told_so() -> None:
    world = World(1)
    dispatch = world.send()
    world.step(FleetChanged(0.0, FleetState(2, [])))
    assert codes(world.step(Failed(dispatch.id, 0.0, "left", [], False))) == ["no_ready_replica"]


def test_a_request_that_all_replicas_refused_is_not_tried_again() -> None:
    world = World(2)
    assert codes(world.fail(world.send())) == ["deliver"]


def test_a_request_that_began_is_never_tried_again() -> None:
    world = World(2, config=RouterConfig(choices_max=1))
    assert world.fail(world.send(), began=True) == []


@pytest.mark.bug(13)
def test_a_moved_request_is_charged_to_its_new_replica() -> None:
    world = World(3)
    dispatch = world.send()
    first, second = dispatch.choices[0].slot, dispatch.choices[1].slot
    world.step(Moved(dispatch.id, 0.0, second))
    in_flight = {row["slot"]: row["in_flight"] for row in rows(world)}
    assert in_flight[first] == 0
    assert in_flight[second] == 1


def test_work_in_flight_at_a_replica_that_left_is_not_charged_to_its_successor() -> None:
    world = World(1)
    dispatch = world.send()
    world.set_fleet([replica(0, id="http://10.0.0.9:8000")])
    assert rows(world)[0]["in_flight"] == 0
    world.finish(dispatch)
    assert rows(world)[0]["in_flight"] == 0
    assert rows(world)[0]["accuracy"]["answers"] == 0


@pytest.mark.bug(6)
def test_prefill_is_charged_until_the_first_token_and_the_rest_until_the_end() -> None:
    world = World(1)
    dispatch = world.send()
    assert rows(world)[0]["pending_tokens"] == 1600
    world.first_token(dispatch)
    assert rows(world)[0]["pending_tokens"] == rows(world)[0]["pending_s"] == 0
    assert rows(world)[0]["in_flight"] == 1
    world.finish(dispatch)
    assert rows(world)[0]["in_flight"] == rows(world)[0]["context_tokens"] == 0


def test_prefill_of_an_answer_that_does_not_stream_is_released_when_it_is_due() -> None:
    world = World(1)
    world.send(stream=False)
    world.pass_time(0.1)
    assert rows(world)[0]["pending_requests"] == 1
    world.pass_time(0.2)
    assert rows(world)[0]["pending_requests"] == 0


def test_decode_speed_is_learned_from_paced_streams() -> None:
    world = World(1)
    dispatches = [world.send() for _ in range(4)]
    for dispatch in dispatches:
        world.first_token(dispatch)
    for _ in range(100):
        world.now_s += 0.25
        world.step(Paced(world.now_s, "m", [Slot(0)], [40], [40 * 0.08]))
    row = rows(world)[0]
    step_s = row["decode_base_s"] + row["decode_request_s"] * 4 + row["decode_token_s"] * row["context_tokens"]
    assert step_s == pytest.approx(0.08, rel=0.05)


def test_nonsense_about_strangers_is_counted_and_changes_nothing() -> None:
    world = World(1)
    stranger = RequestId(999)
    assert world.step(Cancelled(stranger, 0.0), Finished(stranger, 0.0, Slot(7), 200, None, 0)) == []
    assert world.ask("fleet")["stray_events"] == {"cancelled": 1, "finished": 1}


@pytest.mark.bug(11)
def test_an_end_that_comes_twice_discharges_once() -> None:
    world = World(1)
    kept, ended = world.send(), world.send()
    world.finish(ended)
    world.finish(ended)
    assert rows(world)[0]["in_flight"] == 1
    world.finish(kept)


def test_a_request_whose_prompt_the_core_dropped_is_placed_by_load() -> None:
    world = World(2)
    made = world.new()
    world.index.unknown.add(made.id)
    (command,) = world.step(Arrived(made))
    assert isinstance(command, Dispatch)
    assert world.ask("fleet")["stray_events"] == {"overlap": 1}


def test_nothing_waits_beyond_the_grace_time() -> None:
    world = World(0)
    assert world.step(Arrived(world.new()), Stopping(0.0, 2.0)) == []
    assert codes(world.pass_time(2.1)) == ["no_ready_replica"]


class Broken:
    """A policy that raises."""

    def __init__(self, config: PolicyConfig) -> None:
        del config

    def choose(self, request: Request, overlap: Overlap, fleet: Fleet) -> Sequence[Choice]:
        raise RuntimeError("no idea")


class Stray(Broken):
    """A policy that names a replica that is not ready."""

    def choose(self, request: Request, overlap: Overlap, fleet: Fleet) -> Sequence[Choice]:
        return [Choice(Slot(17), 0)]


class Patient(Broken):
    """A policy that holds everything."""

    def choose(self, request: Request, overlap: Overlap, fleet: Fleet) -> Sequence[Choice]:
        return []


def with_policy(monkeypatch: pytest.MonkeyPatch, policy: type[Broken]) -> World:
    monkeypatch.setitem(registry.BUILTIN, "plugged", f"{__name__}:{policy.__name__}")
    return World(2, policy=PolicyConfig(name="plugged"))


@pytest.mark.parametrize("policy", [Broken, Stray])
def test_a_policy_that_fails_is_replaced_by_the_least_loaded_replica(
    monkeypatch: pytest.MonkeyPatch, policy: type[Broken], caplog: pytest.LogCaptureFixture
) -> None:
    world = with_policy(monkeypatch, policy)
    dispatches = [world.send() for _ in range(4)]
    assert {dispatch.reason for dispatch in dispatches} == {"policy_error"}
    assert sorted(dispatch.choices[0].slot for dispatch in dispatches) == [0, 0, 1, 1]
    assert world.ask("fleet")["policy_errors"] == 4
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 3


def test_a_policy_may_hold_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    world = with_policy(monkeypatch, Patient)
    assert world.step(Arrived(world.new())) == []
    assert codes(world.pass_time(31.0)) == ["queue_timeout"]


def test_another_policy_takes_over_and_what_was_learned_stays() -> None:
    world = World(2)
    for _ in range(5):
        world.serve()
    world.router._pools["m"].fleet.learned.output_tokens = 77.0
    changed = Config(router=replace(world.config, policy=PolicyConfig(name="round_robin")))
    world.step(ConfigChanged(world.now_s, msgspec.json.encode(changed)))
    assert world.ask("policy")["name"] == "round_robin"
    assert world.ask("policy")["learned"]["m"]["output_tokens"] == 77.0
    first, second, third = world.slot(), world.slot(), world.slot()
    assert first == third != second


@pytest.mark.parametrize("config", [b"{", b'{"router": {"policy": {"name": "gone"}, "flow": {"queue_max": 0}}}'])
def test_a_configuration_that_cannot_be_used_changes_nothing(config: bytes, caplog: pytest.LogCaptureFixture) -> None:
    world = World(2)
    world.step(ConfigChanged(0.0, config))
    assert world.ask("policy")["name"] == "marginal_cost"
    assert "cannot be used" in caplog.text


def test_questions_without_an_answer_say_why() -> None:
    world = World(1)
    for question, asked, status in (
        ("weather", None, 404),
        ("explain", None, 400),
        ("explain", world.new(pool="elsewhere"), 404),
    ):
        (answer,) = world.step(Asked(RequestId(5), 0.0, question, asked, b""))
        assert isinstance(answer, Answered)
        assert answer.status == status
        assert "error" in json.loads(answer.body)


def test_explaining_shows_overlap_by_tier_and_replicas_that_are_not_ready() -> None:
    world = World(2)
    first, second = world.states()
    world.set_fleet([first, replace(second, replica=replace(second.replica, ready=False))])
    world.index.held[(0, 5)] = 320
    world.index.host[(0, 5)] = 640
    explained = world.ask("explain", world.new(prefix_key=5))
    assert explained["replicas"][0]["overlap"] == {
        "device": 320,
        "confirmed": 320,
        "host": 640,
        "disk": 640,
        "active": 0,
    }
    assert explained["replicas"][1]["ready"] is False
    assert explained["replicas"][1]["total"] is None
    assert explained["reason"] == "warm"
    assert {term["unit"] for term in explained["replicas"][0]["terms"]} == {"s"}


def test_explaining_when_nothing_is_ready_says_that_the_request_would_wait() -> None:
    explained = World(0).ask("explain", request(1))
    assert explained["choice"] is None
    assert explained["reason"] == "no_ready_replica"


def test_starvation_is_said_once_and_its_end_once(caplog: pytest.LogCaptureFixture) -> None:
    world = World(0)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            world.step(Arrived(world.new()))
        world.set_fleet([replica(0)])
    assert [record.getMessage() for record in caplog.records] == [
        "pool m: no replica is ready; requests wait",
        "pool m: a replica is ready again",
    ]


@pytest.mark.bug(9, 134, 142)
def test_metrics_follow_the_ledger_down_to_zero_and_say_nothing_of_who_left() -> None:
    meter, index = Notebook(), PlainIndex()
    index.slots = 1
    router = Router(RouterConfig(), index, meter=meter)
    name = ("http://10.0.0.0:8000",)
    router.step([FleetChanged(0.0, fleet([replica(0)])), Arrived(request(1))])
    assert meter.gauges[("warmfront_replica_requests", name)] == 1
    assert meter.gauges[("warmfront_replica_prefill_tokens", name)] == 1600
    router.step([Finished(RequestId(1), 1.0, Slot(0), 200, Usage(1600, 32, 5), 5)])
    assert meter.gauges[("warmfront_replica_requests", name)] == 0
    assert meter.counts[("warmfront_reported_cached_tokens_total", name)] == 32
    assert ("warmfront_cached_tokens_error", 32) in meter.seen
    meter.gauges.clear()
    router.step([FleetChanged(2.0, fleet([]))])
    assert [labels for _, labels in meter.gauges if labels == name] == [], "the core drops what belonged to it"
    router.step([Arrived(request(2))])
    router.step([])
    assert meter.gauges[("warmfront_waiting_requests", ("m",))] == 1


def test_gauges_wait_a_moment_while_events_come_and_end_right_when_none_do() -> None:
    meter, index = Notebook(), PlainIndex()
    index.slots = 1
    router = Router(RouterConfig(), index, meter=meter)
    name = (replica(0).replica.id,)
    router.step([FleetChanged(0.0, fleet([replica(0)])), Arrived(request(1))])
    router.step([Arrived(request(2, time_s=0.01))])
    assert meter.gauges[("warmfront_replica_requests", name)] == 1
    router.step([Arrived(request(3, time_s=0.2))])
    assert meter.gauges[("warmfront_replica_requests", name)] == 3
    for number in (1, 2, 3):
        router.step([Cancelled(RequestId(number), 0.21)])
    router.step([])
    assert meter.gauges[("warmfront_replica_requests", name)] == 0


def rows(world: World) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = world.ask("fleet")["pools"][0]["replicas"]
    return found
