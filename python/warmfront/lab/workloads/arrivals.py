"""When jobs begin: an open process at a rate, or users who each wait for their answer.

In an open loop a slow fleet meets the same arrivals as a fast one. In a closed loop a fixed number of users each run
one job after another, so that a slow fleet is asked less: throughput shows what latency would otherwise hide.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from random import Random
from typing import Annotated

from msgspec import Meta, Struct

from warmfront.lab.workloads.amounts import Amount, Natural, Positive


class Poisson(Struct, frozen=True, forbid_unknown_fields=True, tag_field="process", tag="poisson"):
    """Many users who do not know of each other."""


class Even(Struct, frozen=True, forbid_unknown_fields=True, tag_field="process", tag="even"):
    """Equal gaps."""


class Bursty(Struct, frozen=True, forbid_unknown_fields=True, tag_field="process", tag="bursty"):
    """Gamma-distributed gaps: clumps and pauses."""

    cv: Annotated[float, Meta(gt=1)]
    """Standard deviation of the gaps over their mean; Poisson has 1."""


class Closed(Struct, frozen=True, forbid_unknown_fields=True, tag_field="process", tag="closed"):
    """As many users as the load says, each with one job at a time."""

    think_s: Amount = 0.0
    """Between the end of one job and the beginning of the user's next."""
    ramp_s: Natural = 5.0
    """The users begin evenly spread over this time."""


Open = Poisson | Even | Bursty
Arrival = Open | Closed


def times(arrival: Arrival, rate: Positive, random: Random) -> Iterator[float]:
    """Yield the times of a process, without end; zeros for a closed one, where answers give the times."""
    if isinstance(arrival, Closed):
        yield from itertools.repeat(0.0)
    now_s = 0.0
    while True:
        now_s += _gap(arrival, random) / rate
        yield now_s


def _gap(arrival: Arrival, random: Random) -> float:
    """Draw a gap with mean 1."""
    match arrival:
        case Even():
            return 1.0
        case Bursty(cv=cv):
            return random.gammavariate(1.0 / cv**2, cv**2)
        case _:
            return random.expovariate(1.0)
