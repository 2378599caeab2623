"""The guard through the router: outcomes arrive as events, and the credit follows."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from support.meters import LastValues
from support.routing import World
from warmfront.config import CostConfig, GuardConfig, PolicyConfig
from warmfront.types import Cancelled, FirstToken

PREFIX = 77


def contended(guard: GuardConfig) -> World:
    """A warm replica that is always a little busier than a cold one, so that both rules differ."""
    world = World(2, policy=PolicyConfig(guard=guard, cost=CostConfig(arrival_weight=0.0)))
    world.index.held[(0, PREFIX)] = 16_000
    return world


def run(world: World, decisions: int, *, seconds: float, is_cached: bool) -> None:
    """Send prompts of a warm prefix while its replica has other work; a miss takes as long as `seconds` says."""
    rng = Random(5)
    for _ in range(decisions):
        world.index.held = {(0, PREFIX): 16_000}
        world.now_s += 0.5
        world.load(0, 1, prompt_tokens=1000)
        waiting = list(world.router._pools["m"].flights)
        dispatch = world.send(prefix_key=PREFIX, prompt_tokens=16_000)
        is_warm = dispatch.choices[0].slot == 0
        world.now_s += rng.uniform(0.8, 1.2) * (0.2 if is_warm and is_cached else seconds * (1 + is_warm))
        world.first_token(dispatch)
        world.now_s += 1.0
        world.finish(dispatch, cached_tokens=None, output_tokens=50)
        for request_id in waiting:
            world.step(Cancelled(request_id, world.now_s))


def guard_of(world: World) -> dict[str, Any]:
    report: dict[str, Any] = world.ask("policy")["guard"]["m"]
    return report


def test_affinity_that_loses_is_given_up_though_engines_report_no_cached_tokens() -> None:
    world = contended(GuardConfig(share=0.1))
    run(world, 1500, seconds=1.8, is_cached=False)
    report = guard_of(world)
    assert report["credit"] < 1.0
    assert report["alarms"] >= 1


def test_affinity_that_pays_keeps_its_credit() -> None:
    world = contended(GuardConfig(share=0.1))
    run(world, 1500, seconds=1.8, is_cached=True)
    report = guard_of(world)
    assert report["credit"] == 1.0
    assert report["gain_s"] > 0.5
    assert 1500 // 80 <= report["rivals"] <= 1500 // 40, "tried on, and less often than a tenth: blocks grow eightfold"


def test_a_guard_that_is_off_never_interferes() -> None:
    world = contended(GuardConfig(enabled=False))
    run(world, 200, seconds=1.8, is_cached=False)
    assert world.ask("policy")["guard"] == {}


def test_where_both_rules_agree_nothing_is_compared() -> None:
    world = World(3)
    for _ in range(400):
        world.serve()
    report = guard_of(world)
    assert report["decisions"] == 400
    assert report["rivals"] == 0


def test_regret_and_credit_are_metrics_of_the_catalogue() -> None:
    world = contended(GuardConfig(share=0.2))
    recorder = world.router._decider._meter = LastValues()
    run(world, 60, seconds=1.8, is_cached=True)
    assert "warmfront_regret_seconds" in recorder.values
    assert recorder.values["warmfront_affinity_credit"] == 1.0
    assert recorder.values["warmfront_affinity_sentinels"] > 0


def test_nothing_is_kept_of_requests_that_ended() -> None:
    world = World(2)
    dispatches = [world.send(prefix_key=number % 3) for number in range(30)]
    watch = world.router._decider._policy(world.router._pools["m"].fleet).policy._watch  # type: ignore[attr-defined]
    assert len(watch._bets) == 30
    for number, dispatch in enumerate(dispatches):
        if number % 3 == 0:
            world.step(Cancelled(dispatch.id, world.now_s))
        elif number % 3 == 1:
            world.fail(dispatch, began=True)
        else:
            world.step(FirstToken(dispatch.id, world.now_s, dispatch.choices[0].slot))
            world.finish(dispatch)
    assert watch._bets == {}


@pytest.mark.parametrize("changes", [{"stream": False}, {"route": "load", "basis": "none"}])
def test_requests_whose_first_token_or_prompt_is_not_seen_take_no_part(changes: dict[str, object]) -> None:
    world = contended(GuardConfig(share=0.2))
    for _ in range(40):
        world.load(0, 1, prompt_tokens=4000)
        world.send(prefix_key=PREFIX, **changes)
    assert guard_of(world)["differing"] == 0


def test_the_length_of_an_answer_that_does_not_stream_is_no_regret() -> None:
    world = World(2)
    recorder = world.router._decider._meter = LastValues()
    world.serve(stream=False, duration_s=30.0)
    assert "warmfront_regret_seconds" not in recorder.values
    assert guard_of(world)["decisions"] == 1
    world.serve(duration_s=30.0)
    assert "warmfront_regret_seconds" in recorder.values
