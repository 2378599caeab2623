"""Random amounts: tokens of a prompt, seconds of thought, turns of a conversation.

An amount in a regime file is a number, or a table `{shape = "lognormal", mean = 300, cv = 0.8, max = 2000}`. Bounds cut
what is drawn, so that the mean of what comes out is a little below `mean` where the tail is long.
"""

from __future__ import annotations

import math
from random import Random
from typing import Annotated

from msgspec import Meta, Struct

Positive = Annotated[float, Meta(gt=0)]
Natural = Annotated[float, Meta(ge=0)]


class Lognormal(Struct, frozen=True, forbid_unknown_fields=True, tag_field="shape", tag="lognormal"):
    """What lengths of prompts and answers look like."""

    mean: Positive
    cv: Positive
    """Standard deviation over mean."""
    max: Positive
    min: Natural = 1.0

    def draw(self, random: Random) -> float:
        """Draw one."""
        variance = math.log1p(self.cv * self.cv)
        drawn = random.lognormvariate(math.log(self.mean) - variance / 2, math.sqrt(variance))
        return min(self.max, max(self.min, drawn))


class Pareto(Struct, frozen=True, forbid_unknown_fields=True, tag_field="shape", tag="pareto"):
    """A heavy tail: a few are far longer than all others."""

    min: Positive
    exponent: Positive
    """At 1.25 the mean without `max` is five times `min`; at 1 and below there is none."""
    max: Positive

    def draw(self, random: Random) -> float:
        """Draw one."""
        return min(self.max, self.min * random.paretovariate(self.exponent))


class Exponential(Struct, frozen=True, forbid_unknown_fields=True, tag_field="shape", tag="exponential"):
    """Times between things that do not know of each other."""

    mean: Positive
    max: Positive
    min: Natural = 0.0
    """Added before the drawing, so that the mean stays `mean`."""

    def draw(self, random: Random) -> float:
        """Draw one."""
        return min(self.max, self.min + random.expovariate(1.0) * (self.mean - self.min))


class Geometric(Struct, frozen=True, forbid_unknown_fields=True, tag_field="shape", tag="geometric"):
    """Whole numbers from `min`; after each it is equally likely that there is one more."""

    mean: Positive
    max: Positive
    min: Natural = 1.0

    def draw(self, random: Random) -> float:
        """Draw one."""
        excess = self.mean - self.min
        drawn = math.log(1.0 - random.random()) / math.log(excess / (1.0 + excess)) if excess > 0 else 0.0
        return min(self.max, self.min + math.floor(drawn))


class Uniform(Struct, frozen=True, forbid_unknown_fields=True, tag_field="shape", tag="uniform"):
    """Anything between two bounds."""

    min: Natural
    max: Positive

    def draw(self, random: Random) -> float:
        """Draw one."""
        return random.uniform(self.min, self.max)


Amount = Natural | Lognormal | Pareto | Exponential | Geometric | Uniform


def draw(amount: Amount, random: Random) -> float:
    """Draw one; a number is always itself and takes nothing from the stream."""
    return amount if isinstance(amount, int | float) else amount.draw(random)


def draw_count(amount: Amount, random: Random) -> int:
    """Draw a whole number of at least 1: tokens, turns, children."""
    return max(1, round(draw(amount, random)))


def most(amount: Amount) -> int:
    """Return the largest count that can be drawn: what a client writes as limit of the answer."""
    return max(1, round(amount if isinstance(amount, int | float) else amount.max))
