"""What every peer policy must do, whatever its rule: run for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
from support.peers import Peer, prompt
from support.routing import replica
from warmfront.lab.peers import PEERS
from warmfront.policy.base import cached_tokens_max
from warmfront.types import EngineLoad

every_peer = pytest.mark.parametrize("name", sorted(PEERS))


def traffic(small: Peer, requests: int, seed: int = 3) -> Iterator[tuple[list[int], dict[str, object]]]:
    """Yield prompts of a few families while load and overlap move."""
    rng = Random(seed)
    for number in range(requests):
        fleet = small.fleet
        fleet.now_s += rng.random()
        for slot in fleet.eligible:
            fleet.in_flight[slot] = rng.randrange(40)
            fleet.pending[slot] = rng.randrange(1, 9)
            fleet.pending_tokens[slot] = rng.randrange(4000)
            fleet.pending_s[slot] = rng.random()
            fleet.context_tokens[slot] = float(rng.randrange(90_000))
        small.holds(device=[16 * rng.randrange(12) for _ in range(fleet.slots)])
        family = rng.randrange(6)
        blocks = prompt(family, rng.randrange(1, 12)) + prompt(100 + number, rng.randrange(4))
        yield blocks, {"prefix_key": family, "turn": rng.randrange(3), "affinity_key": rng.choice([None, family])}


@every_peer
def test_choices_are_distinct_eligible_and_as_many_as_are_asked_for(name: str) -> None:
    small = Peer(name, 5, choices_max=3)
    for number, (blocks, facts) in enumerate(traffic(small, 60)):
        eligible = [0, 2, 3, 4] if number % 2 else [1, 2, 3]
        small.fleet.allow(eligible)
        chosen = [choice.slot for choice in small.ask(blocks, **facts)]
        assert len(chosen) == len(set(chosen)) == 3
        assert set(chosen) <= set(eligible)
        small.send(blocks, **facts)


@every_peer
def test_expected_tokens_never_exceed_what_an_engine_can_find(name: str) -> None:
    small = Peer(name, 4, choices_max=3)
    for blocks, facts in traffic(small, 60):
        for choice in small.ask(blocks, **facts):
            assert 0 <= choice.cached_tokens <= cached_tokens_max(16 * len(blocks), 16)
        small.send(blocks, **facts)


@every_peer
def test_asking_changes_nothing_but_the_random_numbers(name: str) -> None:
    small, twice = Peer(name, 4), Peer(name, 4)
    for (blocks, facts), _ in zip(traffic(small, 60), traffic(twice, 60), strict=True):
        state = twice.fleet.rng.getstate()
        twice.ask(blocks, **facts)
        twice.fleet.rng.setstate(state)
        assert small.send(blocks, **facts) == twice.send(blocks, **facts)


@every_peer
def test_the_same_seed_and_history_give_the_same_choices(name: str) -> None:
    histories = []
    for _ in range(2):
        small = Peer(name, 4, seed=5)
        histories.append([small.send(blocks, **facts) for blocks, facts in traffic(small, 80)])
    assert histories[0] == histories[1]


@every_peer
def test_nothing_known_about_replicas_is_enough(name: str) -> None:
    small = Peer(name, 0)
    small.follow([replica(slot, capacity_tokens=None, block_size=None, events="none") for slot in range(3)])
    small.view.loads = [EngineLoad()]
    small.fleet.now_s = 100.0
    for blocks in ([], prompt(1, 3), prompt(1, 3), []):
        assert small.send(blocks) in (0, 1, 2)
    assert small.send([], prompt_tokens=1600, route="load", basis="none", affinity_key=7) in (0, 1, 2)


@every_peer
def test_replicas_that_come_and_go_are_followed(name: str) -> None:
    small = Peer(name, 2)
    seen = set()
    for number, (blocks, facts) in enumerate(traffic(small, 240)):
        if number % 40 == 20:
            small.follow([replica(slot, id=f"http://{number}.{slot}:8000") for slot in range(2 + number % 3)])
            small.holds(device=[0] * small.fleet.slots)
        slot = small.send(blocks, **facts)
        assert slot in small.fleet.eligible
        seen.add(slot)
    assert len(seen) > 1


@every_peer
def test_one_replica_serves_everything(name: str) -> None:
    small = Peer(name, 1, choices_max=3)
    assert {small.send(blocks, **facts) for blocks, facts in traffic(small, 30)} == {0}
