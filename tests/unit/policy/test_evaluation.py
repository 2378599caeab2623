from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.routing import World, replica
from warmfront.policy import marginal_cost
from warmfront.policy.evaluation import Evaluation
from warmfront.policy.prices import Costs
from warmfront.types import Slot

REPLICAS = 64


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replicas that each decision looked at."""
    counts: list[int] = []

    class Counting(Evaluation):
        def best(self, count: int) -> list[Costs]:
            counts.append(0)
            return super().best(count)

        def costs(self, slots: Sequence[Slot]) -> list[Costs]:
            counts[-1] += len(slots)
            return super().costs(slots)

    monkeypatch.setattr(marginal_cost, "Evaluation", Counting)
    return counts


def test_few_replicas_are_looked_at_in_a_large_fleet_whose_replicas_are_all_alike(looks: list[int]) -> None:
    world = World(REPLICAS)
    slots = {world.slot(prefix_key=key) for key in range(40)}
    assert len(looks) == 40
    assert max(looks) <= 6
    assert len(slots) > 20  # prompts of their own meet idle replicas of their own


def test_few_replicas_are_looked_at_where_memory_is_scarce_and_prefixes_are_everywhere(looks: list[int]) -> None:
    world = World(0)
    world.set_fleet([replica(slot, capacity_tokens=4000) for slot in range(REPLICAS)])
    for slot in range(REPLICAS):
        world.index.held[(slot, 5)] = 480 + slot % 3
        world.index.host[(slot, 5)] = 640
    for number in range(2 * REPLICAS):
        world.now_s += 0.05
        world.first_token(world.send(prefix_key=5 if number % 2 else number))
    assert max(looks) <= 6
