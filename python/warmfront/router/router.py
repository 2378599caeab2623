"""The function in the middle: `Router.step(events) -> commands`.

It does no I/O, reads no clock (time comes with the events) and draws no unseeded random number, so recorded inputs
replayed give the same commands byte for byte. First all events of a batch are noted in the ledger, then those that wait
are served: held ones in fair order, new ones behind them. Each decision is charged at once, so that the next one in the
same batch sees it; a request that is held is decided anew, with the facts of that moment.

What is easy to get wrong: events are never trusted to make sense. The client may have left, the replica may be gone,
an end may come twice. Such events are counted as strays and change nothing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from warmfront.config import Config, RouterConfig
from warmfront.errors import ConfigError, NoReplicaError, QueueTimeoutError, ShedError
from warmfront.policy.base import Fleet, no_overlap
from warmfront.policy.registry import PolicyFactory
from warmfront.router import admission, memory
from warmfront.router.accuracy import Accuracy
from warmfront.router.admission import Admission, Held
from warmfront.router.answers import State, answer
from warmfront.router.deciding import Decider, Decision
from warmfront.router.failures import Failures
from warmfront.router.fleet import Flight, Pool, padded
from warmfront.router.flow import Flow, Queue
from warmfront.router.index import Index
from warmfront.router.meter import Meter, NullMeter
from warmfront.router.publish import publish, publish_limits
from warmfront.router.retries import Answer, Retries
from warmfront.router.turns import Waiting
from warmfront.types import (
    Arrived,
    Asked,
    Cancelled,
    Command,
    ConfigChanged,
    Deliver,
    Dispatch,
    Event,
    Failed,
    Finished,
    FirstToken,
    FleetChanged,
    Moved,
    Overlap,
    Paced,
    Request,
    RequestId,
    Shed,
    Slot,
    Standing,
    Stopping,
    Tick,
)

logger = logging.getLogger(__name__)

CONNECT = "connect"
LEFT = "left"
"""Every replica that was chosen had left the fleet by then: nobody was asked."""
REFUSALS = frozenset({"rejected", "stream_rejected"})
"""Failures of which the engine says that it has no room."""

PUBLISH_INTERVAL_S = 0.1
"""Gauges are set no more often than this while events come, and at once when none do: a scrape sees no more."""
PASSED_MAX = 64
"""Flows passed over in one step because what they need is taken while others may go on; the next step goes on there."""


class Router:
    """All pools, what is in flight, and who waits. Used from one thread."""

    def __init__(
        self,
        config: RouterConfig,
        index: Index,
        *,
        meter: Meter | None = None,
        policies: PolicyFactory | None = None,
    ) -> None:
        """Start with an empty fleet; the first `FleetChanged` fills it.

        Args:
            config: Validated.
            index: Of the core, or the reference.
            meter: Receives the router's own metrics.
            policies: Makes the policy of each pool, instead of the registry, until the configuration changes.

        Raises:
            ConfigError: The policy's name is not known.
        """
        self._config = config
        self._index = index
        self._meter = meter or NullMeter()
        self._decider = Decider(config.policy, self._meter, policies)
        self._flow = Flow(config.flow)
        self._retries = Retries(config)
        self._failures = Failures()
        self._admission = Admission(config.flow)
        self._pools: dict[str, Pool] = {}
        self._pool_of: dict[RequestId, Pool] = {}
        self._fleet_version = 0
        self._now_s = 0.0
        self._strays: dict[str, int] = {}
        self._questions: list[Asked] = []
        self._memory = memory.Memory()
        self._taken: memory.Taken | None = None
        self._refusals: list[Command] = []
        self._starved: set[str] = set()
        self._published_s = -math.inf
        self._notes: dict[type[Any], Callable[[Any], None]] = {
            Arrived: self._arrived,
            Moved: self._moved,
            FirstToken: self._first_token,
            Finished: self._finished,
            Failed: self._failed,
            Cancelled: self._cancelled,
            FleetChanged: self._fleet_changed,
            ConfigChanged: self._config_changed,
            Paced: self._paced,
            Tick: self._tick,
            Asked: self._asked,
            Stopping: self._stopping,
        }
        publish_limits(self._meter, config.flow)

    def step(self, events: Sequence[Event]) -> list[Command]:
        """Take note of what happened, then decide what can be decided.

        Args:
            events: In the order in which they happened; times may be slightly out of order.

        Returns:
            Commands: exactly one `Dispatch`, `Shed` or `Deliver` in all for each `Arrived` and each `Failed` without
            `began`, unless the client leaves first (`Deliver` only after a `Failed`); one `Answered` for each `Asked`;
            a `Standing` for each pool whose replicas changed between full service and less.
        """
        notes = self._notes
        for event in events:
            notes[type(event)](event)
        for pool in self._pools.values():
            pool.fleet.now_s = self._now_s
            pool.assume_first_tokens(self._now_s)
            pool.examine(self._now_s)
        commands, self._refusals = self._refusals, []
        if self._flow:
            self._serve_waiting(commands)
        for pool in self._pools.values():
            if pool.health.has_news:
                self._tell_standing(pool, commands)
        if self._questions:
            commands += [answer(question, self._state()) for question in self._questions]
            self._questions.clear()
        if not events or self._now_s - self._published_s >= PUBLISH_INTERVAL_S:
            self._published_s = self._now_s
            publish(self._meter, self._pools, self._flow, self._now_s)
        return commands

    # -- what happened

    def _at(self, time_s: float) -> None:
        if time_s > self._now_s:
            self._now_s = time_s

    def _stray(self, kind: str) -> None:
        self._strays[kind] = self._strays.get(kind, 0) + 1

    def _arrived(self, event: Arrived) -> None:
        request = event.request
        self._at(request.time_s)
        if request.id in self._flow or request.id in self._pool_of:
            self._stray("arrived")
            return
        pool = self._pools.get(request.pool)
        if pool is None:
            self._refusals.append(Shed(request.id, NoReplicaError.code, self._flow.retry_after_s()))
            self._meter.count("warmfront_shed_total", (request.pool, NoReplicaError.code), 1)
            return
        self._retries.arrived()
        pool.fleet.learned.continuation.arrived(request.turn)
        kept_s = self._config.retries.remember_s
        tried = pool.slots_of(self._failures.of(request, self._now_s, kept_s=kept_s))
        self._flow.add(request, self._now_s, tried=tried, attempts=0)

    def _moved(self, event: Moved) -> None:
        self._at(event.time_s)
        pool, flight = self._find(event.id)
        if pool is None or flight is None:
            self._stray("moved")
            return
        if flight.slot is not None:
            pool.health.failed(flight.slot, flight.request, CONNECT, self._now_s)
        if not pool.move(flight, event.slot, self._now_s):
            self._stray("moved")

    def _first_token(self, event: FirstToken) -> None:
        self._at(event.time_s)
        pool, flight = self._find(event.id)
        if pool is None or flight is None:
            self._stray("first_token")
            return
        if flight.slot is not None and flight.slot != event.slot and not pool.move(flight, event.slot, self._now_s):
            self._stray("first_token")
        if flight.slot is not None and flight.request.stream:
            pool.health.progressed(flight.slot, self._now_s)
            pool.health.succeeded(flight.slot, flight.request, self._now_s)
        pool.first_token(flight, self._now_s)

    def _finished(self, event: Finished) -> None:
        self._at(event.time_s)
        pool, flight = self._find(event.id)
        if pool is None or flight is None:
            self._stray("finished")
            return
        slot = flight.slot
        if slot is not None:
            self._judge(pool, flight, slot, event)
        self._end(event.id, event)
        if slot is not None and slot == event.slot and 200 <= event.status < 300:
            self._learn(pool, flight, slot, event)

    def _failed(self, event: Failed) -> None:
        self._at(event.time_s)
        pool, flight = self._find(event.id)
        if pool is None or flight is None:
            self._stray("failed")
            return
        if event.error == LEFT and not event.began:
            self._missed(flight)
            return
        if flight.slot is not None and event.error in REFUSALS:
            pool.health.refused(flight.slot, event.retry_after_s, self._now_s)
        elif flight.slot is not None:
            pool.health.failed(flight.slot, flight.request, event.error, self._now_s)
        self._end(event.id)
        request, tried = flight.request, sorted({*flight.tried, *event.tried})
        if event.began:
            self._remember(pool, request, event.tried)
            return
        present = self._pools.get(request.pool)
        if present is None or not present.untried(request.model, tried):
            answer: Answer = "no_replica"
        else:
            answer = self._retries.ask(event, attempts=flight.attempts, now_s=self._now_s)
        self._meter.count("warmfront_retries_total", (event.error, answer), 1)
        if answer != "again":
            self._remember(pool, request, event.tried)
            self._refusals.append(Deliver(request.id))
            return
        self._flow.add(request, self._now_s, tried=tried, attempts=flight.attempts)

    def _missed(self, flight: Flight) -> None:
        """Decide anew for a request whose replica left between decision and dispatch: no failure of anybody."""
        request = flight.request
        self._end(request.id)
        self._meter.count("warmfront_retries_total", (LEFT, "again"), 1)
        self._flow.add(request, self._now_s, tried=list(flight.tried), attempts=flight.attempts - 1)

    def _remember(self, pool: Pool, request: Request, slots: Sequence[Slot]) -> None:
        """Keep the client's next attempt away from replicas that failed this one."""
        names = [name for slot in slots if (name := pool.fleet_id(slot)) is not None]
        self._failures.note(request, names, self._now_s, kept_s=self._config.retries.remember_s)

    def _judge(self, pool: Pool, flight: Flight, slot: Slot, event: Finished) -> None:
        """Tell the replica's circuit of an answer; client errors say nothing of it."""
        health, request = pool.health, flight.request
        health.worked(slot, self._now_s)
        if event.status in (429, 503):
            health.refused(slot, None, self._now_s)
        elif event.status >= 500:
            health.failed(slot, request, "server_error", self._now_s)
            self._remember(pool, request, [slot])
        elif event.status < 400:
            if request.stream:
                health.progressed(slot, self._now_s)
            if not request.stream or flight.first_token_s is None:
                health.succeeded(slot, request, self._now_s)

    def _cancelled(self, event: Cancelled) -> None:
        self._at(event.time_s)
        if not self._flow.cancel(event.id) and not self._end(event.id):
            self._stray("cancelled")

    def _fleet_changed(self, event: FleetChanged) -> None:
        self._at(event.time_s)
        self._fleet_version = event.fleet.version
        present = {state.name for state in event.fleet.pools}
        for name in [name for name in self._pools if name not in present]:
            gone = self._pools.pop(name)
            gone.leave_all()
            self._decider.forget(name)
            if not self._flow.depth(name):  # else once its requests are refused
                self._flow.forget(name)
            if gone.health.has_news:
                self._refusals.append(Standing(name, []))
        for state in event.fleet.pools:
            if state.name not in self._pools:
                policy = self._config.policy
                self._pools[state.name] = Pool.create(
                    state.name,
                    config=policy.cost,
                    health=self._config.health,
                    seed=policy.seed,
                    choices_max=self._config.choices_max,
                )
                self._pools[state.name].fleet.shares.reweigh(self._config.flow.weights)
            pool = self._pools[state.name]
            pool.fleet.now_s = self._now_s
            pool.follow(state)
            self._admission.follow(pool)
            self._memory.give(pool, self._decider)

    def _config_changed(self, event: ConfigChanged) -> None:
        self._at(event.time_s)
        try:
            config = msgspec.json.decode(event.config, type=Config).router
            self._decider.reconfigure(config.policy)
        except (msgspec.MsgspecError, ConfigError):
            logger.exception("a changed configuration cannot be used; the one before stays in force")
            self._stray("config_changed")
            return
        self._config = config
        self._flow.reconfigure(config.flow)
        self._retries.reconfigure(config)
        self._admission = Admission(config.flow)
        publish_limits(self._meter, config.flow)
        for pool in self._pools.values():
            pool.health.config = config.health
            pool.fleet.choices_max = config.choices_max
            pool.fleet.priority_step = config.policy.cost.priority_step
            pool.fleet.shares.reweigh(config.flow.weights)
            self._admission.follow(pool)

    def _paced(self, event: Paced) -> None:
        self._at(event.time_s)
        pool = self._pools.get(event.pool)
        if pool is None:
            self._stray("paced")
            return
        rows = zip(event.slots, event.gaps, event.gap_seconds, strict=False)
        gaps_s = {slot: seconds / gaps for slot, gaps, seconds in rows if gaps > 0}
        for slot in gaps_s:
            pool.health.progressed(slot, self._now_s)
        pool.paced(gaps_s, self._now_s)

    def _tick(self, event: Tick) -> None:
        self._at(event.time_s)

    def _asked(self, event: Asked) -> None:
        self._at(event.time_s)
        if event.question == memory.TAKE:
            self._taken = self._memory.take(event.payload)
            for pool in self._pools.values():
                pool.fleet.now_s = self._now_s  # ages are told, not moments
                self._memory.give(pool, self._decider)
        self._questions.append(event)

    def _stopping(self, event: Stopping) -> None:
        self._at(event.time_s)
        self._flow.stop(self._now_s + event.grace_s)

    def _find(self, request_id: RequestId) -> tuple[Pool | None, Flight | None]:
        pool = self._pool_of.get(request_id)
        return pool, None if pool is None else pool.flights.get(request_id)

    def _end(self, request_id: RequestId, answer: Finished | None = None) -> bool:
        pool = self._pool_of.pop(request_id, None)
        if pool is None:
            return False
        flight = pool.flights[request_id]
        self._decider.ended(flight, pool.fleet, self._now_s, answer)
        pool.end(request_id)
        self._index.release(request_id)
        return True

    def _learn(self, pool: Pool, flight: Flight, slot: Slot, event: Finished) -> None:
        """Compare an answer with what was predicted, and take its length and duration into the averages."""
        usage, learned = event.usage, pool.fleet.learned
        output_tokens = None if usage is None else usage.output_tokens
        if output_tokens is None and flight.request.stream:
            output_tokens = event.chunks + 1  # engines send a chunk a token, or nearly so
        residence_s = None if flight.first_token_s is None else self._now_s - flight.first_token_s
        learned.finished(slot, output_tokens=output_tokens, residence_s=residence_s)
        name = pool.fleet.id[slot]
        if usage is None or name is None or flight.request.route == "load":
            return
        predicted = flight.predicted_tokens
        accuracy = pool.accuracy.get(name)
        if accuracy is None:
            accuracy = pool.accuracy[name] = Accuracy(name)
        if not accuracy.add(flight.request, predicted, usage):
            return
        reported = usage.cached_tokens or 0
        if flight.sample is not None:
            tokens = flight.request.prompt_tokens
            learned.resolved(
                slot,
                flight.sample,
                guessed=flight.new_tokens,
                computed=max(1, tokens - reported),
                prompt_tokens=tokens,
                guessed_loads=flight.loads,
                loads=flight.loaded(slot, reported),
            )
        pool.reported(flight, slot, reported, self._now_s)
        self._meter.count("warmfront_predicted_cached_tokens_total", (name,), predicted)
        self._meter.count("warmfront_reported_cached_tokens_total", (name,), reported)
        self._meter.observe("warmfront_cached_tokens_error", (name,), reported - predicted)

    # -- what to do

    def _serve_waiting(self, commands: list[Command]) -> None:
        flow = self._flow
        commands += [self._overdue(waiting) for waiting in flow.expired(self._now_s)]
        for waiting in flow.take_new():
            self._offer(waiting, commands)
        for name in flow.pools():
            self._serve(name, commands)

    def _overdue(self, waiting: Waiting) -> Command:
        """Send a request that nothing but an estimate has held back for so long, shed any other."""
        pool = self._pools.get(waiting.request.pool)
        if pool is not None and self._flow.may_still_go(waiting, self._now_s):
            placed = self._place(waiting, pool, only_hard=True)
            if not isinstance(placed, Held):
                return placed
        is_busy = pool is not None and pool.fleet.eligible
        return self._refuse(waiting, QueueTimeoutError.code if is_busy else NoReplicaError.code)

    def _offer(self, waiting: Waiting, commands: list[Command]) -> None:
        """Send a new request at once if nobody waits before it and there is room; let it wait otherwise."""
        flow, name = self._flow, waiting.request.pool
        if flow.is_late(waiting, self._now_s):
            commands.append(self._shed(waiting, QueueTimeoutError.code))
            return
        if not flow.depth(name) and (pool := self._pools.get(name)) is not None:
            placed = self._place(waiting, pool)
            if not isinstance(placed, Held):
                commands.append(placed)
                return
            flow.hold(waiting)
            self._note_held(waiting, placed)
            return
        flow.hold(waiting)
        self._note_held(waiting, None)

    def _note_held(self, waiting: Waiting, held: Held | None) -> None:
        """Count a request that waits; `held`: why it could not be placed, when it was tried."""
        name = waiting.request.pool
        queue = self._flow.queue(name)
        assert queue is not None
        if held is not None:
            queue.held = held
            self._pools[name].held_s = self._now_s
        self._meter.count("warmfront_held_total", (name, queue.held.reason), 1)

    def _serve(self, name: str, commands: list[Command]) -> None:
        """Dispatch a pool's held requests in order until nothing can take the next one, then keep the bounds."""
        queue, pool = self._flow.queue(name), self._pools.get(name)
        assert queue is not None
        if pool is None:
            commands += [self._refuse(waiting, NoReplicaError.code) for waiting in list(queue.requests.values())]
            self._flow.forget(name)
            return
        pool.fleet.held_s = self._now_s - queue.oldest_s()
        self._drain(queue, pool, commands)
        self._tell_starvation(pool)
        self._trim(queue, pool, commands)
        pool.fleet.held_s = 0.0

    def _drain(self, queue: Queue, pool: Pool, commands: list[Command]) -> None:
        passed = 0
        while passed < PASSED_MAX:
            waiting = queue.head()
            if waiting is None:
                queue.resume()
                return
            if queue.waits_for_memory == (waiting.request.id, pool.releases):
                return
            placed = self._place(waiting, pool)
            if not isinstance(placed, Held):
                commands.append(placed)
                continue
            queue.held = placed
            pool.held_s = self._now_s
            if placed.stops_all:
                queue.waits_for_memory = (waiting.request.id, pool.releases) if placed is admission.NO_MEMORY else None
                queue.resume()
                return
            queue.pass_over(waiting)
            passed += 1

    def _trim(self, queue: Queue, pool: Pool, commands: list[Command]) -> None:
        """Keep the bounds of a queue: send what only an estimate holds back, or shed the newest of the least urgent."""
        config = self._config.flow
        while len(queue) > config.queue_max:
            waiting = queue.head() if queue.held.is_soft and config.overflow == "send" else None
            placed = None if waiting is None else self._place(waiting, pool, only_hard=True)
            if placed is None or isinstance(placed, Held):
                code = ShedError.code if config.queue_max or pool.fleet.eligible else NoReplicaError.code
                placed = self._refuse(queue.last(), code)
            commands.append(placed)
        bound = config.queue_max_per_flow
        for flow in queue.grown if bound is not None else ():
            while queue.of_flow.get(flow, 0) > (bound or 0):
                commands.append(self._refuse(queue.last_of(flow), ShedError.code))
        queue.grown.clear()

    def _place(self, waiting: Waiting, pool: Pool, *, only_hard: bool = False) -> Command | Held:
        """Answer one request, or say why it is held; `only_hard`: estimates are no reason."""
        fleet, request = pool.fleet, waiting.request
        eligible, serving = fleet.eligible, pool.serving(request.model)
        if not eligible:
            return admission.NOT_READY
        if not serving:
            return self._refuse(waiting, NoReplicaError.code)
        # What was tried is excluded first, what is full next; preferences choose among what is left.
        untried = pool.untried(request.model, waiting.tried) if waiting.tried else serving
        if not untried:
            if waiting.attempts:
                return self._refuse(waiting, NoReplicaError.code)
            untried = serving  # it failed everywhere, before it came again
        candidates = self._admission.within_limits(pool, untried)
        if not candidates:
            return admission.FULL if untried is eligible or self._admission.is_full(pool) else admission.FULL_FOR_ONE
        patience_s = math.inf if only_hard else self._patience_s(fleet)
        return self._place_among(candidates, waiting, pool, patience_s=patience_s, is_anyone=untried is eligible)

    def _place_among(
        self, candidates: list[Slot], waiting: Waiting, pool: Pool, *, patience_s: float, is_anyone: bool
    ) -> Command | Held:
        """Choose one of the replicas that may take a request, or hold it if all would make it wait."""
        fleet, request, roomy = pool.fleet, waiting.request, candidates
        if patience_s < math.inf:
            roomy = self._admission.unsaturated(pool, candidates)
            held = admission.held_by_ledger(fleet, roomy, patience_s, is_anyone=is_anyone)
            if held is not None:
                return held
            candidates = admission.spared(pool, candidates, roomy)
        overlap = self._overlap(request, pool)
        if patience_s < math.inf and not admission.has_memory(fleet, roomy, patience_s, request, overlap):
            return admission.NO_MEMORY if is_anyone else admission.NO_MEMORY_FOR_ONE
        eligible, is_retry = fleet.eligible, bool(waiting.tried)
        if candidates is eligible:
            decision = self._decider.decide(request, overlap, fleet, retry=False)
        else:
            fleet.allow(candidates)
            decision = self._decider.decide(request, overlap, fleet, retry=is_retry)
            fleet.allow(eligible)
        if decision is None:
            return admission.BY_POLICY
        return self._dispatch(waiting, pool, overlap, decision)

    def _patience_s(self, fleet: Fleet) -> float:
        return self._decider.patience_s(fleet) if self._admission.holds_by_estimate else math.inf

    def _dispatch(self, waiting: Waiting, pool: Pool, overlap: Overlap, decision: Decision) -> Dispatch:
        request, choices = waiting.request, decision.choices
        flight = pool.dispatch(waiting, choices, overlap, self._now_s)
        self._flow.served(waiting, self._now_s, flight.tokens)
        if pool.health.watches:
            pool.admit(self._now_s)
        self._pool_of[request.id] = pool
        if _has_blocks(request):
            try:
                self._index.predict(request, choices[0].slot)
            except LookupError:
                self._stray("predict")
        return Dispatch(request.id, choices, decision.reason)

    def _overlap(self, request: Request, pool: Pool) -> Overlap:
        if not _has_blocks(request):
            return no_overlap(pool.fleet)
        try:
            return padded(self._index.overlap(request), pool.fleet.slots)
        except LookupError:
            self._stray("overlap")
            return no_overlap(pool.fleet)

    def _refuse(self, waiting: Waiting, code: str) -> Shed | Deliver:
        self._flow.cancel(waiting.request.id)
        return self._shed(waiting, code)

    def _shed(self, waiting: Waiting, code: str) -> Shed | Deliver:
        if waiting.attempts:
            return Deliver(waiting.request.id)  # what the engine said is worth more than our words
        self._meter.count("warmfront_shed_total", (waiting.request.pool, code), 1)
        return Shed(waiting.request.id, code, self._flow.retry_after_s())

    def _tell_standing(self, pool: Pool, commands: list[Command]) -> None:
        """Log each change of a replica's state once, count it, and let the core know."""
        for slot, reason in pool.health.opens:
            if (opened := pool.fleet.id[slot]) is not None:
                self._meter.count("warmfront_circuit_opens_total", (opened, reason), 1)
        pool.health.opens.clear()
        changes = pool.health.changes(self._now_s)
        if not changes:
            return
        for slot, verdict in changes.items():
            name = pool.fleet.id[slot]
            if name is None:
                continue  # it has left
            level = logging.WARNING if verdict.state == "open" else logging.INFO
            reason = f" ({verdict.reason})" if verdict.reason else ""
            logger.log(level, "pool %s: replica %s is %s%s", pool.name, name, verdict.state, reason)
            pool.rejudged.add(slot)
        limited = pool.health.limited(self._now_s)
        rows: list[tuple[Slot, str, str]] = [(slot, state, reason) for slot, (state, reason) in limited.items()]
        commands.append(Standing(pool.name, rows))

    def _tell_starvation(self, pool: Pool) -> None:
        starves = not pool.fleet.eligible
        if starves and pool.name not in self._starved:
            self._starved.add(pool.name)
            logger.warning("pool %s: no replica is ready; requests wait", pool.name)
        elif not starves and pool.name in self._starved:
            self._starved.discard(pool.name)
            logger.info("pool %s: a replica is ready again", pool.name)

    def _state(self) -> State:
        return State(
            now_s=self._now_s,
            fleet_version=self._fleet_version,
            policy=self._config.policy,
            decider=self._decider,
            flow=self._flow,
            pools=self._pools,
            strays=self._strays,
            overlap=self._overlap,
            taken=self._taken,
        )


def _has_blocks(request: Request) -> bool:
    return request.route == "prefix" and request.basis != "none"
