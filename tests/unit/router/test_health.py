"""Circuits, pauses, slow start and standstill, through the router on virtual time."""

from __future__ import annotations

from typing import Any

import pytest
from support.routing import Notebook, World, codes, replica, request
from warmfront.config import HealthConfig, PolicyConfig, RetryConfig, RouterConfig
from warmfront.router.health import Health
from warmfront.types import (
    Cancelled,
    Deliver,
    Dispatch,
    EngineLoad,
    Failed,
    Finished,
    FirstToken,
    Moved,
    Paced,
    Slot,
    Standing,
    Tick,
    Usage,
)

HEALTH = HealthConfig(failures_in_a_row=3, open_s=2.0, slow_start_s=4.0, frozen_after_s=5.0)
ROTATING = PolicyConfig(name="round_robin")


def world(replicas: int = 3, *, health: HealthConfig = HEALTH, **changes: Any) -> World:
    return World(replicas, config=RouterConfig(policy=ROTATING, health=health, choices_max=1, **changes))


def standings(made: World) -> dict[int, str]:
    """Return how the admin API says that each replica stands."""
    (pool,) = made.ask("fleet")["pools"]
    return {row["slot"]: row["standing"] for row in pool["replicas"]}


def end(made: World, dispatch: Dispatch, status: int) -> None:
    """Let an answer of this status end in full."""
    usage = Usage(1600, None, 5) if status == 200 else None
    made.step(Finished(dispatch.id, made.now_s, dispatch.choices[0].slot, status, usage, 5))


def failing(made: World, slot: int, count: int, *, error: str = "broken") -> None:
    """Let requests to one replica fail for good; the others answer."""
    while count:
        dispatch = made.send(stream=False)
        if dispatch.choices[0].slot == slot:
            count -= 1
            made.step(Failed(dispatch.id, made.now_s, error, [Slot(slot)], True, None, None, True))
        else:
            end(made, dispatch, 200)


def chosen(made: World, count: int) -> set[int]:
    """Return where so many requests go, each answered at once."""
    slots = set()
    for _ in range(count):
        dispatch = made.send(stream=False)
        slots.add(int(dispatch.choices[0].slot))
        end(made, dispatch, 200)
    return slots


@pytest.mark.bug(117)
def test_failures_in_a_row_open_the_circuit_of_that_replica_alone() -> None:
    made = world()
    failing(made, 1, 2)
    assert chosen(made, 6) == {0, 1, 2}, "a success between them starts the row anew"
    failing(made, 1, 3)
    assert chosen(made, 6) == {0, 2}
    assert standings(made) == {0: "serving", 1: "open", 2: "serving"}


@pytest.mark.bug(115)
def test_client_errors_and_refusals_never_open_a_circuit() -> None:
    made = world()
    for status in [400, 404, 422, 429, 503] * 20:
        end(made, made.send(stream=False), status)
        made.now_s += 2.0
    assert "open" not in standings(made).values()


@pytest.mark.bug(118)
def test_one_request_at_a_time_probes_a_replica_and_the_time_it_is_left_alone_doubles() -> None:
    made = world(2)
    failing(made, 1, 3)
    for open_s in (2.0, 4.0, 8.0):
        made.now_s += open_s - 0.01
        assert chosen(made, 4) == {0}
        made.now_s += 0.01
        flights = [made.send(stream=False) for _ in range(6)]
        probes = [each for each in flights if each.choices[0].slot == 1]
        assert len(probes) == 1
        made.step(Failed(probes[0].id, made.now_s, "broken", [Slot(1)], True, None, None, True))
        for each in flights:
            if each is not probes[0]:
                end(made, each, 200)
    made.now_s += 16.0
    assert chosen(made, 4) == {0, 1}
    assert standings(made)[1] == "slow_start"
    made.now_s += 4.0
    made.step(Tick(made.now_s))
    assert standings(made) == {0: "serving", 1: "serving"}


def test_a_probe_that_the_client_ends_or_spoils_makes_room_for_the_next() -> None:
    made = world(2)
    failing(made, 1, 3)
    made.now_s += 2.0
    probe = next(each for each in (made.send(stream=False) for _ in range(2)) if each.choices[0].slot == 1)
    end(made, probe, 400)
    assert standings(made)[1] == "half_open"
    assert chosen(made, 2) == {0, 1}


@pytest.mark.bug(185)
def test_half_of_the_fleet_stays_whatever_fails_and_the_last_replica_always() -> None:
    made = world(4)
    for slot in range(4):
        failing(made, slot, 3)
        if slot == 1:
            assert chosen(made, 8) == {2, 3}
    dispatches = [made.send(stream=False) for _ in range(8)]
    assert {each.choices[0].slot for each in dispatches} == {2, 3}
    alone = world(1)
    failing(alone, 0, 10)
    assert chosen(alone, 2) == {0}


def test_a_replica_that_is_not_ready_takes_nobody_elses_place_among_those_taken_away() -> None:
    made = world(3)
    gone = []
    while len(gone) < 3:
        dispatch = made.send(stream=False)
        if dispatch.choices[0].slot == 2:
            gone.append(dispatch)
        else:
            end(made, dispatch, 200)
    made.set_fleet([replica(0), replica(1), replica(2, ready=False)])
    for dispatch in gone:
        made.step(Failed(dispatch.id, made.now_s, "broken", [Slot(2)], True, None, None, True))
    made.now_s += 0.1
    failing(made, 0, 3)
    assert standings(made)[0] == "open"
    assert chosen(made, 4) == {1}


def test_the_core_is_told_once_of_each_change() -> None:
    made = world(2)
    told = []
    for _ in range(40):
        dispatch = made.send(stream=False)
        slot = dispatch.choices[0].slot
        if slot == 1:
            commands = made.step(Failed(dispatch.id, made.now_s, "broken", [slot], True, None, None, True))
        else:
            commands = made.step(Finished(dispatch.id, made.now_s, slot, 200, None, 1))
        told += [command for command in commands if isinstance(command, Standing)]
        if told:
            break
    assert told == [Standing("m", [(Slot(1), "open", "broken")])]
    assert made.step(Tick(made.now_s)) == []


def test_a_replica_that_refuses_is_left_alone_for_as_long_as_it_asks() -> None:
    made = world(2)
    dispatch = made.send(stream=False)
    slot = dispatch.choices[0].slot
    refusal = Failed(dispatch.id, made.now_s, "rejected", [slot], False, 429, 7.0, False)
    again = made.step(refusal)[0]
    assert isinstance(again, Dispatch)
    assert again.choices[0].slot != slot
    end(made, again, 200)
    made.now_s += 6.9
    assert slot not in chosen(made, 4)
    made.now_s += 0.1
    assert chosen(made, 4) == {0, 1}


@pytest.mark.bug(189)
def test_a_fleet_that_refuses_as_a_whole_still_gets_requests_and_its_refusals_pass_to_clients() -> None:
    made = world(2)
    for _ in range(4):
        commands: list[Any] = [made.send(stream=False)]
        tried: list[Slot] = []
        while isinstance(commands[0], Dispatch):
            tried.append(commands[0].choices[0].slot)
            commands = made.step(Failed(commands[0].id, made.now_s, "rejected", tried, False, 503, None, False))
        assert isinstance(commands[0], Deliver)


def test_a_request_that_may_have_been_worked_on_goes_elsewhere_only_where_that_is_configured() -> None:
    failure = ("server_error", [Slot(0)], False, 500, None, True)
    strict = world(2)
    dispatch = strict.send()
    assert codes(strict.step(Failed(dispatch.id, 0.0, *failure))) == ["deliver"]
    loose = world(2, retries=RetryConfig(after_accept=True))
    dispatch = loose.send()
    error, _, began, status, retry_after_s, accepted = failure
    tried = [dispatch.choices[0].slot]
    (again,) = loose.step(Failed(dispatch.id, 0.0, error, tried, began, status, retry_after_s, accepted))
    assert isinstance(again, Dispatch)
    assert again.choices[0].slot not in tried


@pytest.mark.bug(117)
def test_retries_stay_within_a_share_of_all_requests_and_a_floor() -> None:
    made = world(2, retries=RetryConfig(budget_share=0.1, budget_min_per_s=0.5), health=HealthConfig(pause_s=0.0))
    outcomes = []
    for _ in range(2000):
        dispatch = made.send(stream=False)
        slot = dispatch.choices[0].slot
        (answer, *_) = made.step(Failed(dispatch.id, made.now_s, "rejected", [slot], False, 503, None, False))
        outcomes.append(isinstance(answer, Dispatch))
        if isinstance(answer, Dispatch):
            end(made, answer, 200)
        made.now_s += 0.01
    spent = sum(outcomes)
    assert 100 + 190 <= spent <= 100 + 0.1 * 2000 + 0.5 * 20 + 1, spent
    assert sum(outcomes[1500:]) == pytest.approx(0.1 * 500 + 0.5 * 5, abs=3)


@pytest.mark.bug(119, 113)
def test_connect_failures_need_no_budget_and_never_return_to_a_tried_replica() -> None:
    config = RouterConfig(
        retries_max=2, choices_max=1, retries=RetryConfig(0.0, 0.0), health=HealthConfig(ejected_share_max=0.0)
    )
    made = World(3, config=config)
    for _ in range(50):
        command: Any = made.send(stream=False)
        tried: list[Slot] = []
        while isinstance(command, Dispatch):
            assert command.choices[0].slot not in tried
            tried.append(command.choices[0].slot)
            command = made.step(Failed(command.id, made.now_s, "connect", list(tried), False))[0]
        assert isinstance(command, Deliver)
        assert len(tried) == 3


def test_a_choice_that_could_not_be_reached_counts_against_its_replica() -> None:
    made = World(3, config=RouterConfig(policy=ROTATING, health=HEALTH))
    count = 0
    while count < 3:
        dispatch = made.send(stream=False)
        first, second, *_ = [choice.slot for choice in dispatch.choices]
        if first == 0:
            made.step(Moved(dispatch.id, made.now_s, second))
            count += 1
        slot = second if first == 0 else first
        made.step(Finished(dispatch.id, made.now_s, slot, 200, None, 1))
    assert standings(made)[0] == "open"


def test_a_replica_that_joins_a_running_fleet_grows_to_its_share() -> None:
    made = world(2)
    held = [made.send(stream=False) for _ in range(16)]
    made.set_fleet([replica(slot) for slot in range(3)])
    new = [made.send(stream=False).choices[0].slot for _ in range(12)]
    assert new.count(Slot(2)) == 1
    made.now_s += 2.0
    new = [made.send(stream=False).choices[0].slot for _ in range(30)]
    assert 4 <= new.count(Slot(2)) < 15
    made.now_s += 3.0
    new = [made.send(stream=False).choices[0].slot for _ in range(30)]
    assert new.count(Slot(2)) == 10
    assert held


def test_a_request_that_failed_elsewhere_goes_to_a_replica_in_slow_start_though_it_has_its_share() -> None:
    made = world(1)
    first = made.send(stream=False)
    made.set_fleet([replica(0), replica(1)])
    made.now_s += 0.1
    assert [made.send(stream=False).choices[0].slot for _ in range(3)] == [1, 0, 0]
    (again,) = made.step(Failed(first.id, made.now_s, "connect", [Slot(0)], False))
    assert isinstance(again, Dispatch)
    assert again.choices[0].slot == 1


def test_the_first_fleet_is_in_full_service_at_once() -> None:
    assert set(standings(world(3)).values()) == {"serving"}


def learn(made: World) -> None:
    """Let the speed of prefill be known."""
    for _ in range(8):
        made.serve(first_token_s=0.1, duration_s=0.2)


def stream(made: World, slot: int) -> Dispatch:
    """Send a stream to one replica."""
    while (dispatch := made.send()).choices[0].slot != slot:
        made.first_token(dispatch)
        made.finish(dispatch)
    return dispatch


def pass_slowly(made: World, seconds: float, *, moving: list[int]) -> None:
    """Let time pass as the core tells it, while these replicas' streams move."""
    until_s = made.now_s + seconds
    while made.now_s < until_s:
        made.now_s += 0.25
        rows = [Slot(slot) for slot in moving]
        made.step(Paced(made.now_s, "m", rows, [5] * len(rows), [0.25] * len(rows)), Tick(made.now_s))


@pytest.mark.bug(121)
def test_an_engine_whose_streams_stand_still_is_noticed_in_seconds_and_any_token_brings_it_back() -> None:
    made = world(2)
    learn(made)
    frozen, moving = stream(made, 0), stream(made, 1)
    made.step(FirstToken(frozen.id, made.now_s, Slot(0)), FirstToken(moving.id, made.now_s, Slot(1)))
    pass_slowly(made, 4.5, moving=[1])
    assert standings(made) == {0: "serving", 1: "serving"}
    pass_slowly(made, 1.0, moving=[1])
    assert standings(made)[0] == "open"
    assert chosen(made, 4) == {1}
    pass_slowly(made, 0.25, moving=[0, 1])
    assert standings(made)[0] == "slow_start"


def pass_with_reports(made: World, seconds: float, *, working: list[int], age_s: float | None = 0.1) -> None:
    """Let time pass while engines are asked for their metrics every second, and the counters of these move."""
    until_s = made.now_s + seconds
    while made.now_s < until_s:
        pass_slowly(made, 1.0, moving=[])
        loads = {
            slot: EngineLoad()
            if age_s is None
            else EngineLoad(age_s=age_s + 1e-6 * made.now_s, worked_tokens=made.now_s if slot in working else 7.0)
            for slot in (0, 1)
        }
        made.set_fleet([replica(slot, load=load) for slot, load in loads.items()])


def plain(made: World, slot: int) -> Dispatch:
    """Send requests without a stream until one goes to a replica; the others are answered."""
    while (dispatch := made.send(stream=False)).choices[0].slot != slot:
        end(made, dispatch, 200)
    return dispatch


@pytest.mark.bug(121)
def test_an_engine_without_streams_is_noticed_by_its_counters_and_serves_again_once_they_move() -> None:
    made = world(2)
    learn(made)
    plain(made, 0)
    pass_with_reports(made, 14.0, working=[])
    assert standings(made) == {0: "serving", 1: "serving"}
    pass_with_reports(made, 3.0, working=[])
    assert standings(made) == {0: "open", 1: "serving"}
    pass_with_reports(made, 100.0, working=[])
    assert chosen(made, 4) == {1}, "nobody else waits there"
    pass_with_reports(made, 1.0, working=[0])
    assert standings(made)[0] == "slow_start"


def test_a_long_answer_without_a_stream_is_no_standstill_while_counters_move() -> None:
    made = world(2)
    learn(made)
    plain(made, 0)
    pass_with_reports(made, 300.0, working=[0])
    assert standings(made) == {0: "serving", 1: "serving"}


@pytest.mark.parametrize("age_s", [None, 6.0])
def test_nobody_without_streams_is_frozen_whose_counters_are_not_known_or_old(age_s: float | None) -> None:
    made = world(2)
    learn(made)
    plain(made, 0)
    pass_with_reports(made, 300.0, working=[], age_s=age_s)
    assert standings(made) == {0: "serving", 1: "serving"}


def test_answers_of_an_engine_show_that_it_works_though_its_counters_stand_still() -> None:
    made = world(2)
    learn(made)
    plain(made, 0)
    for _ in range(10):
        pass_with_reports(made, 10.0, working=[])
        end(made, plain(made, 0), 200)
    assert standings(made) == {0: "serving", 1: "serving"}


@pytest.mark.bug(121)
def test_an_engine_that_never_sends_a_first_token_is_noticed_and_nobody_else_waits_there() -> None:
    made = world(2)
    learn(made)
    stuck = stream(made, 0)
    pass_slowly(made, 5.5, moving=[])
    assert standings(made) == {0: "open", 1: "serving"}
    pass_slowly(made, 100.0, moving=[1])
    assert chosen(made, 6) == {1}
    made.step(Cancelled(stuck.id, made.now_s))
    assert chosen(made, 6) == {0, 1}, "with nothing left there only a new request can tell"


def test_a_pool_that_goes_takes_what_was_said_of_its_replicas_with_it() -> None:
    made = world(2)
    failing(made, 1, 3)
    assert made.set_fleet([replica(0)], pool="other") == [Standing("m", [])]


def test_a_long_prefill_is_no_standstill() -> None:
    made = world(2)
    learn(made)
    while made.send(prompt_tokens=400_000).choices[0].slot != 0:
        pass
    pass_slowly(made, 8.0, moving=[1])
    assert standings(made)[0] == "serving"


def test_nobody_is_frozen_when_all_stand_still_or_when_the_router_itself_did() -> None:
    made = world(2)
    learn(made)
    stream(made, 0)
    stream(made, 1)
    pass_slowly(made, 8.0, moving=[])
    assert set(standings(made).values()) == {"serving"}
    pass_slowly(made, 1.0, moving=[0, 1])
    made.now_s += 300.0
    made.step(Paced(made.now_s, "m", [Slot(1)], [1], [0.1]))
    assert set(standings(made).values()) == {"serving"}


def test_the_only_replica_with_a_models_adapter_serves_it_whatever_its_circuit_says() -> None:
    made = World(0, config=RouterConfig(policy=ROTATING, health=HEALTH, choices_max=1))
    made.set_fleet([replica(0, lacks=["lora"]), replica(1), replica(2, lacks=["lora"])])
    failing(made, 1, 3)
    assert standings(made)[1] == "open"
    assert chosen(made, 4) == {0, 2}
    assert made.send(model="lora", adapter="lora").choices[0].slot == 1


def test_a_failure_that_nobody_else_can_make_good_costs_no_budget_and_is_counted_as_such() -> None:
    meter, alone = Notebook(), world(1)
    alone.router._meter = meter
    before = alone.router._retries._tokens
    dispatch = alone.send(stream=False)
    commands = alone.step(Failed(dispatch.id, alone.now_s, "rejected", [Slot(0)], False, 503, None, False))
    assert codes(commands) == ["deliver"]
    assert meter.counts["warmfront_retries_total", ("rejected", "no_replica")] == 1
    assert alone.router._retries._tokens >= before


def test_the_rows_that_may_be_chosen_are_found_by_looking_at_those_that_are_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [Slot(slot) for slot in range(500)]
    health = Health(HealthConfig())
    health.follow(rows, [], 0.0)
    health.sent(rows[0], request(1), 0.0)
    health.follow(rows, [Slot(7)], 1.0)
    looked: list[Slot] = []
    is_slow = Health.is_slow

    def noted(self: Health, slot: Slot, now_s: float) -> bool:
        looked.append(slot)
        return is_slow(self, slot, now_s)

    monkeypatch.setattr(Health, "is_slow", noted)
    assert health.admitted([1] * 500, 1.0) == [*rows[:7], *rows[8:]], "it comes back slowly"
    assert set(looked) == {7}


def test_the_admitted_rows_are_not_listed_anew_at_each_event() -> None:
    health = Health(HEALTH)
    rows = [Slot(slot) for slot in range(4)]
    health.follow(rows, rows, 0.0)
    health.refused(Slot(1), None, 0.0)
    admitted = health.admitted([0, 0, 0, 0], 0.0)
    assert admitted == [0, 2, 3]
    assert health.admitted([3, 0, 0, 1], 0.0) is admitted
    health.follow(rows[:3], [], 0.0)
    assert health.admitted([3, 0, 0, 1], 0.0) == [0, 2]
