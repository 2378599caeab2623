"""Conversations: each prompt is the one before, its answer, and something new.

Chat is people who read and write; agents are programs that call tools, come back within seconds and carry ever longer
contexts. Both are chains of steps, planned in full when the conversation begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from warmfront.lab.jobs import Job, Step
from warmfront.lab.model import Segment
from warmfront.lab.workloads.amounts import (
    Amount,
    Exponential,
    Geometric,
    Lognormal,
    Positive,
    Uniform,
    draw_count,
    most,
)
from warmfront.lab.workloads.amounts import draw as draw_amount
from warmfront.lab.workloads.draw import Draw
from warmfront.lab.workloads.registry import kind

TURNS_MAX = 200
"""Longest conversation: a chain of steps is as deep as it has turns."""


class Chat(Struct, frozen=True, forbid_unknown_fields=True):
    """People who talk to a few applications."""

    apps: Annotated[tuple[Positive, ...], Meta(min_length=1)] = (1.0, 1.0, 1.0, 1.0)
    """Relative popularity; each application has a system prompt of its own."""
    system: Annotated[int, Meta(ge=1)] = 1024
    opening: Amount = Lognormal(mean=700, cv=1.6, min=30, max=18_000)
    """What a conversation begins with, behind the system prompt."""
    user: Amount = Lognormal(mean=200, cv=1.5, min=10, max=6000)
    output: Amount = Lognormal(mean=300, cv=0.8, min=10, max=2000)
    turns: Amount = Geometric(mean=6, min=2, max=60)
    think_s: Amount = Exponential(mean=20, min=2, max=300)
    context_max: Annotated[int, Meta(ge=1)] = 30_000
    """No further turn once prompt and answer are longer."""


class Agent(Chat, frozen=True, forbid_unknown_fields=True):
    """Programs that read, run and edit: many short answers to long prompts, seconds apart."""

    apps: Annotated[tuple[Positive, ...], Meta(min_length=1)] = (0.6, 0.3, 0.1)
    system: Annotated[int, Meta(ge=1)] = 6000
    opening: Amount = Lognormal(mean=3000, cv=1.0, min=200, max=20_000)
    user: Amount = Lognormal(mean=1200, cv=1.5, min=50, max=12_000)
    output: Amount = Lognormal(mean=180, cv=1.0, min=20, max=2000)
    turns: Amount = Uniform(min=6, max=35)
    think_s: Amount = Lognormal(mean=3.3, cv=1.5, min=0.4, max=60)
    context_max: Annotated[int, Meta(ge=1)] = 110_000


@kind("chat", Chat)
def chat(parameters: Chat, draw: Draw, arrivals: Iterator[float]) -> Iterator[Job]:
    """Yield one conversation for each arrival."""
    random = draw.stream("apps")
    systems = [(content, parameters.system) for content in draw.contents(len(parameters.apps))]
    for at_s in arrivals:
        (system,) = random.choices(systems, parameters.apps)
        session = draw.session()
        yield Job(at_s, (_conversation(parameters, system, session, draw, draw.stream(f"session {session}")),))


@kind("agent", Agent)
def agent(parameters: Agent, draw: Draw, arrivals: Iterator[float]) -> Iterator[Job]:
    """Yield one errand of an agent for each arrival."""
    return chat(parameters, draw, arrivals)


def _conversation(parameters: Chat, system: Segment, session: int, draw: Draw, random: Random) -> Step:
    turns = min(TURNS_MAX, draw_count(parameters.turns, random))
    context: tuple[Segment, ...] = (system,)
    steps: list[Step] = []
    for turn in range(turns):
        said = parameters.user if turn else parameters.opening
        prompt = (*context, (draw.content(), draw_count(said, random)))
        output_tokens, answer = draw_count(parameters.output, random), draw.content()
        delay_s = draw_amount(parameters.think_s, random) if turn else 0.0
        context = (*prompt, (answer, output_tokens))
        steps.append(
            Step(
                prompt=prompt,
                output_tokens=output_tokens,
                output_tokens_max=most(parameters.output),
                answer=answer,
                delay_s=delay_s,
                session=session,
                turn=turn,
            )
        )
        if sum(tokens for _, tokens in context) > parameters.context_max:
            break
    return _chained(steps)


def _chained(steps: Sequence[Step]) -> Step:
    """Return the first step, with each of the others behind the one before it."""
    following = steps[-1]
    for step in reversed(steps[:-1]):
        following = replace(step, then=(following,))
    return following
