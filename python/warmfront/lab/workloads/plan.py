"""What a user sends, planned in full before anything is sent.

A job is one user's errand: a single prompt, a conversation, a parent and its children. It is a tree of steps, drawn
when the job begins and never touched again. When a step is sent depends on when the answer before it came, and so on
the policy; what it holds cannot, because nothing is drawn after the beginning.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from random import Random

from msgspec import Struct
from msgspec.structs import replace

from warmfront.lab.model import Segment


class Step(Struct, frozen=True):
    """One request of a job. Fields are those of `SimRequest`."""

    prompt: tuple[Segment, ...]
    output_tokens: int
    output_tokens_max: int | None = None
    answer: int | None = None
    delay_s: float = 0.0
    """After the job's arrival, or after the end of the answer before."""
    then: tuple[Step, ...] = ()
    """What the answer sets off."""
    session: int | None = None
    turn: int = 0
    flow: str = "default"
    priority: int = 0
    adapter: str | None = None
    group: str = ""


class Job(Struct, frozen=True):
    """Steps that begin together, and what follows from them."""

    at_s: float
    steps: tuple[Step, ...]

    def walk(self) -> Iterator[Step]:
        """Yield all steps, parents first."""
        waiting = list(reversed(self.steps))
        while waiting:
            step = waiting.pop()
            yield step
            waiting.extend(reversed(step.then))


def cut(steps: tuple[Step, ...], limit: int) -> tuple[Step, ...]:
    """Return a tree of at most `limit` steps, parents first."""
    kept: list[Step] = []
    for step in steps:
        if limit <= 0:
            break
        then = cut(step.then, limit - 1)
        limit -= 1 + count(then)
        kept.append(step if then == step.then else replace(step, then=then))
    return tuple(kept)


def count(steps: tuple[Step, ...]) -> int:
    """Count the steps of a tree."""
    return sum(1 for _ in Job(0.0, steps).walk())


class Draw:
    """What a workload is made from: random streams by name, fresh content ids, and the size of the run.

    Streams of different names are independent, so that drawing more from one leaves the others as they were. Content
    and session ids are shared with the parts of a mixture: no two parts ever mean the same content by accident.
    """

    def __init__(self, *, seed: int, load: float, requests: int, path: str = "", ids: _Ids | None = None) -> None:
        self.load = load
        self.requests = requests
        self._seed = seed
        self._path = path
        self._ids = ids or _Ids()

    def stream(self, name: str) -> Random:
        """Return a new stream; the same name begins it anew."""
        return Random(f"{self._seed}/{self._path}{name}")

    def part(self, name: str) -> Draw:
        """Return the same for a part of this workload, with streams of its own."""
        return Draw(seed=self._seed, load=self.load, requests=self.requests, path=f"{self._path}{name}/", ids=self._ids)

    def contents(self, number: int) -> range:
        """Return content ids that mean nothing yet."""
        start = self._ids.content
        self._ids.content += number
        return range(start, self._ids.content)

    def content(self) -> int:
        """Return one such id."""
        return self.contents(1).start

    def session(self) -> int:
        """Return a number for one more conversation."""
        return next(self._ids.sessions)


class _Ids:
    def __init__(self) -> None:
        self.content = 1
        self.sessions = itertools.count()
