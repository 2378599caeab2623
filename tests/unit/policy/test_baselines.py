from __future__ import annotations

import math
from collections import Counter

from support.routing import World, replica
from warmfront.config import PolicyConfig


def world(name: str, replicas: int = 4, **changes: object) -> World:
    return World(replicas, policy=PolicyConfig(name=name, **changes))  # type: ignore[arg-type]


def test_round_robin_takes_turns() -> None:
    slots = [small.slot() for small in [world("round_robin", 3)] for _ in range(6)]
    assert slots[:3] == slots[3:]
    assert sorted(slots[:3]) == [0, 1, 2]


def test_random_depends_on_the_seed_only() -> None:
    first, again, other = world("random", seed=1), world("random", seed=1), world("random", seed=2)
    draws = [[small.slot() for _ in range(20)] for small in (first, again, other)]
    assert draws[0] == draws[1] != draws[2]


def test_least_loaded_levels_requests_in_flight() -> None:
    small = world("least_loaded")
    small.load(2, 3)
    assert Counter(small.slot() for _ in range(9)) == Counter({0: 3, 1: 3, 3: 3})


def test_power_of_two_stays_near_level() -> None:
    small = world("power_of_two", 8)
    counts = Counter(small.slot() for _ in range(160))
    assert max(counts.values()) <= 26


def test_a_session_stays_where_it_is() -> None:
    small = world("session")
    assert len({small.serve(affinity_key=9).choices[0].slot for _ in range(10)}) == 1


def test_only_sessions_of_a_replica_that_leaves_move() -> None:
    small = world("session")
    before = {key: small.slot(affinity_key=key) for key in range(60)}
    small.set_fleet([state for state in small.states() if state.slot != 2])
    after = {key: small.slot(affinity_key=key) for key in range(60)}
    assert {key for key in before if before[key] != after[key]} == {key for key in before if before[key] == 2}


def test_sessions_do_not_depend_on_slots() -> None:
    small, turned = world("session"), World(0, policy=PolicyConfig(name="session"))
    names = [state.replica.id for state in small.states()]
    turned.set_fleet([replica(slot, id=name) for slot, name in enumerate(reversed(names))])
    for key in range(30):
        assert small.slot(affinity_key=key) == 3 - turned.slot(affinity_key=key)


def test_requests_without_a_session_go_to_the_least_loaded() -> None:
    small = world("session", 2)
    small.load(0, 2, affinity_key=None)
    assert small.slot(affinity_key=None) == 1


def test_prefix_hash_keeps_a_prefix_together_within_its_bound() -> None:
    small = world("prefix_hash")
    assert len({small.serve(prefix_key=5).choices[0].slot for _ in range(6)}) == 1


def test_prefix_hash_never_goes_beyond_its_bound() -> None:
    small = world("prefix_hash", load_bound=1.25)
    counts: Counter[int] = Counter()
    for number in range(100):
        slot = small.slot(prefix_key=5)
        counts[slot] += 1
        assert counts[slot] <= math.ceil(1.25 * (number + 1) / 4)
    assert len(counts) == 4
