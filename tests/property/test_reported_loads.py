"""Whatever engines report about themselves, the router decides: figures of others are never trusted to make sense."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.routing import World, busy, replica
from warmfront.config import PolicyConfig
from warmfront.policy import registry
from warmfront.types import Arrived, Dispatch, Shed

SLOTS = 3
COUNTS = st.none() | st.sampled_from([0.0, 0.5, 1.0, 2.0, 300.0, 1e9, 1e300]) | st.floats(0, 1e12)
SHARES = st.none() | st.sampled_from([0.0, 1.0, 2.0, 1e300]) | st.floats(0, 1)
LOADS = st.tuples(st.integers(0, SLOTS - 1), COUNTS, COUNTS, SHARES)


@pytest.mark.parametrize("policy", sorted(registry.BUILTIN))
@settings(max_examples=60, deadline=None, derandomize=True)
@given(reports=st.lists(LOADS, min_size=1, max_size=25))
def test_the_router_goes_on_whatever_engines_report(
    policy: str, reports: list[tuple[int, float | None, float | None, float | None]]
) -> None:
    world = World(SLOTS, policy=PolicyConfig(name=policy))
    rows = [replica(slot) for slot in range(SLOTS)]
    for slot, running, waiting, kv_usage in reports:
        rows[slot] = busy(rows[slot], running=running, waiting=waiting, kv_usage=kv_usage)
        world.set_fleet(rows)
        commands = [*world.step(Arrived(world.new(prompt_tokens=500))), *world.pass_time(1.0)]
        assert all(isinstance(command, Dispatch | Shed) for command in commands)
        fleet = world.router._pools["m"].fleet
        assert all(map(math.isfinite, [*fleet.admission_s, *fleet.foreign]))


@pytest.mark.parametrize("policy", sorted(registry.BUILTIN))
def test_an_engine_that_runs_nothing_while_requests_wait_has_no_limit_of_zero(policy: str) -> None:
    world = World(SLOTS, policy=PolicyConfig(name=policy))
    stopped = [busy(replica(slot), running=0.0, waiting=50.0, kv_usage=0.0) for slot in range(SLOTS)]
    for _ in range(30):
        world.set_fleet(stopped)
        world.step(Arrived(world.new(prompt_tokens=500)))
        world.pass_time(1.0)
    assert math.isfinite(sum(world.router._pools["m"].fleet.admission_s))
