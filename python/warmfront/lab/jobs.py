"""What a user sends, planned in full before anything is sent.

A job is one user's errand: a single prompt, a conversation, a parent and its children. It is a tree of steps, drawn
when the job begins and never touched again. When a step is sent depends on when the answer before it came, and so on
the policy; what it holds cannot, because nothing is drawn after the beginning.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator

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
        return (step for _, step in _numbered(self.steps))


def count(steps: tuple[Step, ...]) -> int:
    """Count the steps of a tree."""
    return sum(1 for _ in _numbered(steps))


def cut(steps: tuple[Step, ...], limit: int) -> tuple[Step, ...]:
    """Return the first `limit` steps of a tree, parents first."""
    following: dict[int | None, list[Step]] = defaultdict(list)
    kept = list(enumerate(itertools.islice(_numbered(steps), limit)))
    for number, (parent, step) in reversed(kept):  # what follows is built before what it follows
        following[parent].append(replace(step, then=tuple(reversed(following.pop(number, [])))))
    return tuple(reversed(following[None]))


def _numbered(steps: tuple[Step, ...]) -> Iterator[tuple[int | None, Step]]:
    """Yield the steps of a tree, each with the number of its parent in this order. A chain may be thousands deep."""
    waiting: list[tuple[int | None, Step]] = [(None, step) for step in reversed(steps)]
    numbers = itertools.count()
    while waiting:
        parent, step = waiting.pop()
        yield parent, step
        number = next(numbers)
        waiting.extend((number, following) for following in reversed(step.then))
