"""The invariants of `Router.step` on random histories: fleets, arrivals, ends, failures, questions, nonsense."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec.structs import replace
from support.routing import PlainIndex, replica, request
from warmfront.config import Config, FlowConfig, PolicyConfig, RouterConfig
from warmfront.policy import registry
from warmfront.router import Router
from warmfront.types import (
    Answered,
    Arrived,
    Asked,
    Cancelled,
    Command,
    ConfigChanged,
    Dispatch,
    Event,
    Failed,
    Finished,
    FirstToken,
    FleetChanged,
    FleetState,
    Moved,
    Paced,
    PoolState,
    Request,
    RequestId,
    Shed,
    Slot,
    Standing,
    Stopping,
    Tick,
    Usage,
)

SLOTS = 4
QUEUE_MAX = 3
POOLS = ("m", "other")
COLUMNS = ("in_flight", "pending", "pending_tokens", "pending_s", "context_tokens", "output_tokens")


class RouterMachine(RuleBasedStateMachine):
    """Two routers get the same events; a model beside them knows who must still be answered."""

    @initialize(policy=st.sampled_from(sorted(registry.BUILTIN)), seed=st.integers(0, 3), retries=st.integers(0, 2))
    def start(self, policy: str, seed: int, retries: int) -> None:
        self.config = RouterConfig(
            policy=PolicyConfig(name=policy, seed=seed),
            flow=FlowConfig(queue_max=QUEUE_MAX, queue_timeout_s=5.0, late_binding=False),
            retries_max=retries,
        )
        self.indexes = [PlainIndex(), PlainIndex()]
        for index in self.indexes:
            index.slots = SLOTS
        self.routers = [Router(self.config, index) for index in self.indexes]
        self.now_s = 0.0
        self.number = 0
        self.waiting: set[RequestId] = set()
        self.sent: dict[RequestId, Dispatch] = {}
        self.pool_of: dict[RequestId, str] = {}
        self.generation = 0
        self.ready: dict[str, set[int]] = {pool: set(range(SLOTS)) for pool in POOLS}
        rows = [replica(slot) for slot in range(SLOTS)]
        self.feed(
            [FleetChanged(0.0, FleetState(0, [PoolState(pool, {pool: None}, "exact", None, rows) for pool in POOLS]))]
        )

    def feed(self, events: Sequence[Event]) -> list[Command]:
        outputs = [router.step(events) for router in self.routers]
        first, second = (msgspec.msgpack.encode(output) for output in outputs)
        assert first == second
        for command in outputs[0]:
            if isinstance(command, Answered | Standing):
                continue
            assert command.id in self.waiting, command
            self.waiting.discard(command.id)
            if isinstance(command, Dispatch):
                self.check(command)
                self.sent[command.id] = command
        return outputs[0]

    def check(self, dispatch: Dispatch) -> None:
        slots = [choice.slot for choice in dispatch.choices]
        assert 1 <= len(slots) <= self.config.choices_max
        assert len(set(slots)) == len(slots)
        assert set(slots) <= self.ready[self.pool_of[dispatch.id]]

    def new(self, draw: st.DataObject) -> Request:
        self.number += 1
        made = request(
            self.number,
            time_s=self.now_s,
            pool=draw.draw(st.sampled_from([*POOLS, "unknown"])),
            prompt_tokens=draw.draw(st.integers(0, 9000)),
            turn=draw.draw(st.integers(0, 20)),
            prefix_key=draw.draw(st.integers(0, 3)),
            affinity_key=draw.draw(st.none() | st.integers(0, 3)),
            stream=draw.draw(st.booleans()),
            route=draw.draw(st.sampled_from(["prefix", "prefix", "load"])),
            basis=draw.draw(st.sampled_from(["tokens", "bytes", "none"])),
            output_tokens_max=draw.draw(st.none() | st.integers(0, 5000)),
        )
        if draw.draw(st.integers(0, 9)) == 0:
            for index in self.indexes:
                index.unknown.add(made.id)
        return made

    @rule(draw=st.data(), count=st.integers(1, 6))
    def arrive(self, draw: st.DataObject, count: int) -> None:
        requests = [self.new(draw) for _ in range(count)]
        for made in requests:
            self.waiting.add(made.id)
            self.pool_of[made.id] = made.pool
        self.feed([Arrived(made) for made in requests])

    @rule(draw=st.data())
    def move(self, draw: st.DataObject) -> None:
        if dispatch := self.pick(draw):
            self.feed([Moved(dispatch.id, self.now_s, Slot(draw.draw(st.integers(0, SLOTS + 2))))])

    @rule(draw=st.data())
    def first_token(self, draw: st.DataObject) -> None:
        if dispatch := self.pick(draw):
            slot = draw.draw(st.sampled_from([dispatch.choices[0].slot, dispatch.choices[-1].slot]))
            self.feed([FirstToken(dispatch.id, self.now_s, slot)])

    @rule(draw=st.data(), status=st.sampled_from([200, 200, 400, 500]), reports=st.booleans())
    def finish(self, draw: st.DataObject, status: int, reports: bool) -> None:
        if dispatch := self.pick(draw):
            del self.sent[dispatch.id]
            cached = draw.draw(st.integers(0, 9000)) if reports else None
            usage = draw.draw(st.none() | st.just(Usage(100, cached, 30)))
            self.feed([Finished(dispatch.id, self.now_s, dispatch.choices[0].slot, status, usage, 30)])

    @rule(
        draw=st.data(),
        began=st.booleans(),
        failure=st.sampled_from(
            [
                ("connect", None, None, False),
                ("rejected", 503, 2.5, False),
                ("stream_rejected", 429, None, False),
                ("server_error", 500, None, True),
                ("no_answer", None, None, True),
                ("left", None, None, False),
            ]
        ),
    )
    def fail(self, draw: st.DataObject, began: bool, failure: tuple[str, int | None, float | None, bool]) -> None:
        if dispatch := self.pick(draw):
            del self.sent[dispatch.id]
            if not began:
                self.waiting.add(dispatch.id)
            tried = [choice.slot for choice in dispatch.choices]
            error, status, retry_after_s, accepted = failure
            self.feed([Failed(dispatch.id, self.now_s, error, tried, began, status, retry_after_s, accepted)])

    @rule(draw=st.data())
    def cancel(self, draw: st.DataObject) -> None:
        known = sorted({*self.waiting, *self.sent})
        if known:
            left = draw.draw(st.sampled_from(known))
            self.waiting.discard(left)
            self.sent.pop(left, None)
            self.feed([Cancelled(left, self.now_s)])

    @rule(draw=st.data())
    def change_fleet(self, draw: st.DataObject) -> None:
        self.generation += 1
        names = draw.draw(st.lists(st.sampled_from(POOLS), unique=True))
        pools = []
        self.ready = {pool: set() for pool in POOLS}
        for name in names:
            rows = []
            for slot in draw.draw(st.lists(st.integers(0, SLOTS - 1), unique=True)):
                ready = draw.draw(st.booleans())
                state = replica(
                    slot,
                    ready=ready,
                    capacity_tokens=draw.draw(st.sampled_from([None, 5000, 100_000])),
                    block_size=draw.draw(st.sampled_from([None, 16, 64])),
                    events=draw.draw(st.sampled_from(["live", "stale", "none"])),
                )
                if draw.draw(st.integers(0, 3)) == 0:  # another replica in the same slot
                    state = replace(state, replica=replace(state.replica, id=f"http://new-{self.generation}-{slot}"))
                rows.append(state)
                if ready:
                    self.ready[name].add(slot)
            pools.append(PoolState(name, {name: None}, "exact", None, rows))
        self.feed([FleetChanged(self.now_s, FleetState(self.generation, pools))])

    @rule(seconds=st.floats(0, 4))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.feed([Tick(self.now_s)])

    @rule(draw=st.data())
    def pace(self, draw: st.DataObject) -> None:
        slots = [Slot(slot) for slot in draw.draw(st.lists(st.integers(0, SLOTS + 1), max_size=4))]
        self.feed(
            [
                Paced(
                    self.now_s,
                    draw.draw(st.sampled_from([*POOLS, "unknown"])),
                    slots,
                    [3] * len(slots),
                    [0.1] * len(slots),
                )
            ]
        )

    @rule(draw=st.data(), question=st.sampled_from(["explain", "fleet", "policy", "nonsense"]))
    def ask(self, draw: st.DataObject, question: str) -> None:
        asked = self.new(draw) if draw.draw(st.booleans()) else None
        commands = self.feed([Asked(RequestId(7), self.now_s, question, asked, b"")])
        answers = [command for command in commands if isinstance(command, Answered)]
        assert len(answers) == 1
        msgspec.json.decode(answers[0].body)

    @rule(number=st.integers(10**6, 10**6 + 5), slot=st.integers(0, SLOTS))
    def hear_of_unknown_requests(self, number: int, slot: int) -> None:
        stranger, where = RequestId(number), Slot(slot)
        assert not self.feed(
            [
                Moved(stranger, self.now_s, where),
                FirstToken(stranger, self.now_s, where),
                Finished(stranger, self.now_s, where, 200, None, 0),
                Failed(stranger, self.now_s, "connect", [where], False),
                Cancelled(stranger, self.now_s),
            ]
        )

    @rule(policy=st.sampled_from(sorted(registry.BUILTIN)), choices_max=st.integers(1, SLOTS))
    def change_the_policy(self, policy: str, choices_max: int) -> None:
        router = replace(self.config, policy=replace(self.config.policy, name=policy), choices_max=choices_max)
        self.config = router
        self.feed([ConfigChanged(self.now_s, msgspec.json.encode(Config(router=router)))])

    @rule(grace_s=st.floats(0, 3))
    def stop(self, grace_s: float) -> None:
        self.feed([Stopping(self.now_s, grace_s)])

    def pick(self, draw: st.DataObject) -> Dispatch | None:
        return draw.draw(st.sampled_from(sorted(self.sent.values(), key=lambda each: each.id))) if self.sent else None

    @invariant()
    def nobody_waits_while_somebody_is_ready(self) -> None:
        for waiting in getattr(self, "waiting", ()):
            assert not self.ready.get(self.pool_of[waiting]), waiting

    @invariant()
    def waiting_is_bounded(self) -> None:
        assert len(getattr(self, "waiting", ())) <= QUEUE_MAX * len(POOLS)

    @invariant()
    def columns_are_sane(self) -> None:
        for router in getattr(self, "routers", ()):
            for pool in router._pools.values():
                for column in COLUMNS:
                    values = getattr(pool.fleet, column)
                    assert len(values) == pool.fleet.slots
                    assert all(value >= 0 and math.isfinite(value) for value in values), (column, values)

    def teardown(self) -> None:
        if not hasattr(self, "routers"):
            return
        for request_id in sorted({*self.sent, *self.waiting}):
            self.waiting.discard(request_id)
            self.sent.pop(request_id, None)
            self.feed([Cancelled(request_id, self.now_s)])
        for router, index in zip(self.routers, self.indexes, strict=True):
            assert not router._pool_of
            assert not len(router._flow)
            assert not index.in_use
            for pool in router._pools.values():
                assert not pool.flights
                for column in COLUMNS:
                    assert not any(getattr(pool.fleet, column)), column


TestRouterInvariants = RouterMachine.TestCase
TestRouterInvariants.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def test_shed_codes_have_faces() -> None:
    """Every code the router sheds with is that of a client error."""
    from warmfront import errors

    faces = {
        value.code
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, errors.ClientError)
    }
    router = Router(RouterConfig(flow=FlowConfig(queue_max=0)), PlainIndex())
    (unknown,) = router.step([Arrived(request(1))])
    router.step([FleetChanged(0.0, FleetState(1, [PoolState("m", {"m": None}, "exact", None, [])]))])
    (full,) = router.step([Arrived(request(2))])
    assert isinstance(unknown, Shed)
    assert isinstance(full, Shed)
    assert {unknown.code, full.code} <= faces
