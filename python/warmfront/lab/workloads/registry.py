"""The kinds of workload by name, and how a table of a regime file becomes one.

A kind is a struct of parameters and a function that turns arrival times into jobs. It draws only from `Draw`, takes one
arrival time for each job and yields the job before it takes the next; mixtures rely on that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, Literal, TypeVar

import msgspec
from msgspec import Struct

from warmfront.errors import ConfigError
from warmfront.lab.jobs import Job
from warmfront.lab.model import Source
from warmfront.lab.workloads.arrivals import Arrival, Closed, Poisson, times
from warmfront.lab.workloads.draw import Draw
from warmfront.lab.workloads.source import JobSource, UserSource, limited

Parameters = TypeVar("Parameters", bound=Struct)
Jobs = Callable[[Parameters, Draw, Iterator[float]], Iterator[Job]]
Clock = Literal["any", "open", "own"]
"""`any`: contents do not depend on time; `open`: they do, so users who wait cannot drive it; `own`: the kind knows its
times by itself and users may replace them."""


class Kind(Struct, Generic[Parameters], frozen=True):
    """One registered kind."""

    name: str
    parameters: type[Parameters]
    jobs: Jobs[Parameters]
    clock: Clock


class Workload(Struct, frozen=True):
    """A table that has been read and found right."""

    kind: Kind[Any]
    parameters: Struct
    arrival: Arrival | None
    """`None`: not said, which means Poisson, or the kind's own times."""

    def jobs(self, draw: Draw, arrivals: Iterator[float] | None = None) -> Iterator[Job]:
        """Yield jobs without end, or as many as a trace has."""
        if arrivals is None:
            arrivals = times(self.arrival or Poisson(), draw.load, draw.stream("arrivals"))
        return self.kind.jobs(self.parameters, draw, arrivals)

    def limited_jobs(self, draw: Draw) -> Iterator[Job]:
        """Yield jobs that hold `draw.requests` requests together, or fewer when a trace ends."""
        return limited(self.jobs(draw), draw.requests)

    @property
    def waits(self) -> bool:
        """Whether users wait for their answers before they go on."""
        return isinstance(self.arrival, Closed)

    def source(self, draw: Draw) -> Source:
        """Return the running workload."""
        jobs = self.limited_jobs(draw)
        if isinstance(self.arrival, Closed):
            return UserSource(jobs, max(1, round(draw.load)), self.arrival, draw.stream("think"))
        return JobSource(jobs)


KINDS: dict[str, Kind[Any]] = {}


def kind(
    name: str, parameters: type[Parameters], *, clock: Clock = "any"
) -> Callable[[Jobs[Parameters]], Jobs[Parameters]]:
    """Register a function as a kind of workload."""

    def register(jobs: Jobs[Parameters]) -> Jobs[Parameters]:
        assert name not in KINDS, name
        KINDS[name] = Kind(name, parameters, jobs, clock)
        return jobs

    return register


def read(table: Mapping[str, object], field: str = "workload") -> Workload:
    """Read `kind`, `arrival` and the kind's parameters.

    Args:
        table: As in a regime file.
        field: What the table is called in errors.

    Raises:
        ConfigError: Names the field.
    """
    rest = dict(table)
    name = rest.pop("kind", None)
    if not isinstance(name, str) or name not in KINDS:
        raise ConfigError(f"{field}.kind: expected one of {', '.join(sorted(KINDS))}, got {name!r}")
    found = KINDS[name]
    arrival = convert(rest.pop("arrival"), Arrival, f"{field}.arrival") if "arrival" in rest else None
    if found.clock == "open" and isinstance(arrival, Closed):
        raise ConfigError(f"{field}.arrival: kind {name} changes with time, so it cannot be driven by waiting users")
    if found.clock == "own" and arrival is not None and not isinstance(arrival, Closed):
        raise ConfigError(f"{field}.arrival: kind {name} has arrival times of its own; expected none or closed")
    return Workload(found, convert(rest, found.parameters, field), arrival)


def convert(value: object, type_: Any, field: str) -> Any:
    """Convert what TOML or JSON gave into a type.

    Raises:
        ConfigError: Names the field below `field`.
    """
    try:
        return msgspec.convert(value, type_)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `$")
        raise ConfigError(f"{field}{where.rstrip('`')}: {message[:1].lower()}{message[1:]}") from error
