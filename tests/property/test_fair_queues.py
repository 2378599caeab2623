"""Flow control on random histories: one answer each, strict bands, fair turns, bounds, nobody idle without need."""

from __future__ import annotations

import math
from collections import Counter, deque

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.routing import PlainIndex, fleet, replica, request
from warmfront.config import FlowConfig, PolicyConfig, RouterConfig
from warmfront.router import Router
from warmfront.router.admission import BEHIND
from warmfront.router.turns import Band, Waiting
from warmfront.types import (
    Arrived,
    Cancelled,
    Command,
    Deliver,
    Dispatch,
    EngineLoad,
    Event,
    Failed,
    Finished,
    FirstToken,
    FleetChanged,
    FleetState,
    ReplicaState,
    Request,
    RequestId,
    Shed,
    Slot,
    Standing,
    Tick,
)

SLOTS = 3
POOLS = ("m", "other")
FLOWS = ("a", "b", "c")
WEIGHTS = {"a": 1.0, "b": 3.0}


class FlowMachine(RuleBasedStateMachine):
    """A router of two equal pools; a model beside it knows who waits and where everybody is."""

    @initialize(
        policy=st.sampled_from(["marginal_cost", "least_loaded"]),
        per_replica=st.sampled_from([None, 1, 3]),
        in_all=st.sampled_from([None, 4]),
        per_flow=st.sampled_from([None, 2]),
        queue_max=st.integers(0, 6),
        overflow=st.sampled_from(["send", "shed"]),
    )
    def start(
        self,
        policy: str,
        per_replica: int | None,
        in_all: int | None,
        per_flow: int | None,
        queue_max: int,
        overflow: str,
    ) -> None:
        self.config = FlowConfig(
            queue_max=queue_max,
            queue_max_per_flow=per_flow,
            queue_timeout_s=8.0,
            overflow="send" if overflow == "send" else "shed",
            weights=WEIGHTS,
            in_flight_max=in_all,
            in_flight_max_per_replica=per_replica,
        )
        index = PlainIndex()
        index.slots = SLOTS
        self.router = Router(RouterConfig(policy=PolicyConfig(name=policy), flow=self.config, choices_max=1), index)
        self.now_s = 0.0
        self.number = 0
        self.requests: dict[RequestId, Request] = {}
        self.held: dict[RequestId, float] = {}
        self.sent: dict[RequestId, Slot] = {}
        self.tried: set[RequestId] = set()
        self.reported_s = 0.0
        self.set_fleet([replica(slot) for slot in range(SLOTS)])

    def set_fleet(self, rows: list[ReplicaState]) -> None:
        self.rows = rows
        pools = [fleet(rows, pool=pool).pools[0] for pool in POOLS]
        self.feed([FleetChanged(self.now_s, FleetState(1, pools))])

    def feed(self, events: list[Event]) -> list[Command]:
        commands = self.router.step(events)
        for row, command in enumerate(commands):
            if isinstance(command, Standing):
                continue
            assert isinstance(command, Dispatch | Shed | Deliver)
            assert command.id in self.held, "one answer for each arrival"
            since_s, made = self.held.pop(command.id), self.requests[command.id]
            late = self.now_s >= since_s + self.config.queue_timeout_s
            late = late or (made.deadline_s is not None and self.now_s >= made.deadline_s)
            if isinstance(command, Deliver):
                assert command.id in self.tried, "only what an engine said is passed on"
                continue
            if isinstance(command, Shed):
                assert command.id not in self.tried
                assert command.code != "queue_timeout" or late
                continue
            assert not late, "nothing is sent after its deadline"
            self.sent[command.id] = command.choices[0].slot
            self.check_bands(made, commands[row + 1 :])
        return commands

    def check_bands(self, made: Request, rest: list[Command]) -> None:
        """No request is sent before one of its pool that is more urgent and free to go anywhere."""
        later = {command.id for command in rest if isinstance(command, Dispatch)}
        for id_ in {*self.held} - self.tried:
            other = self.requests[id_]
            if other.pool == made.pool and other.id not in later and not self.was_retried(made):
                assert other.priority >= made.priority, (made, other)
        for id_ in later - self.tried:
            other = self.requests[id_]
            assert other.pool != made.pool or other.priority >= made.priority or self.was_retried(made)

    def was_retried(self, made: Request) -> bool:
        return made.id in self.tried

    @rule(draw=st.data(), count=st.integers(1, 8))
    def arrive(self, draw: st.DataObject, count: int) -> None:
        events: list[Event] = []
        for _ in range(count):
            self.number += 1
            timeout_s = draw.draw(st.none() | st.floats(0.1, 9.0))
            made = request(
                self.number,
                time_s=self.now_s,
                pool=draw.draw(st.sampled_from(POOLS)),
                flow=draw.draw(st.sampled_from(FLOWS)),
                priority=draw.draw(st.integers(-2, 2)),
                prompt_tokens=draw.draw(st.sampled_from([10, 1600, 9000])),
                prefix_key=draw.draw(st.integers(0, 3)),
                deadline_s=None if timeout_s is None else self.now_s + timeout_s,
            )
            self.requests[made.id] = made
            self.held[made.id] = self.now_s
            events.append(Arrived(made))
        self.feed(events)

    @rule(draw=st.data())
    def first_token(self, draw: st.DataObject) -> None:
        if self.sent:
            id_ = draw.draw(st.sampled_from(sorted(self.sent)))
            self.feed([FirstToken(id_, self.now_s, self.sent[id_])])

    @rule(draw=st.data(), count=st.integers(1, 4))
    def finish(self, draw: st.DataObject, count: int) -> None:
        events: list[Event] = []
        for _ in range(min(count, len(self.sent))):
            id_ = draw.draw(st.sampled_from(sorted(self.sent)))
            events.append(Finished(id_, self.now_s, self.sent.pop(id_), 200, None, 5))
        self.feed(events)

    @rule(draw=st.data())
    def fail(self, draw: st.DataObject) -> None:
        if self.sent:
            id_ = draw.draw(st.sampled_from(sorted(self.sent)))
            slot = self.sent.pop(id_)
            self.tried.add(id_)
            self.held[id_] = self.now_s
            self.feed([Failed(id_, self.now_s, "connect", [slot], False)])

    @rule(draw=st.data())
    def cancel(self, draw: st.DataObject) -> None:
        known = sorted({*self.held, *self.sent})
        if known:
            id_ = draw.draw(st.sampled_from(known))
            self.held.pop(id_, None)
            self.sent.pop(id_, None)
            self.feed([Cancelled(id_, self.now_s)])

    @rule(seconds=st.floats(0, 3))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.feed([Tick(self.now_s)])

    @rule(draw=st.data())
    def report(self, draw: st.DataObject) -> None:
        loads = [
            EngineLoad(running=3.0, waiting=draw.draw(st.sampled_from([0.0, 2.0])), kv_usage=0.99) for _ in range(SLOTS)
        ]
        rows = [replica(slot, load=loads[slot], ready=draw.draw(st.integers(0, 5)) > 0) for slot in range(SLOTS)]
        self.reported_s = self.now_s
        self.set_fleet(rows)

    @invariant()
    def queues_are_bounded(self) -> None:
        if not hasattr(self, "held"):
            return
        counts = Counter(self.requests[id_].pool for id_ in self.held)
        assert all(count <= self.config.queue_max for count in counts.values()), counts
        if self.config.queue_max_per_flow is not None:
            flows = Counter((self.requests[id_].pool, self.requests[id_].flow) for id_ in self.held)
            assert all(count <= self.config.queue_max_per_flow for count in flows.values()), flows

    @invariant()
    def limits_hold(self) -> None:
        if not hasattr(self, "sent"):
            return
        for limit, counts in (
            (self.config.in_flight_max, Counter(self.requests[id_].pool for id_ in self.sent)),
            (
                self.config.in_flight_max_per_replica,
                Counter((self.requests[id_].pool, slot) for id_, slot in self.sent.items()),
            ),
        ):
            assert limit is None or all(count <= limit for count in counts.values()), counts

    @invariant()
    def whoever_waits_has_a_reason(self) -> None:
        """Work conservation, and with two pools in the machine: one pool never holds up another."""
        if not hasattr(self, "held"):
            return
        for name in {self.requests[id_].pool for id_ in self.held if id_ not in self.tried}:
            pool = self.router._pools[name]
            if self.config.in_flight_max is not None and len(pool.flights) >= self.config.in_flight_max:
                continue
            patience_s = self.router._decider.patience_s(pool.fleet)
            for slot in pool.fleet.eligible:
                limit = self.config.in_flight_max_per_replica
                is_full = limit is not None and pool.fleet.in_flight[slot] >= limit
                is_busy = pool.fleet.pending[slot] >= BEHIND and pool.fleet.waiting_s(slot) > patience_s
                assert is_full or is_busy or (slot in pool.saturated and patience_s < math.inf), (name, slot)

    def teardown(self) -> None:
        if hasattr(self, "held"):
            for id_ in sorted({*self.held, *self.sent}):
                self.feed([Cancelled(id_, self.now_s)] if self.held.pop(id_, 0.0) is not None else [])
            assert not len(self.router._flow)
            assert not self.router._pool_of


TestFlow = FlowMachine.TestCase
TestFlow.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

COSTS = st.integers(1, 5000)


def waiting(number: int, flow: str) -> Waiting:
    return Waiting(request(number, flow=flow), 0.0, math.inf, [], 0)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 7.0]), min_size=2, max_size=5),
    costs=st.lists(COSTS, min_size=40, max_size=120),
)
def test_flows_that_are_all_backlogged_differ_by_no_more_than_one_request_each(
    weights: list[float], costs: list[int]
) -> None:
    names = [f"flow-{row}" for row in range(len(weights))]
    weight_of = dict(zip(names, weights, strict=True)).__getitem__
    band = Band(weight_of)
    for number in range(len(costs) * len(names)):
        band.add(waiting(number, names[number % len(names)]))
    served = dict.fromkeys(names, 0.0)
    for cost in costs:
        head = band.head()
        assert head is not None
        band.served(head, cost)
        served[head.request.flow] += cost / weight_of(head.request.flow)
        spread = max(served.values()) - min(served.values())
        assert spread <= max(costs) / min(weights) + 1e-6


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data())
def test_in_a_band_nobody_starves_and_each_flow_keeps_its_order(draw: st.DataObject) -> None:
    """However others come and go, a flow of weight 1 with one request of cost 1 waits for a bounded number of turns."""
    band, number = Band(lambda _flow: 1.0), 0
    lines: dict[str, deque[Waiting]] = {}

    def add(flow: str) -> None:
        nonlocal number
        number += 1
        made = waiting(number, flow)
        lines.setdefault(flow, deque()).append(made)
        band.add(made)

    for flow in draw.draw(st.lists(st.sampled_from(FLOWS), max_size=20)):
        add(flow)
    for _ in range(draw.draw(st.integers(0, 20))):
        if (head := band.head()) is not None:
            band.served(lines[head.request.flow].popleft(), draw.draw(COSTS))
    add("patient")
    turns = 0
    while True:
        for flow in draw.draw(st.lists(st.sampled_from(FLOWS), max_size=3)):
            add(flow)
        if draw.draw(st.booleans()):
            busy = [line for flow, line in lines.items() if line and flow != "patient"]
            if busy:
                band.remove(draw.draw(st.sampled_from(busy)).pop())
        head = band.head()
        assert head is not None
        assert head is lines[head.request.flow][0]
        if head.request.flow == "patient":
            return
        band.served(lines[head.request.flow].popleft(), 5000)
        turns += 1
        assert turns <= len(FLOWS), "each other flow goes at most once before it"


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data())
def test_the_newest_of_the_fullest_flow_is_found_whatever_came_and_went(draw: st.DataObject) -> None:
    band = Band(lambda flow: WEIGHTS.get(flow, 1.0))
    lines: dict[str, list[Waiting]] = {flow: [] for flow in FLOWS}
    for number in range(draw.draw(st.integers(1, 60))):
        flow = draw.draw(st.sampled_from(FLOWS))
        if draw.draw(st.integers(0, 2)) and lines[flow]:
            band.remove(lines[flow].pop(draw.draw(st.integers(0, len(lines[flow]) - 1))))
        else:
            lines[flow].append(waiting(number, flow))
            band.add(lines[flow][-1])
        if len(band):
            found = band.newest_of_fullest()
            fullness = {flow: len(line) / WEIGHTS.get(flow, 1.0) for flow, line in lines.items()}
            assert fullness[found.request.flow] == max(fullness.values())
            assert found is lines[found.request.flow][-1]
