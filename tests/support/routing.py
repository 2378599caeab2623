"""Small worlds around a router: a plain index by prefix, a fleet, and virtual time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec.structs import replace
from warmfront.config import FlowConfig, PolicyConfig, RouterConfig
from warmfront.router import Router
from warmfront.types import (
    Answered,
    Arrived,
    Asked,
    Command,
    Deliver,
    Dispatch,
    EngineLoad,
    Event,
    EventState,
    Failed,
    Finished,
    FirstToken,
    FleetChanged,
    FleetState,
    Overlap,
    PoolState,
    ReplicaState,
    ReplicaUpdate,
    Request,
    RequestId,
    Shed,
    Slot,
    Standing,
    Tick,
    Usage,
)

BLOCK = 16
EAGER = FlowConfig(late_binding=False)
"""Sends whatever is ready to take it: tests of choices pile up requests as they need them."""


class PlainIndex:
    """Holds leading tokens by (slot, prefix key). A dispatch makes its prefix held and in use at once."""

    def __init__(self) -> None:
        self.held: dict[tuple[int, int], int] = {}
        self.host: dict[tuple[int, int], int] = {}
        self.sent_s: dict[tuple[int, int], float] = {}
        self.in_use: dict[RequestId, tuple[int, int, int]] = {}
        self.resident: dict[int, int] = {}
        self.evicted: dict[int, int] = {}
        self.regretted: dict[int, int] = {}
        self.slots = 0
        self.unknown: set[RequestId] = set()

    def overlap(self, request: Request) -> Overlap:
        if request.id in self.unknown:
            raise LookupError(f"request {request.id} is gone")
        full = request.prompt_tokens // BLOCK * BLOCK
        key, rows = request.prefix_key, range(self.slots)
        device = [min(full, self.held.get((slot, key), 0)) for slot in rows]
        host = [max(device[slot], min(full, self.host.get((slot, key), 0))) for slot in rows]
        used = {(slot, used_key): tokens for slot, used_key, tokens in self.in_use.values()}
        return Overlap(
            device=device,
            confirmed=device,
            host=host,
            disk=host,
            active=[min(full, used.get((slot, key), 0)) for slot in rows],
            active_tokens=[sum(tokens for (row, _), tokens in used.items() if row == slot) for slot in rows],
            resident_tokens=[self.resident.get(slot, 0) for slot in rows],
            evicted_blocks=[self.evicted.get(slot, 0) for slot in rows],
            regretted_blocks=[self.regretted.get(slot, 0) for slot in rows],
            age_s=[request.time_s - self.sent_s.get((slot, key), request.time_s + 1.0) for slot in rows],
            frontier_key=key if any(host) else None,
        )

    def predict(self, request: Request, slot: Slot) -> None:
        full = request.prompt_tokens // BLOCK * BLOCK
        key = (slot, request.prefix_key)
        self.held[key] = max(full, self.held.get(key, 0))
        self.sent_s[key] = request.time_s
        self.in_use[request.id] = (slot, request.prefix_key, full)

    def release(self, request_id: RequestId) -> None:
        self.in_use.pop(request_id, None)


def replica(slot: int, **changes: Any) -> ReplicaState:
    """Make a ready replica with live events."""
    events = changes.pop("events", "live")
    name = f"http://10.0.0.{slot}:8000"
    update = ReplicaUpdate(
        id=name, url=name, rank=None, engine="vllm", ready=True, block_size=BLOCK, capacity_tokens=200_000
    )
    return ReplicaState(Slot(slot), replace(update, **changes), EventState(state=events))


def fleet(replicas: Iterable[ReplicaState], *, pool: str = "m", version: int = 1) -> FleetState:
    """Make a fleet of one pool."""
    return FleetState(version, [PoolState(pool, {pool: None}, "exact", None, list(replicas))])


def request(number: int, **changes: Any) -> Request:
    """Make a streaming request of 1,600 tokens for pool `m`."""
    values: dict[str, Any] = {
        "id": RequestId(number),
        "time_s": 0.0,
        "pool": "m",
        "model": "m",
        "adapter": None,
        "flow": "",
        "priority": 0,
        "route": "prefix",
        "basis": "tokens",
        "prompt_tokens": 1600,
        "blocks": 100,
        "turn": 0,
        "output_tokens_max": 100,
        "affinity_key": None,
        "prefix_key": number * 0x9E3779B97F4A7C15 % 2**64,
        "stream": True,
        "fallback": None,
    }
    return Request(**{**values, **changes})


class World:
    """A router, its index, and time."""

    def __init__(
        self,
        replicas: int = 3,
        *,
        policy: PolicyConfig | None = None,
        flow: FlowConfig | None = None,
        config: RouterConfig | None = None,
    ) -> None:
        base = config or RouterConfig(flow=EAGER)
        self.config = replace(base, policy=policy or base.policy, flow=flow or base.flow)
        self.index = PlainIndex()
        self.router = Router(self.config, self.index)
        self.now_s = 0.0
        self.number = 0
        self.set_fleet([replica(slot) for slot in range(replicas)])

    def set_fleet(self, replicas: list[ReplicaState], *, pool: str = "m") -> list[Command]:
        self.index.slots = max([self.index.slots, *(each.slot + 1 for each in replicas)])
        return self.step(FleetChanged(self.now_s, fleet(replicas, pool=pool)))

    def step(self, *events: Event) -> list[Command]:
        return self.router.step(events)

    def pass_time(self, seconds: float) -> list[Command]:
        self.now_s += seconds
        return self.step(Tick(self.now_s))

    def new(self, **changes: Any) -> Request:
        self.number += 1
        return request(self.number, time_s=self.now_s, **changes)

    def arrive(self, **changes: Any) -> Command:
        commands = self.step(Arrived(self.new(**changes)))
        (command,) = [each for each in commands if not isinstance(each, Standing)]
        return command

    def send(self, **changes: Any) -> Dispatch:
        """Arrive and be dispatched."""
        command = self.arrive(**changes)
        assert isinstance(command, Dispatch), command
        return command

    def slot(self, **changes: Any) -> int:
        """Arrive, be dispatched, and tell where."""
        return self.send(**changes).choices[0].slot

    def first_token(self, dispatch: Dispatch) -> None:
        self.step(FirstToken(dispatch.id, self.now_s, dispatch.choices[0].slot))

    def finish(self, dispatch: Dispatch, *, cached_tokens: int | None = None, output_tokens: int = 50) -> None:
        usage = Usage(1600, cached_tokens, output_tokens)
        self.step(Finished(dispatch.id, self.now_s, dispatch.choices[0].slot, 200, usage, output_tokens))

    def serve(self, *, first_token_s: float = 0.1, duration_s: float = 0.5, **changes: Any) -> Dispatch:
        """Let one request live from arrival to end, reporting what was predicted."""
        dispatch = self.send(**changes)
        self.now_s += first_token_s
        self.first_token(dispatch)
        self.now_s += duration_s
        self.finish(dispatch, cached_tokens=dispatch.choices[0].cached_tokens)
        return dispatch

    def fail(self, dispatch: Dispatch, *, began: bool = False) -> list[Command]:
        tried = [choice.slot for choice in dispatch.choices]
        return self.step(Failed(dispatch.id, self.now_s, "connect", tried, began))

    def ask(self, question: str, asked: Request | None = None) -> dict[str, Any]:
        commands = self.step(Asked(RequestId(10**6), self.now_s, question, asked, b""))
        (command,) = [each for each in commands if isinstance(each, Answered)]
        assert command.status == 200, command.body
        body: dict[str, Any] = msgspec.json.decode(command.body)
        return body

    def costs(self, asked: Request) -> dict[int, dict[str, Any]]:
        """Return the explanation by slot."""
        return {row["slot"]: row for row in self.ask("explain", asked)["replicas"]}

    def load(self, slot: int, requests: int, **changes: Any) -> None:
        """Put requests on one replica by letting the others lack its model for a moment.

        They stay ready: whatever was not ready for a moment is in slow start afterwards.
        """
        states = self.states()
        self.set_fleet([each if each.slot == slot else _lacking(each, changes.get("model", "m")) for each in states])
        for _ in range(requests):
            assert self.slot(**changes) == slot
        self.set_fleet(states)

    def states(self) -> list[ReplicaState]:
        return [state for _, state in sorted(self.router._pools["m"].replicas.items())]


def _lacking(state: ReplicaState, model: str) -> ReplicaState:
    return replace(state, replica=replace(state.replica, lacks=[model]))


def busy(state: ReplicaState, **load: Any) -> ReplicaState:
    """Give a replica an engine load."""
    return replace(state, replica=replace(state.replica, load=EngineLoad(**load)))


def codes(commands: Iterable[Command]) -> list[str]:
    """Return the codes of all refusals; `deliver` where the core passes on what it holds."""
    refusals = [command for command in commands if isinstance(command, Shed | Deliver)]
    return [command.code if isinstance(command, Shed) else "deliver" for command in refusals]


class Notebook:
    """A meter that remembers."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, tuple[str, ...]], float] = {}
        self.gauges: dict[tuple[str, tuple[str, ...]], float] = {}
        self.seen: list[tuple[str, float]] = []

    def count(self, name: str, labels: tuple[str, ...], n: float) -> None:
        self.counts[(name, labels)] = self.counts.get((name, labels), 0) + n

    def observe(self, name: str, labels: tuple[str, ...], value: float) -> None:
        self.seen.append((name, value))

    def set(self, name: str, labels: tuple[str, ...], value: float) -> None:
        self.gauges[(name, labels)] = value
