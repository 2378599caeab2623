"""What every policy must do, built-in or plugin: run for all that are registered."""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from support.routing import World, replica
from warmfront.config import PolicyConfig
from warmfront.errors import ConfigError
from warmfront.policy import registry
from warmfront.types import Dispatch

POLICIES = sorted(registry.BUILTIN)
every_policy = pytest.mark.parametrize("name", POLICIES)


def world(name: str, replicas: int = 4, seed: int = 1) -> World:
    return World(replicas, policy=PolicyConfig(name=name, seed=seed))


@every_policy
def test_unready_replicas_are_never_named(name: str) -> None:
    small = world(name)
    states = small.states()
    small.set_fleet([replace(state, replica=replace(state.replica, ready=state.slot in (1, 3))) for state in states])
    for number in range(30):
        choices = small.send(prefix_key=number, affinity_key=number).choices
        assert {choice.slot for choice in choices} == {1, 3}


@every_policy
def test_choices_are_distinct_and_bounded(name: str) -> None:
    small = world(name, 5)
    for number in range(20):
        slots = [choice.slot for choice in small.send(prefix_key=number % 3).choices]
        assert len(slots) == len(set(slots)) == 3


@every_policy
def test_one_replica_serves_everything(name: str) -> None:
    small = world(name, 1)
    assert {small.slot(prefix_key=number, affinity_key=number) for number in range(10)} == {0}


@every_policy
def test_nothing_known_about_replicas_is_enough(name: str) -> None:
    small = World(0, policy=PolicyConfig(name=name))
    small.set_fleet([replica(slot, capacity_tokens=None, block_size=None, events="none") for slot in range(3)])
    assert isinstance(small.arrive(), Dispatch)
    assert isinstance(small.arrive(route="load", basis="none", prompt_tokens=0), Dispatch)
    assert isinstance(small.arrive(prompt_tokens=0), Dispatch)
    assert small.router._decider.errors == 0


@pytest.mark.bug(2)
@every_policy
def test_no_position_is_preferred_by_unrelated_requests_one_after_another(name: str) -> None:
    small = world(name)
    counts = Counter(
        small.serve(affinity_key=number * 0x9E3779B97F4A7C15 % 2**64).choices[0].slot for number in range(80)
    )
    assert len(counts) == 4
    assert min(counts.values()) >= 8


@every_policy
def test_the_same_history_gives_the_same_choices(name: str) -> None:
    histories = []
    for _ in range(2):
        small = world(name, seed=5)
        histories.append([small.send(prefix_key=number % 7, affinity_key=number % 5) for number in range(60)])
    assert histories[0] == histories[1]


@every_policy
def test_a_decision_can_be_explained_without_being_made(name: str) -> None:
    small = world(name)
    before = small.ask("fleet")
    explained = small.ask("explain", small.new(prefix_key=3))
    assert explained["policy"] == name
    assert explained["choice"] == explained["choices"][0]
    assert len(explained["replicas"]) == 4
    assert small.ask("fleet") == before
    assert explained["choices"] == [f"http://10.0.0.{choice.slot}:8000" for choice in small.send(prefix_key=3).choices]


@every_policy
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.integers(0, 20_000), min_size=1, max_size=12),
    ready=st.sets(st.integers(0, 3), min_size=1),
    keys=st.integers(0, 2),
)
def test_any_mix_of_prompts_is_placed_without_an_error(name: str, sizes: list[int], ready: set[int], keys: int) -> None:
    small = world(name)
    small.set_fleet(
        [replace(state, replica=replace(state.replica, ready=state.slot in ready)) for state in small.states()]
    )
    for size in sizes:
        dispatch = small.send(prompt_tokens=size, prefix_key=size % (keys + 1))
        assert dispatch.choices[0].slot in ready
        assert 0 <= dispatch.choices[0].cached_tokens <= max(0, size - 1)
    assert small.router._decider.errors == 0


def test_built_ins_are_registered_as_plugins_are() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["entry-points"][registry.GROUP] == registry.BUILTIN


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="marginal_cost, power_of_two"):
        World(1, policy=PolicyConfig(name="cheapest"))
