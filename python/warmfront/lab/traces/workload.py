"""Our own format for traffic: JSONL of a header and one line a request, with contents by id and never by text.

    {"format": "warmfront-workload", "version": 1, "origin": "regime chat, load 6, seed 0"}
    {"key": 0, "job": 0, "at_s": 0.12, "prompt": [[1, 1024], [5, 310]], "output_tokens": 207, "answer": 6}
    {"key": 1, "job": 0, "after": 0, "delay_s": 9.4, "prompt": [[1, 1024], [5, 310], [6, 207], [7, 85]], …}

A prompt is a list of (content id, tokens); equal ids mean equal tokens. A line has either `at_s`, seconds from the
start, or `after`, the key of a line above whose answer sets it off, `delay_s` later. Lines of one `job` belong to one
user. Other fields are those of `SimRequest`; those at their default are left out.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from warmfront.errors import ConfigError
from warmfront.lab.jobs import Job, Step
from warmfront.lab.traces import lines

FORMAT = "warmfront-workload"
VERSION = 1

Count = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0)]
Line = TypeVar("Line")


class Header(Struct, frozen=True, omit_defaults=True):
    """The first line."""

    format: str
    version: int
    origin: str = ""
    """How the file was made."""
    block_tokens: Count | None = None
    """Contents are blocks of so many tokens; `None`: of any length."""
    timed: bool = True
    """False: made for users who wait; the times of first requests mean nothing."""


class Row(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One request."""

    key: Natural
    job: Natural
    prompt: Annotated[tuple[tuple[Natural, Count], ...], Meta(min_length=1)]
    output_tokens: Count
    at_s: Seconds | None = None
    after: Natural | None = None
    delay_s: Seconds = 0.0
    output_tokens_max: Count | None = None
    answer: Natural | None = None
    session: int | None = None
    turn: Natural = 0
    flow: str = "default"
    priority: int = 0
    adapter: str | None = None
    group: str = ""


_header = msgspec.json.Decoder(Header)
_row = msgspec.json.Decoder(Row)
_SHARED = tuple(name for name in Step.__struct_fields__ if name not in ("delay_s", "then"))
"""Fields that a row and a step have in common."""


def encode(header: Header, jobs: Iterable[Job]) -> Iterator[bytes]:
    """Yield the lines of a file, each with its newline."""
    yield msgspec.json.encode(header) + b"\n"
    key = 0
    for number, job in enumerate(jobs):
        waiting: list[tuple[int | None, Step]] = [(None, step) for step in reversed(job.steps)]
        while waiting:
            parent, step = waiting.pop()
            yield msgspec.json.encode(_row_of(step, key, number, parent, job.at_s)) + b"\n"
            waiting.extend((key, following) for following in reversed(step.then))
            key += 1


def _row_of(step: Step, key: int, job: int, parent: int | None, at_s: float) -> Row:
    fields = {name: getattr(step, name) for name in _SHARED}
    if parent is None:
        return Row(key=key, job=job, at_s=at_s + step.delay_s, **fields)
    return Row(key=key, job=job, after=parent, delay_s=step.delay_s, **fields)


def header(path: Path) -> Header:
    """Return the header of a file.

    Raises:
        ConfigError: It is not a workload file of this version.
    """
    for number, line in lines(path):
        found = _decoded(_header, line, f"{path}:{number}")
        if found.format != FORMAT or found.version != VERSION:
            raise ConfigError(
                f"{path}:{number}: expected format {FORMAT} version {VERSION}, got {found.format} {found.version}"
            )
        return found
    raise ConfigError(f"{path}: the file is empty")


def rows(path: Path) -> Iterator[Row]:
    """Yield the requests of a file in its order.

    Raises:
        ConfigError: A line is not of this format, or contradicts those above; names file, line and field.
    """
    header(path)
    seen: set[int] = set()
    earlier_s = 0.0
    for number, line in itertools.islice(lines(path), 1, None):
        where = f"{path}:{number}"
        row = _decoded(_row, line, where)
        if (row.at_s is None) == (row.after is None):
            raise ConfigError(f"{where}: expected either at_s or after")
        if row.key in seen:
            raise ConfigError(f"{where}: key {row.key} is not new")
        if row.after is not None and row.after not in seen:
            raise ConfigError(f"{where}: after: no line above has the key {row.after}")
        if row.at_s is not None and row.at_s < earlier_s:
            raise ConfigError(f"{where}: at_s {row.at_s:g} is before that of a line above")
        earlier_s = earlier_s if row.at_s is None else row.at_s
        seen.add(row.key)
        yield row


def jobs(path: Path) -> list[Job]:
    """Return the jobs of a file in the order of their times.

    Raises:
        ConfigError: See `rows`.
    """
    following: dict[int, list[Step]] = defaultdict(list)
    first: dict[int, list[tuple[float, Step]]] = defaultdict(list)
    for row in reversed(list(rows(path))):  # what follows is built before what it follows
        step = Step(
            delay_s=row.delay_s,
            then=tuple(reversed(following.pop(row.key, []))),
            **{name: getattr(row, name) for name in _SHARED},
        )
        if row.after is not None:
            following[row.after].append(step)
        else:
            first[row.job].append((row.at_s or 0.0, step))
    return sorted((_job(begun[::-1]) for _, begun in sorted(first.items())), key=lambda job: job.at_s)


def _job(begun: list[tuple[float, Step]]) -> Job:
    at_s = begun[0][0]
    return Job(at_s, tuple(msgspec.structs.replace(step, delay_s=time_s - at_s) for time_s, step in begun))


def _decoded(decoder: msgspec.json.Decoder[Line], line: bytes, where: str) -> Line:
    try:
        return decoder.decode(line)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{where}: {error}") from error
