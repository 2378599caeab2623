from __future__ import annotations

import pytest
from support.routing import World
from warmfront.config import CostConfig, PolicyConfig
from warmfront.policy.adapters import Adapters
from warmfront.types import Slot

LOAD_S = 0.2


def adapters(slots: int = 2, **config: float) -> Adapters:
    made = Adapters(CostConfig(**config))  # type: ignore[arg-type]
    for _ in range(slots):
        made.grow()
    return made


def test_a_request_without_adapter_has_nothing_to_load() -> None:
    assert adapters().loads_s(None, 0.0, LOAD_S) is None


def test_an_adapter_costs_its_load_where_it_is_not_and_nothing_where_it_is() -> None:
    made = adapters()
    made.used(Slot(1), "poet", 0.0)
    loads = made.loads_s("poet", 0.0, LOAD_S)
    assert loads is not None
    assert loads[1] == (0.0, 0.0)
    assert loads[0][0] == 0.2
    assert loads[0][1] == pytest.approx(0.2 / (1 + 1 / 60 * 10 / 2))


def test_a_hot_adapter_pays_back_a_second_copy() -> None:
    made = adapters()
    for number in range(600):
        made.used(Slot(1), "poet", number * 0.05)
    loads = made.loads_s("poet", 30.0, LOAD_S)
    assert loads is not None
    assert loads[0][1] < 0.01


def test_a_full_replica_answers_for_the_adapter_that_must_go() -> None:
    made = adapters(adapters_resident_max=2)
    for number in range(60):
        for name in ("first", "second"):
            made.used(Slot(0), name, number * 0.1)
    loads = made.loads_s("third", 6.0, LOAD_S)
    assert loads is not None
    assert loads[0][1] == pytest.approx(loads[1][1] + 0.2)


def test_the_adapter_used_longest_ago_is_taken_to_be_gone() -> None:
    made = adapters(slots=1, adapters_resident_max=2)
    for name in ("first", "second", "first", "third"):
        made.used(Slot(0), name, 0.0)
    assert made.loads_s("first", 0.0, LOAD_S) is None
    assert made.loads_s("third", 0.0, LOAD_S) is None
    assert made.loads_s("second", 0.0, LOAD_S) is not None


def test_another_replica_in_the_slot_has_no_adapters() -> None:
    made = adapters(slots=1)
    made.used(Slot(0), "poet", 0.0)
    made.reset(Slot(0))
    assert made.loads_s("poet", 0.0, LOAD_S) is not None


def test_requests_of_one_adapter_go_where_it_is_loaded() -> None:
    world = World(4)
    home = world.serve(adapter="poet").choices[0].slot
    assert {world.serve(adapter="poet").choices[0].slot for _ in range(6)} == {home}
    row = world.costs(world.new(adapter="poet"))[(home + 1) % 4]
    assert next(each for each in row["factors"] if each["symbol"] == "ℓ_a")["value"] > 0.0


def test_a_load_of_no_cost_changes_nothing() -> None:
    world = World(4, policy=PolicyConfig(cost=CostConfig(adapter_load_s=0.0)))
    assert len({world.serve(adapter="poet").choices[0].slot for _ in range(60)}) == 4
