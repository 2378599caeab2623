from __future__ import annotations

import json

from support.routing import PlainIndex, fleet, replica, request
from warmfront.clock import ManualClock
from warmfront.config import FlowConfig, RouterConfig
from warmfront.ports.inline import Decision, InlinePort
from warmfront.router import Router
from warmfront.types import Dispatch, Finished, FirstToken, Shed


def port(later: list[Decision]) -> tuple[InlinePort, ManualClock, PlainIndex]:
    index, clock = PlainIndex(), ManualClock()
    index.slots = 2
    router = Router(RouterConfig(flow=FlowConfig(queue_timeout_s=3.0)), index)
    return InlinePort(router, clock, on_decision=later.append), clock, index


def test_a_host_gets_its_decision_as_a_return_value() -> None:
    inline, _, index = port([])
    inline.fleet(fleet([replica(0), replica(1)]))
    decision = inline.decide(request(1))
    assert isinstance(decision, Dispatch)
    slot = decision.choices[0].slot
    assert index.in_use
    inline.tell(FirstToken(decision.id, 0.1, slot))
    inline.tell(Finished(decision.id, 0.2, slot, 200, None, 0))
    assert not index.in_use


def test_decisions_that_had_to_wait_come_later() -> None:
    later: list[Decision] = []
    inline, clock, _ = port(later)
    inline.fleet(fleet([]))
    assert inline.decide(request(1)) is None
    assert inline.decide(request(2, time_s=1.0)) is None
    clock.advance(3.5)
    inline.tick()
    assert [type(each) for each in later] == [Shed]
    inline.fleet(fleet([replica(0)]))
    assert [type(each) for each in later] == [Shed, Dispatch]


def test_a_host_can_ask_what_the_admin_api_asks() -> None:
    inline, _, _ = port([])
    inline.fleet(fleet([replica(0)]))
    assert json.loads(inline.ask("explain", request(1)).body)["choice"] == "http://10.0.0.0:8000"
    assert json.loads(inline.ask("fleet").body)["pools"][0]["name"] == "m"
