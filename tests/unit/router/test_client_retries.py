"""A client that tries again what failed is kept away from where it failed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.routing import EAGER, World, request
from warmfront.config import RetryConfig, RouterConfig
from warmfront.router.failures import PROMPTS_MAX, Failures
from warmfront.types import Cancelled, Deliver, Dispatch, Failed, Finished, Slot

PROMPT: dict[str, Any] = {"prefix_key": 77, "prompt_tokens": 1600}


def world(replicas: int = 3, **retries: Any) -> World:
    config = RouterConfig(flow=EAGER, choices_max=1, retries_max=0, retries=RetryConfig(**retries))
    made = World(replicas, config=config)
    made.index.held[(1, 77)] = 1600
    return made


def fail(made: World, *, began: bool = False, **changes: Any) -> int:
    """Let the prompt fail where it goes, and tell where that was."""
    dispatch = made.send(**{**PROMPT, **changes})
    slot = dispatch.choices[0].slot
    commands = made.step(Failed(dispatch.id, made.now_s, "server_error", [slot], began, 500, None, True))
    assert [type(command) for command in commands] == ([] if began else [Deliver])
    return slot


@pytest.mark.parametrize("began", [False, True])
def test_what_failed_at_its_warm_replica_goes_elsewhere_when_it_comes_again(began: bool) -> None:
    made = world()
    assert fail(made, began=began) == 1
    again = made.send(**PROMPT)
    assert again.choices[0].slot != 1
    assert again.reason == "retry"


def test_an_error_that_an_engine_answers_with_is_a_failure_too() -> None:
    made = world()
    dispatch = made.send(**PROMPT)
    made.step(Finished(dispatch.id, made.now_s, dispatch.choices[0].slot, 500, None, 0))
    assert made.slot(**PROMPT) != dispatch.choices[0].slot == 1


@pytest.mark.parametrize("status", [200, 400, 422])
def test_an_answer_or_a_clients_own_error_is_none(status: int) -> None:
    made = world()
    dispatch = made.send(**PROMPT)
    made.step(Finished(dispatch.id, made.now_s, dispatch.choices[0].slot, status, None, 0))
    assert made.slot(**PROMPT) == 1


def test_a_client_that_left_says_nothing_of_the_replica() -> None:
    made = world()
    dispatch = made.send(**PROMPT)
    made.now_s += 30.0
    made.step(Cancelled(dispatch.id, made.now_s))
    assert made.slot(**PROMPT) == 1


@pytest.mark.parametrize("other", [{"prompt_tokens": 1616}, {"flow": "other"}, {"turn": 1}])
def test_another_prompt_with_the_same_beginning_goes_where_it_is_warm(other: dict[str, Any]) -> None:
    made = world()
    fail(made)
    assert made.slot(**{**PROMPT, **other}) == 1


def test_after_a_while_it_may_go_back() -> None:
    made = world(remember_s=5.0)
    fail(made)
    made.pass_time(4.0)
    assert made.slot(**PROMPT) != 1
    made.pass_time(2.0)
    made.index.held[(1, 77)] = 16_000
    made.index.held[(0, 77)] = made.index.held[(2, 77)] = 0
    assert made.slot(**PROMPT) == 1


def test_nothing_is_remembered_where_that_is_switched_off() -> None:
    made = world(remember_s=0.0)
    fail(made)
    assert made.slot(**PROMPT) == 1


def test_what_failed_everywhere_may_go_anywhere() -> None:
    made = world(replicas=2)
    assert {fail(made), fail(made)} == {0, 1}
    assert isinstance(made.arrive(**PROMPT), Dispatch)


def test_another_replica_in_the_slot_has_not_failed() -> None:
    failures = Failures()
    failures.note(request(1, **PROMPT), ["http://a"], 0.0, kept_s=10.0)
    assert failures.of(request(2, **PROMPT), 1.0, kept_s=10.0) == {"http://a"}
    assert world().router._pools["m"].slots_of({"http://a"}) == []
    assert world().router._pools["m"].slots_of({"http://10.0.0.2:8000"}) == [2]


def test_no_more_prompts_are_remembered_than_the_bound() -> None:
    failures = Failures()
    for number in range(PROMPTS_MAX + 10):
        failures.note(request(number, prefix_key=number), ["http://a"], float(number), kept_s=1e9)
    assert len(failures._failed) == PROMPTS_MAX
    assert failures.of(request(1, prefix_key=9), 1e4, kept_s=1e9) == frozenset()
    assert failures.of(request(1, prefix_key=10), 1e4, kept_s=1e9) == {"http://a"}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(draw=st.data())
def test_a_prompt_never_returns_to_where_it_failed_lately_while_it_can_go_elsewhere(draw: st.DataObject) -> None:
    made = world(replicas=4)
    failed_s: dict[tuple[int, Slot], float] = {}
    for _ in range(draw.draw(st.integers(1, 30))):
        made.now_s += draw.draw(st.floats(0.0, 4.0))
        key = draw.draw(st.integers(0, 2))
        made.index.held[(draw.draw(st.integers(0, 3)), key)] = 16_000
        dispatch = made.send(prefix_key=key)
        slot = dispatch.choices[0].slot
        last_s = max((at_s for (prompt, _), at_s in failed_s.items() if prompt == key), default=-100.0)
        is_late = made.now_s - last_s > 10.0
        lately = set() if is_late else {where for prompt, where in failed_s if prompt == key}
        eligible = set(made.router._pools["m"].fleet.eligible)
        if eligible - lately:
            assert slot not in lately
        if draw.draw(st.booleans()):
            if is_late:
                failed_s = {place: at_s for place, at_s in failed_s.items() if place[0] != key}
            failed_s[key, slot] = made.now_s
            made.step(Failed(dispatch.id, made.now_s, "reset", [slot], True, None, None, True))
        else:
            made.finish(dispatch)
