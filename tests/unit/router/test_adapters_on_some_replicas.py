from __future__ import annotations

from support.routing import World, codes, replica
from warmfront.config import PolicyConfig
from warmfront.types import Dispatch

ROUND_ROBIN = PolicyConfig(name="round_robin")


def world() -> World:
    made = World(3, policy=ROUND_ROBIN)
    made.set_fleet([replica(0, lacks=["lora"]), replica(1), replica(2, lacks=["lora"])])
    return made


def test_a_request_goes_only_where_its_adapter_is_loaded() -> None:
    made = world()
    assert {made.slot(model="lora", adapter="lora") for _ in range(6)} == {1}
    assert {made.slot() for _ in range(6)} == {0, 1, 2}


def test_a_failed_request_is_not_tried_where_its_adapter_is_missing() -> None:
    made = world()
    dispatch = made.send(model="lora", adapter="lora")
    assert [choice.slot for choice in dispatch.choices] == [1]
    assert codes(made.fail(dispatch)) == ["deliver"]


def test_a_request_that_no_ready_replica_serves_is_refused_and_holds_up_nobody() -> None:
    made = world()
    made.set_fleet([replica(0, lacks=["lora"]), replica(1, ready=False)])
    assert codes([made.arrive(model="lora", adapter="lora")]) == ["no_ready_replica"]
    assert isinstance(made.arrive(), Dispatch)


def test_an_explanation_chooses_only_among_those_that_serve_the_model() -> None:
    made = world()
    answer = made.ask("explain", made.new(model="lora", adapter="lora"))
    assert answer["choices"] == ["http://10.0.0.1:8000"]
    assert {made.slot() for _ in range(6)} == {0, 1, 2}, "asking changes nothing"
