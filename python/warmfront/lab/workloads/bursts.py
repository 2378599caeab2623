"""Requests that belong together and come at once: samples of one prompt, children of one parent.

The first of them has not been computed when the others are routed, so nothing that is known of caches helps; what helps
is to remember where the first one went.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from warmfront.lab.jobs import Job, Step
from warmfront.lab.model import Segment
from warmfront.lab.workloads.amounts import Amount, Lognormal, Natural, draw_count, most
from warmfront.lab.workloads.draw import Draw
from warmfront.lab.workloads.registry import kind

Count = Annotated[int, Meta(ge=1)]

FIRST, LATER = "first", "later"
PARENTS, CHILDREN = "parents", "children"
"""Groups of requests. A mixture's part puts its own in their place."""


class Siblings(Struct, frozen=True, forbid_unknown_fields=True):
    """Best of n: the same new prompt several times, sent as separate requests."""

    samples: Count = 8
    spread_s: Natural = 0.01
    """All samples come within this time."""
    prompt: Amount = Lognormal(mean=4000, cv=0.8, min=500, max=16_000)
    output: Amount = Lognormal(mean=300, cv=0.6, min=10, max=1500)


@kind("siblings", Siblings)
def siblings(parameters: Siblings, draw: Draw, arrivals: Iterator[float]) -> Iterator[Job]:
    """Yield one burst for each arrival."""
    random = draw.stream("bursts")
    for at_s in arrivals:
        session = draw.session()
        prompt = ((draw.content(), draw_count(parameters.prompt, random)),)
        delays = sorted(random.uniform(0.0, parameters.spread_s) for _ in range(parameters.samples))
        steps = [_step(prompt, parameters.output, random, delay_s, session, group=LATER) for delay_s in delays]
        yield Job(at_s, (replace(steps[0], group=FIRST), *steps[1:]))


class FanOut(Struct, frozen=True, forbid_unknown_fields=True):
    """Agents that split their work: a parent answers, then its children begin from parent and answer, all at once."""

    apps: Count = 4
    system: Count = 3000
    task: Amount = Lognormal(mean=5000, cv=0.6, min=500, max=20_000)
    output: Amount = 200
    children: Count = 6
    child: Amount = Lognormal(mean=600, cv=0.6, min=100, max=3000)
    """Own tokens of a child."""
    child_output: Amount = Lognormal(mean=250, cv=0.6, min=10, max=1200)
    delay_s: Natural = 0.05
    """From the parent's answer to the first child."""
    spread_s: Natural = 0.02


@kind("fan_out", FanOut)
def fan_out(parameters: FanOut, draw: Draw, arrivals: Iterator[float]) -> Iterator[Job]:
    """Yield one parent with its children for each arrival."""
    random = draw.stream("families")
    systems = [(content, parameters.system) for content in draw.contents(parameters.apps)]
    for at_s in arrivals:
        yield Job(at_s, (_family(parameters, random.choice(systems), draw, random),))


def _family(parameters: FanOut, system: Segment, draw: Draw, random: Random) -> Step:
    session = draw.session()
    prompt = (system, (draw.content(), draw_count(parameters.task, random)))
    answer, output_tokens = draw.content(), draw_count(parameters.output, random)
    shared = (*prompt, (answer, output_tokens))
    children = [
        _step(
            (*shared, (draw.content(), draw_count(parameters.child, random))),
            parameters.child_output,
            random,
            parameters.delay_s + random.uniform(0.0, parameters.spread_s),
            session,
            turn=1,
            group=CHILDREN,
        )
        for _ in range(parameters.children)
    ]
    return Step(
        prompt=prompt,
        output_tokens=output_tokens,
        output_tokens_max=most(parameters.output),
        answer=answer,
        session=session,
        then=tuple(children),
        group=PARENTS,
    )


def _step(
    prompt: tuple[Segment, ...],
    output: Amount,
    random: Random,
    delay_s: float,
    session: int,
    *,
    turn: int = 0,
    group: str,
) -> Step:
    return Step(
        prompt=prompt,
        output_tokens=draw_count(output, random),
        output_tokens_max=most(output),
        delay_s=delay_s,
        session=session,
        turn=turn,
        group=group,
    )
