"""Workloads made of workloads: tenants side by side, and times that change.

A part draws from streams of its own, so that adding one leaves the others as they were. Parts take their arrival times
from the whole; a kind with times of its own cannot be one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from msgspec import Meta, Struct
from msgspec.structs import replace

from warmfront.errors import ConfigError
from warmfront.lab.jobs import Job, Step, count
from warmfront.lab.workloads.amounts import Positive
from warmfront.lab.workloads.draw import Draw
from warmfront.lab.workloads.registry import Workload, kind, read

Table = dict[str, Any]


class Part(Struct, frozen=True, forbid_unknown_fields=True):
    """One tenant."""

    workload: Table
    """`kind` and its parameters."""
    share: Positive = 1.0
    """Of the arrivals, relative to the others."""
    group: str = ""
    """Results can be split by it; defaults to the kind."""
    flow: str | None = None
    """Key of fair queueing; defaults to the group."""
    priority: int = 0
    adapter: str | None = None
    """LoRA adapter that all its requests name."""


class Mixture(Struct, frozen=True, forbid_unknown_fields=True):
    """Tenants side by side, each arrival being one of theirs by chance."""

    parts: Annotated[list[Part], Meta(min_length=1)]

    def __post_init__(self) -> None:
        _check([part.workload for part in self.parts], "parts")


@kind("mixture", Mixture)
def mixture(parameters: Mixture, draw: Draw, arrivals: Iterator[float]) -> Iterator[Job]:
    """Yield a job of a part drawn by share."""
    random = draw.stream("parts")
    running = [_Part(part, draw.part(str(number))) for number, part in enumerate(parameters.parts)]
    shares = [part.share for part in parameters.parts]
    for at_s in arrivals:
        (chosen,) = random.choices(running, shares)
        yield chosen.job(at_s)


class Phase(Part, frozen=True, forbid_unknown_fields=True):
    """A stretch of time."""

    rate: Positive = 1.0
    """Arrivals come so many times as fast as the load says."""


class Phases(Struct, frozen=True, forbid_unknown_fields=True):
    """One workload after another. `share` of a phase counts requests, so that phases keep their sizes at any load."""

    phases: Annotated[list[Phase], Meta(min_length=1)]

    def __post_init__(self) -> None:
        _check([phase.workload for phase in self.phases], "phases")


@kind("phases", Phases)
def phases(parameters: Phases, draw: Draw, arrivals: Iterator[float]) -> Iterator[Job]:
    """Yield jobs of the first phase until it has had its share, then of the next."""
    total = sum(phase.share for phase in parameters.phases)
    begun_s = last_s = 0.0
    for number, phase in enumerate(parameters.phases):
        running = _Part(phase, draw.part(str(number)))
        left = draw.requests * phase.share / total
        for at_s in arrivals:
            begun_s, last_s = begun_s + (at_s - last_s) / phase.rate, at_s
            job = running.job(begun_s)
            yield job
            left -= count(job.steps)
            if left <= 0:
                break


class _Part:
    """A part that runs: hands each arrival time to its kind and labels what comes back."""

    def __init__(self, part: Part, draw: Draw) -> None:
        self._part = part
        self._group = part.group or str(part.workload["kind"])
        self._at_s = 0.0
        self._jobs = read(part.workload).jobs(draw, iter(lambda: self._at_s, None))

    def job(self, at_s: float) -> Job:
        self._at_s = at_s
        job = next(self._jobs)
        return Job(job.at_s, tuple(self._labelled(step) for step in job.steps))

    def _labelled(self, step: Step) -> Step:
        part = self._part
        return replace(
            step,
            then=tuple(self._labelled(following) for following in step.then),
            group=self._group,
            flow=part.flow or self._group,
            priority=part.priority,
            adapter=part.adapter or step.adapter,
        )


def _check(tables: list[Table], field: str) -> None:
    """Read each part, so that a wrong one is found with the file and not in the middle of a run."""
    for number, table in enumerate(tables):
        where = f"{field}[{number}].workload"
        try:
            workload = read(table, where)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        _require_part(workload, where)


def _require_part(workload: Workload, where: str) -> None:
    if workload.kind.clock == "own":
        raise ValueError(f"{where}.kind: {workload.kind.name} has arrival times of its own and cannot be a part")
    if workload.arrival is not None:
        raise ValueError(f"{where}.arrival: belongs to the whole workload, not to a part")
