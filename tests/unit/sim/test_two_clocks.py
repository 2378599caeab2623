"""One model, two clocks: the runner of `warmfront engine` and virtual time give the same steps for the same input."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence as Row
from random import Random

import msgspec
import pytest
from warmfront import core
from warmfront.clock import ManualClock
from warmfront.reference.request import CacheEvent, EngineRequest, Sequence, StepResult
from warmfront.sim.engine import Engine, EngineConfig
from warmfront.sim.latency import preset
from warmfront.sim.server.runner import Runner

BLOCK_SIZE = 16
Step = tuple[float, int, int]
Arrival = tuple[float, int, int, int]
"""Time, content of the prompt, its length, length of the answer."""


def config(*, blocks: int) -> EngineConfig:
    return EngineConfig(
        latency=preset("llama-3.1-8b-l4").latency,
        blocks=blocks,
        block_size=BLOCK_SIZE,
        max_model_tokens=2000,
        max_batched_tokens=512,
        max_sequences=32,
    )


def arrivals(*, rate: float) -> list[Arrival]:
    """Prompts of a few contents; some come twice at one moment, some into quiet decoding, some to an idle engine."""
    random = Random(11)
    found: list[Arrival] = []
    at_s = 0.0
    for _ in range(120):
        at_s += random.choice([0.0, random.expovariate(rate), 20.0 if random.random() < 0.05 else 0.1])
        found.append((at_s, random.randrange(6), random.randint(1, 900), random.randint(1, 150)))
    return found


class Wall:
    """The runner on a clock that moves only when it sleeps; arrivals interrupt its sleep."""

    def __init__(self, engine: Engine, given: Row[Arrival]) -> None:
        self.steps: list[Step] = []
        self.ends: dict[str, tuple[float, float]] = {}
        self._first: dict[str, float] = {}
        self._is_stepping = False
        self._clock = ManualClock()
        self._given = list(given)
        self._hashes = _hashes(given)
        self._runner = Runner(engine, self._clock, self, sleep=self._sleep)

    async def run(self) -> None:
        task = asyncio.create_task(self._runner.run())
        while len(self.ends) < len(self._hashes):
            if not self._runner.engine.has_work and not self._is_stepping:
                self._arrive_next()
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def _sleep(self, seconds: float) -> None:
        self._is_stepping = True
        until_s = self._clock.now_s() + seconds
        while self._given and self._given[0][0] <= until_s:
            self._arrive_next()
        self._clock.advance(until_s - self._clock.now_s())
        await asyncio.sleep(0)

    def _arrive_next(self) -> None:
        """Let the next arrival come, and those at the same moment."""
        at_s = self._given[0][0]
        self._clock.advance(max(0.0, at_s - self._clock.now_s()))
        while self._given and self._given[0][0] == at_s:
            number = len(self._hashes) - len(self._given)
            _, _, prompt, output = self._given.pop(0)
            self._runner.submit(EngineRequest(str(number), prompt, output, self._hashes[number]), self)

    def stepped(self, result: StepResult) -> None:
        self._is_stepping = False
        self.steps.append((self._clock.now_s(), result.prefill_tokens, result.decode_tokens))

    def changed(self, events: Row[CacheEvent]) -> None:
        """Blocks are compared by what is cached."""

    def admitted(self, sequence: Sequence, now_s: float) -> None:
        """Seen in the steps."""

    def token(self, sequence: Sequence, now_s: float) -> None:
        self._first.setdefault(sequence.request.id, now_s)

    def finished(self, sequence: Sequence, now_s: float) -> None:
        self.ends[sequence.request.id] = (self._first[sequence.request.id], now_s)


def virtual(shape: EngineConfig, given: Row[Arrival]) -> tuple[list[Step], dict[str, tuple[float, float]]]:
    """The same on virtual time."""
    fleet = core.SimFleet(block_size=BLOCK_SIZE, trace=True)
    fleet.join(msgspec.json.encode(shape))
    fleet.start(0)
    fleet.probe()
    fleet.take_events()
    first: dict[str, float] = {}
    ends: dict[str, tuple[float, float]] = {}
    waiting = list(enumerate(given))
    while len(ends) < len(given):
        until_s = waiting[0][1][0] if waiting else 1e9
        now_s = fleet.advance(until_s)
        while waiting and waiting[0][1][0] <= now_s:
            number, (_, content, prompt, output) = waiting.pop(0)
            fleet.arrive(number, [(content, prompt)], output)
            fleet.dispatch(number, [0])
        batch = fleet.take_events()
        for event in msgspec.msgpack.decode(batch) if batch else []:
            if event[0] == "first_token":
                first[str(event[1])] = event[2]
            elif event[0] == "finished":
                ends[str(event[1])] = (first[str(event[1])], event[2])
    return [(end_s, prefill, decodes) for _, end_s, prefill, decodes in fleet.trace()], ends


def _hashes(given: Row[Arrival]) -> list[list[int]]:
    """The hashes that the fleet gives the same contents, answers included."""
    fleet = core.SimFleet(block_size=BLOCK_SIZE)
    found = []
    for number, (_, content, prompt, output) in enumerate(given):
        full, ragged = divmod(prompt, BLOCK_SIZE)
        fleet.arrive(number, [(content, prompt)], output)
        own = [1_000_000 * (number + 1) + block for block in range((ragged + output) // BLOCK_SIZE)]
        found.append([*fleet.blocks(number)[:full], *own])
    return found


@pytest.mark.parametrize(("blocks", "rate"), [(1000, 4.0), (140, 8.0)], ids=["roomy", "pre-empting"])
async def test_both_clocks_give_the_same_steps(blocks: int, rate: float) -> None:
    shape, given = config(blocks=blocks), arrivals(rate=rate)
    engine = Engine(shape)
    wall = Wall(engine, given)
    await wall.run()
    steps, ends = virtual(shape, given)
    assert [step[1:] for step in wall.steps] == [step[1:] for step in steps]
    assert [step[0] for step in wall.steps] == pytest.approx([step[0] for step in steps], abs=1e-6)
    assert wall.ends.keys() == ends.keys()
    for name, times in ends.items():
        assert wall.ends[name] == pytest.approx(times, abs=1e-6)
    assert (engine.counters.preemptions > 0) == (blocks == 140)
