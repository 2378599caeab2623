"""Recorded inputs, replayed: the same events and overlap answers must give the same commands, byte for byte."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from warmfront.config import RouterConfig
from warmfront.router import Router
from warmfront.router.record import Step, read
from warmfront.types import Command, Overlap, Request, RequestId, Slot


class Difference(Struct, frozen=True):
    """The first step whose commands are not those of the recording."""

    step: int
    recorded: list[Command]
    replayed: list[Command]


class ReplayReport(Struct, frozen=True):
    """What a replay found."""

    steps: int
    events: int
    commands: int
    differing_steps: int
    first_difference: Difference | None

    @property
    def is_identical(self) -> bool:
        """Whether every step gave the recorded bytes."""
        return self.differing_steps == 0


class RecordedIndex:
    """Answers lookups in the order in which the recording answered them."""

    def __init__(self) -> None:
        self._answers: deque[Overlap | None] = deque()

    def load(self, overlaps: list[Overlap | None]) -> None:
        """Take the answers of one step; answers left from the step before are dropped."""
        self._answers = deque(overlaps)

    def overlap(self, request: Request) -> Overlap:
        """Return the next answer.

        Raises:
            LookupError: The recording has none: the request was unknown, or this router asks more than that one did.
        """
        answer = self._answers.popleft() if self._answers else None
        if answer is None:
            raise LookupError(f"no recorded overlap for request {request.id}")
        return answer

    def predict(self, request: Request, slot: Slot) -> None:
        """Do nothing: the recorded answers hold the effect."""

    def release(self, request_id: RequestId) -> None:
        """Do nothing, likewise."""


def replay(path: Path, *, config: RouterConfig | None = None) -> ReplayReport:
    """Run a recording through a router and compare.

    Args:
        path: Written by a `RecordedRouter`.
        config: Instead of the recorded one, to see what other settings would have decided. The recorded overlaps are
            then only approximately right, since they hold the effect of the recorded decisions.

    Raises:
        RecordingError: Not a recording.
        ConfigError: The policy's name is not known here.
    """
    header, steps = read(path)
    index = RecordedIndex()
    router = Router(replace(config or header.config, record=None), index)
    encode = msgspec.msgpack.encode
    count = events = commands = differing = 0
    first: Difference | None = None
    for step in steps:
        replayed = _replay(router, index, step)
        if encode(replayed) != encode(step.commands):
            differing += 1
            first = first or Difference(count, step.commands, replayed)
        count += 1
        events += len(step.events)
        commands += len(step.commands)
    return ReplayReport(count, events, commands, differing, first)


def _replay(router: Router, index: RecordedIndex, step: Step) -> list[Command]:
    index.load(step.overlaps)
    return router.step(step.events)
