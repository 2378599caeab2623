"""Traffic as it was recorded: public traces, and workload files of our own.

Times come from the file and are divided by the load, so that a load of 2 is the same traffic in half the time. What a
user of a recorded conversation takes to think is not divided.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta, Struct

from warmfront.lab.jobs import Job, Step
from warmfront.lab.traces import azure as azure_format
from warmfront.lab.traces import locate
from warmfront.lab.traces import mooncake as mooncake_format
from warmfront.lab.traces import workload as workload_format
from warmfront.lab.workloads.amounts import Natural
from warmfront.lab.workloads.draw import Draw
from warmfront.lab.workloads.registry import kind

Count = Annotated[int, Meta(ge=1)]


class Mooncake(Struct, frozen=True, forbid_unknown_fields=True):
    """A trace in Mooncake's format."""

    file: str = "mooncake_conversation"
    tick_s: Natural = 0.0
    """Requests of equal time are spread over this: 3 for the conversation trace, whose clock ticks that slowly."""
    skip: Annotated[int, Meta(ge=0)] = 0
    """Leave out so many requests at the start."""


@kind("mooncake", Mooncake, clock="own")
def mooncake(parameters: Mooncake, draw: Draw, arrivals: Iterator[float]) -> Iterator[Job]:
    """Yield one request a row. The conversation is known by its second block: the first is shared by all."""
    random = draw.stream("ticks")
    contents: dict[int, int] = {}
    rows = itertools.islice(mooncake_format.rows(locate(parameters.file)), parameters.skip, None)
    for at_s, gap_s, together in _ticks(rows):
        offsets = sorted(random.uniform(0.0, min(parameters.tick_s, gap_s)) for _ in together)
        for row, offset_s in zip(together, offsets, strict=True):
            for block in row.hash_ids:
                if block not in contents:
                    contents[block] = draw.content()
            step = Step(
                prompt=mooncake_format.prompt(row, contents, draw.content()),
                output_tokens=max(1, row.output_length),
                session=row.hash_ids[1] if len(row.hash_ids) > 1 else None,
            )
            yield Job((at_s + offset_s) / draw.load, (step,))


def _ticks(
    rows: Iterator[mooncake_format.Row],
) -> Iterator[tuple[float, float, list[mooncake_format.Row]]]:
    """Yield rows of equal time: seconds from the first row, seconds until the next ones, the rows."""
    ticks = [(timestamp, list(tick)) for timestamp, tick in itertools.groupby(rows, key=lambda row: row.timestamp)]
    following = [timestamp for timestamp, _ in ticks[1:]] + [math.inf]
    for (timestamp, together), next_ms in zip(ticks, following, strict=True):
        yield (timestamp - ticks[0][0]) / 1000, (next_ms - timestamp) / 1000, together


class Azure(Struct, frozen=True, forbid_unknown_fields=True):
    """A trace in Azure's format."""

    file: str = "azure_llm_2023_conv"
    skip: Annotated[int, Meta(ge=0)] = 0
    """Leave out so many requests at the start."""


@kind("azure", Azure, clock="own")
def azure(parameters: Azure, draw: Draw, arrivals: Iterator[float]) -> Iterator[Job]:
    """Yield one request a row, each with a prompt of its own."""
    start_s: float | None = None
    for row in itertools.islice(azure_format.rows(locate(parameters.file)), parameters.skip, None):
        start_s = row.at_s if start_s is None else start_s
        step = Step(prompt=((draw.content(), row.input_tokens),), output_tokens=max(1, row.output_tokens))
        yield Job((row.at_s - start_s) / draw.load, (step,))


class Trace(Struct, frozen=True, forbid_unknown_fields=True):
    """A workload file, as `warmfront trace` writes it."""

    file: str
    """Path; in a regime file relative to that file."""


@kind("trace", Trace, clock="own")
def trace(parameters: Trace, draw: Draw, arrivals: Iterator[float]) -> Iterator[Job]:
    """Yield the jobs of the file."""
    for job in workload_format.jobs(locate(parameters.file)):
        yield Job(job.at_s / draw.load, job.steps)
