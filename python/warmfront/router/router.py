"""The function in the middle: `Router.step(events) -> commands`.

It does no I/O, reads no clock (time comes with the events) and draws no unseeded random number, so recorded inputs
replayed give the same commands byte for byte. First all events of a batch are noted in the ledger, then the waiting
requests are served in order; each decision is charged at once, so that the next one in the same batch sees it.

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
from warmfront.errors import NoReplicaError, QueueTimeoutError, ShedError, UpstreamConnectError
from warmfront.policy.base import no_overlap
from warmfront.policy.registry import PolicyFactory
from warmfront.router import memory
from warmfront.router.accuracy import Accuracy
from warmfront.router.answers import State, answer
from warmfront.router.deciding import Decider, Decision
from warmfront.router.fleet import Flight, Pool, padded
from warmfront.router.flow import Flow, Waiting
from warmfront.router.index import Index
from warmfront.router.meter import Meter, NullMeter
from warmfront.router.publish import publish
from warmfront.types import (
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
    Moved,
    Overlap,
    Paced,
    Request,
    RequestId,
    Shed,
    Slot,
    Stopping,
    Tick,
)

logger = logging.getLogger(__name__)

PUBLISH_INTERVAL_S = 0.1
"""Gauges are set no more often than this while events come, and at once when none do: a scrape sees no more."""


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

    def step(self, events: Sequence[Event]) -> list[Command]:
        """Take note of what happened, then decide what can be decided.

        Args:
            events: In the order in which they happened; times may be slightly out of order.

        Returns:
            Commands: exactly one `Dispatch` or `Shed` in all for each `Arrived` and each `Failed` that may be tried
            again, unless the client leaves first; one `Answered` for each `Asked`.
        """
        notes = self._notes
        for event in events:
            notes[type(event)](event)
        for pool in self._pools.values():
            pool.fleet.now_s = self._now_s
            pool.assume_first_tokens(self._now_s)
        commands, self._refusals = self._refusals, []
        if self._flow:
            self._serve_waiting(commands)
        if self._questions:
            commands += [answer(question, self._state()) for question in self._questions]
            self._questions.clear()
        if not events or self._now_s - self._published_s >= PUBLISH_INTERVAL_S:
            self._published_s = self._now_s
            publish(self._meter, self._pools, self._flow)
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
            return
        pool.fleet.learned.continuation.arrived(request.turn)
        self._flow.add(request, self._now_s, tried=[], attempts=0)

    def _moved(self, event: Moved) -> None:
        self._at(event.time_s)
        pool, flight = self._find(event.id)
        if pool is None or flight is None or not pool.move(flight, event.slot, self._now_s):
            self._stray("moved")

    def _first_token(self, event: FirstToken) -> None:
        self._at(event.time_s)
        pool, flight = self._find(event.id)
        if pool is None or flight is None:
            self._stray("first_token")
            return
        if flight.slot is not None and flight.slot != event.slot and not pool.move(flight, event.slot, self._now_s):
            self._stray("first_token")
        pool.first_token(flight, self._now_s)

    def _finished(self, event: Finished) -> None:
        self._at(event.time_s)
        pool, flight = self._find(event.id)
        if pool is None or flight is None:
            self._stray("finished")
            return
        slot = flight.slot
        self._end(event.id, event)
        if slot is not None and slot == event.slot and 200 <= event.status < 300:
            self._learn(pool, flight, slot, event)

    def _failed(self, event: Failed) -> None:
        self._at(event.time_s)
        _, flight = self._find(event.id)
        if flight is None:
            self._stray("failed")
            return
        self._end(event.id)
        if event.began:
            return
        request = flight.request
        if flight.attempts > self._config.retries_max or request.pool not in self._pools:
            self._refusals.append(Shed(request.id, UpstreamConnectError.code))
            return
        tried = sorted({*flight.tried, *event.tried})
        self._flow.add(request, self._now_s, tried=tried, attempts=flight.attempts)

    def _cancelled(self, event: Cancelled) -> None:
        self._at(event.time_s)
        if not self._flow.cancel(event.id) and not self._end(event.id):
            self._stray("cancelled")

    def _fleet_changed(self, event: FleetChanged) -> None:
        self._at(event.time_s)
        self._fleet_version = event.fleet.version
        present = {state.name for state in event.fleet.pools}
        for name in [name for name in self._pools if name not in present]:
            self._pools.pop(name).leave_all()
            self._decider.forget(name)
        for state in event.fleet.pools:
            if state.name not in self._pools:
                policy = self._config.policy
                self._pools[state.name] = Pool.create(
                    state.name, config=policy.cost, seed=policy.seed, choices_max=self._config.choices_max
                )
            self._pools[state.name].fleet.now_s = self._now_s
            self._pools[state.name].follow(state)
            self._memory.give(self._pools[state.name], self._decider)

    def _config_changed(self, event: ConfigChanged) -> None:
        self._at(event.time_s)
        try:
            config = msgspec.json.decode(event.config, type=Config).router
        except msgspec.MsgspecError:
            logger.exception("a changed configuration cannot be read; the one before stays in force")
            self._stray("config_changed")
            return
        self._config = config
        self._flow.reconfigure(config.flow)
        self._decider.reconfigure(config.policy)
        for pool in self._pools.values():
            pool.fleet.choices_max = config.choices_max

    def _paced(self, event: Paced) -> None:
        self._at(event.time_s)
        pool = self._pools.get(event.pool)
        if pool is None:
            self._stray("paced")
            return
        rows = zip(event.slots, event.gaps, event.gap_seconds, strict=False)
        pool.paced({slot: seconds / gaps for slot, gaps, seconds in rows if gaps > 0}, self._now_s)

    def _tick(self, event: Tick) -> None:
        self._at(event.time_s)

    def _asked(self, event: Asked) -> None:
        self._at(event.time_s)
        if event.question == memory.TAKE:
            self._taken = self._memory.take(event.payload)
            for pool in self._pools.values():
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
            )
        learned.credit.learn(
            flight.credit_bucket,
            exact=pool.fleet.exact[slot],
            predicted_tokens=predicted,
            reported_tokens=reported,
        )
        self._meter.count("warmfront_predicted_cached_tokens_total", (name,), predicted)
        self._meter.count("warmfront_reported_cached_tokens_total", (name,), reported)
        self._meter.observe("warmfront_cached_tokens_error", (name,), reported - predicted)

    # -- what to do

    def _serve_waiting(self, commands: list[Command]) -> None:
        commands += [self._shed(waiting, QueueTimeoutError.code) for waiting in self._flow.expired(self._now_s)]
        for name in self._flow.pools():
            self._serve(name, commands)

    def _serve(self, name: str, commands: list[Command]) -> None:
        """Dispatch a pool's waiting requests in order until nothing can take the next one."""
        pool = self._pools.get(name)
        if pool is None:
            commands += [self._refuse(waiting, NoReplicaError.code) for waiting in self._flow.waiting(name)]
            return
        for waiting in self._flow.waiting(name):
            command = self._decide(waiting, pool)
            if command is None:
                break
            commands.append(command)
        self._tell_starvation(pool)
        beyond = self._flow.overflowing(name)
        if beyond:
            code = ShedError.code if self._config.flow.queue_max else NoReplicaError.code
            commands += [self._shed(waiting, code) for waiting in beyond]

    def _decide(self, waiting: Waiting, pool: Pool) -> Command | None:
        """Answer one request; `None` to hold it."""
        fleet, request = pool.fleet, waiting.request
        eligible, serving = fleet.eligible, pool.serving(request.model)
        if not eligible:
            return None
        if not serving:
            return self._refuse(waiting, NoReplicaError.code)
        is_retry = waiting.attempts > 0
        untried = [slot for slot in serving if slot not in waiting.tried] if is_retry else serving
        if not untried:
            return self._refuse(waiting, UpstreamConnectError.code)
        overlap = self._overlap(request, pool)
        if untried is eligible:
            decision = self._decider.decide(request, overlap, fleet, retry=False)
        else:
            fleet.allow(untried)
            decision = self._decider.decide(request, overlap, fleet, retry=is_retry)
            fleet.allow(eligible)
        if decision is None:
            return None
        return self._dispatch(waiting, pool, overlap, decision)

    def _dispatch(self, waiting: Waiting, pool: Pool, overlap: Overlap, decision: Decision) -> Dispatch:
        request, choices = waiting.request, decision.choices
        self._flow.served(waiting, self._now_s)
        pool.dispatch(waiting, choices, overlap, self._now_s)
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

    def _refuse(self, waiting: Waiting, code: str) -> Shed:
        self._flow.cancel(waiting.request.id)
        return self._shed(waiting, code)

    def _shed(self, waiting: Waiting, code: str) -> Shed:
        retry_after_s = None if code == UpstreamConnectError.code else self._flow.retry_after_s()
        return Shed(waiting.request.id, code, retry_after_s)

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
