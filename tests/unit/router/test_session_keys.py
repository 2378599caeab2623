"""A session's key is a prior: it decides between equals where nothing is known, and never holds a request up."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace
from support.routing import World, busy, replica
from warmfront.config import FlowConfig, PolicyConfig, RouterConfig
from warmfront.types import Dispatch

WITH_KEYS = ("marginal_cost", "session")
every_policy = pytest.mark.parametrize("policy", WITH_KEYS)


def world(replicas: int, policy: str = "marginal_cost", **flow: Any) -> World:
    config = RouterConfig(flow=FlowConfig(late_binding=False, **flow), retries_max=3)
    return World(replicas, policy=PolicyConfig(name=policy), config=config)


def home(policy: str, key: int, replicas: int = 4) -> int:
    """Return where a session begins in a fleet at rest."""
    return world(replicas, policy).slot(affinity_key=key)


@pytest.mark.bug(173)
@every_policy
def test_two_routers_that_know_nothing_send_a_session_to_the_same_replica(policy: str) -> None:
    routers = [world(4, policy), world(4, policy)]
    routers[1].serve()  # their rotations differ
    for key in range(40):
        slots = {each.serve(affinity_key=key).choices[0].slot for each in routers}
        assert len(slots) == 1


@every_policy
def test_sessions_spread_over_the_fleet(policy: str) -> None:
    counts = Counter(home(policy, key) for key in range(200))
    assert set(counts) == {0, 1, 2, 3}
    assert max(counts.values()) < 80


def test_what_the_index_knows_counts_more_than_the_key() -> None:
    fleet = world(4)
    key = next(key for key in range(40) if home("marginal_cost", key) != 1)
    fleet.index.held[(1, 77)] = 1600
    assert fleet.slot(prefix_key=77, affinity_key=key) == 1


@pytest.mark.bug(189)
def test_a_key_yields_to_load() -> None:
    fleet = world(2)
    key = next(key for key in range(40) if home("marginal_cost", key, 2) == 0)
    fleet.load(0, 6, prompt_tokens=8000)
    assert fleet.slot(affinity_key=key) == 1


@pytest.mark.bug(181)
@every_policy
def test_what_a_request_has_tried_is_excluded_before_its_key_chooses(policy: str) -> None:
    fleet = world(3, policy)
    first = fleet.send(affinity_key=5)
    tried = first.choices[0].slot
    failed = replace(first, choices=first.choices[:1])
    (again,) = fleet.fail(failed)
    assert isinstance(again, Dispatch)
    assert tried not in {choice.slot for choice in again.choices}


@every_policy
def test_a_key_whose_replica_is_gone_or_not_ready_moves_and_the_others_stay(policy: str) -> None:
    keys = range(60)
    homes = {key: home(policy, key) for key in keys}
    for change in ([], [replica(2, ready=False)]):
        for key in keys:
            fleet = world(4, policy)
            fleet.set_fleet([replica(0), replica(1), *change, replica(3)])
            slot = fleet.slot(affinity_key=key)
            assert slot != 2 if homes[key] == 2 else slot == homes[key]


@every_policy
def test_a_key_whose_replica_is_full_moves(policy: str) -> None:
    fleet = world(2, policy, in_flight_max_per_replica=1)
    key = next(key for key in range(40) if home(policy, key, 2) == 0)
    assert [fleet.slot(affinity_key=key) for _ in range(2)] == [0, 1]


@pytest.mark.bug(189)
def test_a_key_whose_engine_reports_a_queue_and_full_memory_moves() -> None:
    fleet = World(2, flow=FlowConfig())
    key = next(key for key in range(40) if home("marginal_cost", key, 2) == 0)
    states = fleet.states()
    fleet.set_fleet([busy(states[0], running=40.0, waiting=3.0, kv_usage=0.99), states[1]])
    assert {fleet.slot(affinity_key=key) for _ in range(3)} == {1}


@pytest.mark.bug(182)
def test_without_a_key_prefixes_keep_requests_together() -> None:
    fleet = world(4)
    first = fleet.serve(prefix_key=9).choices[0].slot
    assert {fleet.serve(prefix_key=9).choices[0].slot for _ in range(5)} == {first}
