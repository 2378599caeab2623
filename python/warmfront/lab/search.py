"""The highest load at which a policy keeps p99 TTFT and p99 TPOT within the targets.

Bisection in the logarithm of the load, because rates differ by factors. It starts at the middle of the loads the regime
names, steps outwards until one load holds and the next does not, then halves the gap until the two are within
`TOLERANCE`. The answer is the highest load that was seen to hold: never a guess between two runs.

What one would get wrong: a single seed near saturation is luck. Every probe runs all seeds and averages the shares of
requests that meet each target, so the same seeds give the same answer, and the same answer for every policy is fair.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from msgspec import Struct

from warmfront.lab.measures import Measures
from warmfront.lab.model import Regime

TOLERANCE = 1.02
"""Ratio of the lowest load that fails to the highest that holds at which the search stops."""
STEP = 1.5
"""Factor between loads while there is no bracket yet."""
PROBES_MAX = 12
"""Bound on the loads that are tried: nothing outside `loads[middle] · STEP ** ±PROBES_MAX` is found."""

Probe = Callable[[float], Measures]
"""Runs one load with all seeds and returns the mean."""


class Sustained(Struct, frozen=True):
    """Result of a search."""

    load: float
    """Highest load seen to hold; 0 when none did."""
    tried: tuple[tuple[float, bool], ...]
    """Every load that was run, in order, and whether it held."""


def search(regime: Regime, probe: Probe, *, probes_max: int = PROBES_MAX, tolerance: float = TOLERANCE) -> Sustained:
    """Find the highest load of one policy in one regime.

    Args:
        regime: Its `loads` say where to begin.
        probe: Called with one load at a time; must be deterministic.
        probes_max: Early stop: after so many loads the best so far is the answer.
        tolerance: See `TOLERANCE`.
    """
    tried: list[tuple[float, bool]] = []
    holding, failing = 0.0, math.inf
    load = _middle(regime.loads)
    while len(tried) < probes_max:
        held = probe(load).holds_in(regime)
        tried.append((load, held))
        holding, failing = (max(holding, load), failing) if held else (holding, min(failing, load))
        if failing <= holding * tolerance:
            break
        load = _next(holding, failing)
    return Sustained(load=holding, tried=tuple(tried))


def interpolate(points: Sequence[tuple[float, Measures]], regime: Regime) -> float | None:
    """Estimate the highest load from runs at given loads, without running more.

    Where the p99 of TTFT over target crosses 1 between two neighbours that both have a figure, a straight line in
    logarithms is followed; beside an infinite figure, or one whose TPOT fails, the last load that holds is the answer.

    Args:
        points: Load and figures, in any order.
        regime: In which they were run.

    Returns:
        The load, which is only a lower bound when even the highest one holds; `None` when the lowest one fails.
    """
    ordered = sorted(points, key=lambda point: point[0])
    answer: float | None = None
    for number, (load, measures) in enumerate(ordered):
        if not measures.holds_in(regime):
            break
        answer = load if number + 1 == len(ordered) else _crossing(regime, load, measures, *ordered[number + 1])
    return answer


def _crossing(regime: Regime, load: float, measures: Measures, next_load: float, following: Measures) -> float:
    before, after = measures.overrun_p99, following.overrun_p99
    if following.holds_in(regime) or before is None or after is None or not 0 < before <= 1 < after:
        return load
    share = math.log(1 / before) / math.log(after / before)
    return math.exp(math.log(load) + share * (math.log(next_load) - math.log(load)))


def _middle(loads: Sequence[float]) -> float:
    return sorted(loads)[len(loads) // 2]


def _next(holding: float, failing: float) -> float:
    if not holding:
        return failing / STEP
    return holding * STEP if math.isinf(failing) else math.sqrt(holding * failing)
