"""Engines that cease to reuse what their events say that they hold, through the router."""

from __future__ import annotations

import logging

import pytest
from support.meters import LastValues
from support.routing import World, replica
from warmfront.policy.reuse import UNTESTED_S
from warmfront.types import Dispatch

TOKENS = 8000
COLD_S, WARM_S = 0.88, 0.02
"""Prefill of a prompt as the prior expects it, and of one that is cached but for its last block."""
PREFIX = 77


def warmed(replicas: int = 1) -> World:
    """A fleet that has computed enough prompts for its prefills to be known, and holds one prefix everywhere."""
    world = World(replicas)
    for _ in range(25 * replicas):
        serve(world, COLD_S)
    for slot in range(replicas):
        world.index.held[(slot, PREFIX)] = TOKENS
    return world


def serve(world: World, first_token_s: float, *, key: int | None = None, cached_tokens: int | None = None) -> Dispatch:
    """Let one prompt live; `key`: its prefix is known."""
    changes: dict[str, int] = {} if key is None else {"prefix_key": key}
    dispatch = world.send(prompt_tokens=TOKENS, **changes)
    world.now_s += first_token_s
    world.first_token(dispatch)
    world.now_s += 1.0
    world.finish(dispatch, cached_tokens=cached_tokens)
    return dispatch


def prefill_s(world: World) -> float:
    """Return what a prompt of the known prefix is expected to take at the first replica."""
    factors = world.costs(world.new(prompt_tokens=TOKENS, prefix_key=PREFIX))[0]["factors"]
    return float(next(each["value"] for each in factors if each["symbol"] == "p"))


def test_an_engine_that_ceases_to_reuse_is_priced_so_after_three_prefills_and_back_after_three() -> None:
    world = warmed()
    assert prefill_s(world) < 0.1
    for _ in range(3):
        serve(world, COLD_S, key=PREFIX)
    assert prefill_s(world) == pytest.approx(COLD_S, rel=0.1)
    for _ in range(3):
        serve(world, WARM_S, key=PREFIX)
    assert prefill_s(world) < 0.1


def test_operators_see_which_replica_is_not_counted_on() -> None:
    world, gauges = warmed(), LastValues()
    world.router._meter = gauges
    assert world.ask("fleet")["pools"][0]["replicas"][0]["reuses"]
    for _ in range(3):
        serve(world, COLD_S, key=PREFIX)
    assert not world.ask("fleet")["pools"][0]["replicas"][0]["reuses"]
    world.pass_time(1.0)
    assert gauges.values["warmfront_replica_reuses"] == 0.0
    for _ in range(3):
        serve(world, WARM_S, key=PREFIX)
    world.pass_time(1.0)
    assert gauges.values["warmfront_replica_reuses"] == 1.0


def test_of_a_replica_that_has_left_nothing_more_is_believed() -> None:
    world = warmed(replicas=2)
    for _ in range(12):
        serve(world, COLD_S, key=PREFIX)
    reuse = world.router._pools["m"].fleet.learned.reuse
    assert 0.0 in reuse.factor
    gone = reuse.factor.index(0.0)
    world.set_fleet([replica(1 - gone)])
    world.pass_time(UNTESTED_S + 1.0)
    world.pass_time(1.0)
    assert reuse.factor[gone] == 1.0


def test_what_waits_and_what_was_sent_lately_is_priced_anew() -> None:
    world = warmed()
    fleet = world.router._pools["m"].fleet
    for _ in range(2):
        serve(world, COLD_S, key=PREFIX)
    waiting = [world.send(prompt_tokens=TOKENS, prefix_key=PREFIX) for _ in range(4)]
    before_s, work_before_s = fleet.pending_s[0], fleet.work_s[0]
    assert before_s < 0.1
    world.now_s += COLD_S
    world.first_token(waiting[0])
    world.pass_time(0.1)
    world.send(prompt_tokens=16)
    assert fleet.learned.reuse.factor == [0.0]
    assert fleet.pending_s[0] == pytest.approx(3 * COLD_S, rel=0.1)
    assert fleet.work_s[0] > work_before_s + 5 * COLD_S
    for dispatch in waiting[1:]:
        world.first_token(dispatch)
    assert fleet.pending_s[0] < 0.1, "the short one"


@pytest.mark.parametrize("cached_tokens", [None, 0])
def test_prefills_that_find_nothing_are_no_sign_of_a_slow_engine(cached_tokens: int | None) -> None:
    world = warmed()
    learned = world.router._pools["m"].fleet.learned
    token_s = learned.prefill.alpha
    for _ in range(40):
        serve(world, COLD_S, key=PREFIX, cached_tokens=cached_tokens)
    assert learned.prefill.alpha == pytest.approx(token_s, rel=0.05)
    assert learned.prefill.scale[0] == pytest.approx(1.0, rel=0.05)
    assert learned.credit.factor[True][0] > 0.0
    for _ in range(40):
        serve(world, WARM_S, key=PREFIX, cached_tokens=None if cached_tokens is None else TOKENS - 16)
    assert learned.prefill.alpha == pytest.approx(token_s, rel=0.05)


def test_engines_that_reuse_again_have_the_credit_that_they_had() -> None:
    world = warmed()
    credit = world.router._pools["m"].fleet.learned.credit
    for _ in range(40):
        serve(world, WARM_S, key=PREFIX, cached_tokens=TOKENS - 16)
    for _ in range(40):
        serve(world, COLD_S, key=PREFIX, cached_tokens=0)
    for _ in range(3):
        serve(world, WARM_S, key=PREFIX, cached_tokens=TOKENS - 16)
    assert min(credit.factor[True]) > 0.9
    assert prefill_s(world) < 0.15


def test_an_operator_is_told_once_when_it_begins_and_once_when_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    world = warmed()
    with caplog.at_level(logging.INFO):
        for _ in range(10):
            serve(world, COLD_S, key=PREFIX)
        for _ in range(10):
            serve(world, WARM_S, key=PREFIX)
    told = [record.levelname for record in caplog.records if "replica http://10.0.0.0:8000" in record.message]
    assert told == ["WARNING", "INFO"]
