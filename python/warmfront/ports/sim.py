"""The virtual-time port: a workload and a fleet of engines around the very router that serves.

The engines, the index and the events of requests are the core's (`core.SimFleet`); this loop only says what happens
when: arrivals, scrapes, replicas that join, leave or crash. Everything is deterministic: equal inputs give equal runs.

What is easy to get wrong: time moves only in `SimFleet.advance`, which stops wherever the router has something to see.
A decision is carried out at the time of the events that led to it; thinking takes no virtual time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import msgspec
from msgspec.structs import replace

from warmfront import core
from warmfront.clock import Clock
from warmfront.errors import UpstreamConnectError
from warmfront.lab.model import Outcome, SimRequest, Source
from warmfront.policy.affinity import mix
from warmfront.ports.agenda import Agenda
from warmfront.ports.sim_view import SimView
from warmfront.types import (
    Arrived,
    Command,
    Deliver,
    Dispatch,
    Event,
    Failed,
    Finished,
    FirstToken,
    Moved,
    Overlap,
    Request,
    RequestId,
    Shed,
    Slot,
    Standing,
    Tick,
)

TICK_S = 0.25
"""How often time is told while something waits, and how often token gaps are reported; the live core's default."""
PROGRESS_EVERY = 500
"""Requests that end between two reports of progress."""

_events = msgspec.msgpack.Decoder(list[Event])


class Stepper(Protocol):
    """The router."""

    def step(self, events: Sequence[Event]) -> list[Command]:
        """Take note of what happened, then decide what can be decided."""


class Watcher(Protocol):
    """Who is told about ends right after the router has noted them: peers that keep books of their own."""

    def first_token(self, request: Request, slot: Slot, now_s: float) -> None:
        """The engine began to answer."""

    def finished(self, request: Request, slot: Slot, now_s: float) -> None:
        """The answer is complete."""


class Stages:
    """Real seconds that parts of a run took."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.router_s = 0.0
        self.index_s = 0.0
        self.engines_s = 0.0
        self.workload_s = 0.0


class SimIndex:
    """The fleet's index as the router asks it; hashes stay in the core."""

    def __init__(self, fleet: core.SimFleet, stages: Stages) -> None:
        self._fleet = fleet
        self._stages = stages

    def overlap(self, request: Request) -> Overlap:
        """Return the columns of the only pool.

        Raises:
            UnknownRequestError: The request has ended.
        """
        began_s = self._stages.clock.now_s()
        overlap = Overlap(*self._fleet.overlap(request.id))
        self._stages.index_s += self._stages.clock.now_s() - began_s
        return overlap

    def predict(self, request: Request, slot: Slot) -> None:
        """Note that `slot` will hold the prompt.

        Raises:
            UnknownRequestError: The request has ended.
        """
        began_s = self._stages.clock.now_s()
        self._fleet.predict(request.id, slot)
        self._stages.index_s += self._stages.clock.now_s() - began_s

    def release(self, request_id: RequestId) -> None:
        """Do nothing: the fleet sees every end itself, as the live core does."""


class SimPort:
    """One run."""

    def __init__(
        self,
        fleet: core.SimFleet,
        router: Stepper,
        source: Source,
        *,
        agenda: Agenda,
        view: SimView,
        stages: Stages,
    ) -> None:
        """Put a run together; `run` runs it. Whoever builds the fleet enters its changes into `agenda`."""
        self.outcomes: dict[RequestId, Outcome] = {}
        self.watcher: Watcher | None = None
        self.progress: Callable[[int], None] | None = None
        """Told now and then how many requests have ended."""
        self.reports_cached = True
        """False: the router is not told how many tokens were cached."""
        self._fleet = fleet
        self._router = router
        self._source = source
        self._agenda = agenda
        self._view = view
        self._stages = stages
        self._arrivals: Iterator[SimRequest] = iter(source.arrivals())
        self._next_arrival: SimRequest | None = next(self._arrivals, None)
        self._successors: list[tuple[float, int, SimRequest]] = []
        self._requests: dict[RequestId, Request] = {}
        self._undecided: set[RequestId] = set()
        self._ticks: list[Event] = []
        self._ended = 0
        self._now_s = 0.0

    def run(self) -> float:
        """Run until every request has ended; return the virtual time of the end."""
        clock, stages = self._stages.clock, self._stages
        self._agenda.every(TICK_S, self._tick, first_s=TICK_S)
        while self._is_running():
            until_s = min(self._next_arrival_s(), self._agenda.next_s)
            began_s = clock.now_s()
            self._now_s = self._view.now_s = self._fleet.advance(until_s)
            stages.engines_s += clock.now_s() - began_s
            if self._now_s >= until_s:
                self._agenda.run(self._now_s)
                self._arrive()
            self._decide()
        return self._now_s

    def _is_running(self) -> bool:
        return self._next_arrival is not None or bool(self._successors) or self._ended < len(self.outcomes)

    def _next_arrival_s(self) -> float:
        first_s = self._next_arrival.at_s if self._next_arrival is not None else float("inf")
        return min(first_s, self._successors[0][0]) if self._successors else first_s

    # -- arrivals

    def _arrive(self) -> None:
        """Let every request arrive whose time has come."""
        began_s = self._stages.clock.now_s()
        while self._next_arrival_s() <= self._now_s:
            self._enter(self._pop())
        self._stages.workload_s += self._stages.clock.now_s() - began_s

    def _pop(self) -> SimRequest:
        arrival = self._next_arrival
        if arrival is None or (self._successors and self._successors[0][0] < arrival.at_s):
            return heapq.heappop(self._successors)[2]
        self._next_arrival = next(self._arrivals, None)
        return arrival

    def _enter(self, request: SimRequest) -> None:
        id_ = RequestId(request.key)
        self._agenda.request_came()
        self._view.requests[id_] = request
        self.outcomes[id_] = Outcome(
            request.key,
            request.group,
            self._now_s,
            request.prompt_tokens,
            request.output_tokens,
            attempts=0,
            flow=request.flow,
            priority=request.priority,
        )
        self._fleet.arrive(
            request.key,
            request.prompt,
            request.output_tokens,
            output_tokens_max=request.output_tokens_max,
            answer=request.answer,
            adapter=request.adapter,
            flow=request.flow,
            priority=request.priority,
            turn=request.turn,
            affinity_key=None if request.session is None else mix(request.session, 1),
        )

    # -- decisions

    def _decide(self) -> None:
        """Hand the router what happened until it has nothing more to say."""
        clock, stages = self._stages.clock, self._stages
        while events := self._happened():
            began_s, index_s = clock.now_s(), stages.index_s
            commands = self._router.step(events)
            stages.router_s += clock.now_s() - began_s - (stages.index_s - index_s)
            if self.watcher is not None:
                self._tell(self.watcher, events)
            for command in commands:
                self._carry_out(command)

    def _happened(self) -> list[Event]:
        batch = self._fleet.take_events()
        events = _events.decode(batch) if batch else []
        for event in events:
            self._note(event)
        if not self.reports_cached:
            events = [_without_cached(event) for event in events]
        events += self._ticks
        self._ticks.clear()
        return events

    def _tick(self) -> None:
        self._fleet.pace()
        if self._undecided:
            self._ticks.append(Tick(self._now_s))

    def _note(self, event: Event) -> None:
        """Keep the books of the run."""
        match event:
            case Arrived():
                self._requests[event.request.id] = event.request
                self._undecided.add(event.request.id)
            case Moved():
                self.outcomes[event.id].attempts += 1
            case FirstToken():
                outcome = self.outcomes[event.id]
                outcome.first_token_s, outcome.slot = event.time_s, event.slot
            case Finished():
                self._note_finished(event)
            case Failed() if event.began:
                self._note_error(event.id, event.error)
            case Failed():
                self._undecided.add(event.id)

    def _note_finished(self, event: Finished) -> None:
        if event.status != 200:
            self._note_error(event.id, f"status_{event.status}")
            return
        outcome = self.outcomes[event.id]
        outcome.finished_s = event.time_s
        if event.usage is not None:
            outcome.cached_tokens = event.usage.cached_tokens or 0
        self._note_end()
        began_s = self._stages.clock.now_s()
        for request in self._source.finished(self._view.requests[event.id], event.time_s):
            heapq.heappush(self._successors, (max(request.at_s, event.time_s), request.key, request))
        self._stages.workload_s += self._stages.clock.now_s() - began_s

    def _note_error(self, id_: RequestId, error: str) -> None:
        self.outcomes[id_].error = error
        self._note_end()

    def _note_end(self) -> None:
        self._ended += 1
        if self.progress is not None and self._ended % PROGRESS_EVERY == 0:
            self.progress(self._ended)

    def _tell(self, watcher: Watcher, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, FirstToken):
                watcher.first_token(self._requests[event.id], event.slot, event.time_s)
            elif isinstance(event, Finished):
                watcher.finished(self._requests[event.id], event.slot, event.time_s)

    def _carry_out(self, command: Command) -> None:
        if isinstance(command, Standing):
            return  # for clients that ask whether the router is ready
        self._undecided.discard(command.id)
        outcome = self.outcomes[command.id]
        if isinstance(command, Dispatch):
            first = command.choices[0]
            if outcome.dispatched_s is None:
                outcome.dispatched_s = self._now_s
            outcome.slot, outcome.predicted_tokens = first.slot, first.cached_tokens
            outcome.attempts += 1
            self._fleet.dispatch(command.id, [choice.slot for choice in command.choices])
            return
        assert isinstance(command, Shed | Deliver)  # Nobody asks questions here.
        self._fleet.shed(command.id)
        code = command.code if isinstance(command, Shed) else UpstreamConnectError.code
        self._note_error(command.id, code)


def _without_cached(event: Event) -> Event:
    if not isinstance(event, Finished) or event.usage is None:
        return event
    return replace(event, usage=replace(event.usage, cached_tokens=None))
