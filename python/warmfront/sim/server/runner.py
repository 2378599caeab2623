"""Runs the engine model on the wall clock.

One task alternates between a step of the model and sleeping until that step ends; only then are its tokens and events
let out, as on a real GPU. When the machine is late the next step starts at its planned time, so delays do not add up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from collections.abc import Sequence as Row
from typing import Protocol

from warmfront.clock import Clock
from warmfront.reference.request import CacheEvent, EngineRequest, Sequence, StepResult
from warmfront.sim.engine import Engine

LATENESS_S_MAX = 0.25
"""A step that would have started longer ago starts now: the machine could not keep up, and time is lost."""


class Listener(Protocol):
    """Who waits for the tokens of a sequence."""

    def admitted(self, sequence: Sequence, now_s: float) -> None:
        """The sequence runs for the first time, or again after a pre-emption."""

    def token(self, sequence: Sequence, now_s: float) -> None:
        """One more token of the answer exists."""

    def finished(self, sequence: Sequence, now_s: float) -> None:
        """That was the last one."""


class Observer(Protocol):
    """Who watches all steps."""

    def stepped(self, result: StepResult) -> None:
        """A step has ended."""

    def changed(self, events: Row[CacheEvent]) -> None:
        """The cache has changed."""


class Runner:
    """One engine and the listeners of its sequences."""

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        observer: Observer,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Wrap an engine; `run` moves it, and waits by `sleep` for each step to end."""
        self.engine = engine
        self._clock = clock
        self._observer = observer
        self._listeners: dict[Sequence, Listener] = {}
        self._work = asyncio.Event()
        self._sleep = sleep

    def submit(self, request: EngineRequest, listener: Listener) -> Sequence:
        """Queue a request; raises as `Engine.submit`."""
        sequence = self.engine.submit(request)
        self._listeners[sequence] = listener
        self._work.set()
        return sequence

    def abort(self, sequence: Sequence) -> None:
        """Drop a sequence whose client has gone."""
        self.engine.abort(sequence)
        self._listeners.pop(sequence, None)

    async def run(self) -> None:
        """Step until cancelled."""
        due_s = self._clock.now_s()
        while True:
            if not self.engine.has_work:
                self._work.clear()
                await self._work.wait()
                due_s = self._clock.now_s()
            result = self.engine.step()
            due_s = max(due_s, self._clock.now_s() - LATENESS_S_MAX) + result.duration_s
            await self._sleep(max(0.0, due_s - self._clock.now_s()))
            self._deliver(result)

    def _deliver(self, result: StepResult) -> None:
        now_s = self._clock.now_s()
        listeners = self._listeners
        # Events first: whoever sees a token may rely on the blocks before it having been announced.
        self._observer.changed(result.events)
        self._observer.stepped(result)
        for sequence in result.admitted:
            if (listener := listeners.get(sequence)) is not None:
                listener.admitted(sequence, now_s - result.duration_s)
        for sequence in result.sampled:
            if (listener := listeners.get(sequence)) is not None:
                listener.token(sequence, now_s)
        for sequence in result.finished:
            if (listener := listeners.pop(sequence, None)) is not None:
                listener.finished(sequence, now_s)
