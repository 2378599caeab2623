"""Results of many runs as one value, with all that is needed to make them again.

A cell is one regime, policy and load, averaged over the seeds. Scores compare a cell with the best policy of the same
regime and load: 1 is the best, 0.5 is twice as late (or half as good), always higher is better, never above 1.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from warmfront.lab.measures import Figures, Measures
from warmfront.lab.model import Regime

WITHIN = 0.97
"""A score from here on counts as at the best: within 3 %."""


class Metric(Struct, frozen=True):
    """A figure that policies are compared by."""

    field: str
    """Of `Figures`, or of `Measures`."""
    title: str
    unit: Literal["s", "ms", "1/s", "%", "count", ""]
    is_higher_better: bool = False

    def of(self, figures: Figures) -> float | None:
        """Return the figure; `None`: infinitely late."""
        value = getattr(figures, self.field)
        assert value is None or isinstance(value, float | int)
        return value

    def show(self, figures: Figures) -> str:
        """Return the figure in its unit with three significant digits."""
        value = self.of(figures)
        if value is None:
            return "never"
        if self.unit == "count":
            return f"{value:,.4g}"
        factor, suffix = {"ms": (1e3, " ms"), "s": (1, " s"), "%": (100, " %")}.get(self.unit, (1, ""))
        return f"{significant(value * factor)}{suffix}"


TTFT_P99 = Metric("ttft_p99_s", "TTFT p99", "s")
GOODPUT = Metric("goodput", "goodput", "1/s", is_higher_better=True)
ITL_P99 = Metric("itl_p99_s", "ITL p99", "ms")
COMPARED = (TTFT_P99, GOODPUT, ITL_P99)
"""What the default policy is held to in every cell."""
TPOT_P99 = Metric("tpot_p99_s", "TPOT p99", "ms")
COMPARED_IN_GROUPS = (TTFT_P99, GOODPUT, TPOT_P99)
"""The same for the requests of one group, as far as the regime wants it compared by them."""


class Search(Struct, frozen=True):
    """The highest load that one policy holds in one regime."""

    regime: str
    policy: str
    load: float
    """0: none was found."""
    tried: tuple[tuple[float, bool], ...] = ()


class Cell(Struct, frozen=True):
    """One regime, policy and load; the mean of the seeds."""

    regime: str
    policy: str
    load: float
    measures: Measures


class Results(Struct, frozen=True):
    """Everything a table, a page or another run needs."""

    version: str
    command: str
    machine: str
    seeds: tuple[int, ...]
    regimes: tuple[Regime, ...]
    """As they were run, with the number of requests that was asked for."""
    config: dict[str, Any]
    """Configuration of the router that all policies were given, as a tree."""
    cells: tuple[Cell, ...]
    searches: tuple[Search, ...] = ()

    def policies(self) -> list[str]:
        """Return the policies in the order in which they first appear."""
        return list(dict.fromkeys([cell.policy for cell in self.cells]))

    def at(self, regime: str, load: float) -> dict[str, Measures]:
        """Return the figures of every policy in one regime at one load."""
        return {cell.policy: cell.measures for cell in self.cells if (cell.regime, cell.load) == (regime, load)}

    def groups(self, regime: str, load: float) -> dict[str, dict[str, Figures]]:
        """Return the same by group, those groups that some policy has figures of, in the order of the regime."""
        row = self.at(regime, load)
        names = dict.fromkeys([name for measures in row.values() for name in measures.groups])
        return {
            name: {policy: measures.groups[name] for policy, measures in row.items() if name in measures.groups}
            for name in names
        }

    def named(self, regime: str) -> Regime | None:
        """Return a regime as it was run; `None`: the results do not say."""
        return next((each for each in self.regimes if each.name == regime), None)

    def places(self) -> list[tuple[str, float]]:
        """Return every regime and load with a cell, regimes in order, loads ascending."""
        found = {(cell.regime, cell.load) for cell in self.cells}
        order = {regime.name: position for position, regime in enumerate(self.regimes)}
        return sorted(found, key=lambda place: (order.get(place[0], len(order)), place))


def scores(figures: Mapping[str, float | None], *, is_higher_better: bool) -> dict[str, float]:
    """Compare figures with the best of them.

    Args:
        figures: By policy; `None` is infinite, the worst where lower is better.
        is_higher_better: For rates and shares.

    Returns:
        By policy: 1 for the best (all of them, when they tie, be it at zero or at infinity), else what is left of it.
    """
    known = [value for value in figures.values() if value is not None]
    if not known:
        return dict.fromkeys(figures, 1.0)
    best = max(known) if is_higher_better else min(known)
    return {policy: _score(value, best, is_higher_better) for policy, value in figures.items()}


def _score(value: float | None, best: float, is_higher_better: bool) -> float:
    if value is None:
        return 0.0
    if value == best:
        return 1.0
    return value / best if is_higher_better else best / value


def compare(row: Mapping[str, Figures], metric: Metric) -> dict[str, float]:
    """Score every policy of one regime and load by one metric."""
    values = {policy: metric.of(figures) for policy, figures in row.items()}
    return scores(values, is_higher_better=metric.is_higher_better)


def significant(value: float) -> str:
    """Return three significant digits without an exponent."""
    if value == 0:
        return "0"
    rounded = float(f"{value:.3g}")  # first, or 0.9996 would get the digits of a number below 1
    magnitude = int(f"{abs(rounded):e}".partition("e")[2])
    return f"{value:,.{max(0, 2 - magnitude)}f}"


def machine() -> str:
    """Return what was computing, in words: architecture, cores, interpreter."""
    return f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"


def joined(cells: Sequence[Cell]) -> tuple[Cell, ...]:
    """Return cells in a fixed order, whatever order they finished in."""
    return tuple(sorted(cells, key=lambda cell: (cell.regime, cell.load, cell.policy)))
