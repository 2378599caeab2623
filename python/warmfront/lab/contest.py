"""Are the cells that the default policy loses lost, or was it one draw?

The page compares the default policy under one seed with whoever of some two dozen others was luckiest there. A contest
runs a cell again, against the two others that were best in it, under seeds that played no part in choosing either. What
is easy to get wrong: the seed of the page must not be counted again, since a cell is here because that seed went badly
for the default policy and well for the other two.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from msgspec import Struct

from warmfront.config import RouterConfig
from warmfront.errors import ConfigError
from warmfront.lab import ranking
from warmfront.lab.cells import CellTask
from warmfront.lab.measures import Measures
from warmfront.lab.results import COMPARED, WITHIN, Metric, Results
from warmfront.lab.targets import DEFAULT

RIVALS = 2


class Contest(Struct, frozen=True):
    """One cell that the default policy loses, and who is asked again."""

    regime: str
    load: float
    metric: str
    """Its title."""
    rivals: tuple[str, ...]
    """The best others, the best first."""


class Contested(Struct, frozen=True):
    """What came of it. Figures by seed, in the order of `Rounds.seeds`; `None`: infinitely late."""

    regime: str
    load: float
    metric: str
    own: tuple[float | None, ...]
    rivals: dict[str, tuple[float | None, ...]]

    @property
    def place(self) -> str:
        """Regime and load in words."""
        return f"{self.regime} at {self.load:g}"

    def scores(self) -> list[float]:
        """Compare with the best of the rivals, seed by seed: above 1, the default policy is better than all of them."""
        return [self._score(own, list(others)) for own, *others in zip(self.own, *self.rivals.values(), strict=True)]

    def mean_score(self) -> float:
        """Return the geometric mean of `scores`: the rivals may take turns, which favours them."""
        return ranking.geometric_mean(self.scores())

    def median_score(self) -> float:
        """Compare medians over the seeds: each policy answers for all of its seeds."""
        return self._score(_median(self.own), [_median(figures) for figures in self.rivals.values()])

    def verdict(self) -> str:
        """Say in a word what `mean_score` means."""
        score = self.mean_score()
        return "lost" if score < WITHIN else "won" if score > 1.0 / WITHIN else "level"

    def spread(self) -> float:
        """Return the largest figure of the default policy over its smallest."""
        known = [figure for figure in self.own if figure]
        return max(known) / min(known) if known else 1.0

    def _score(self, own: float | None, others: Sequence[float | None]) -> float:
        metric = named(self.metric)
        known = [figure for figure in others if figure is not None]
        if own is None or not known:
            return 0.0 if known else 1.0
        best = max(known) if metric.is_higher_better else min(known)
        worse, better = (own, best) if metric.is_higher_better else (best, own)
        return worse / better if better else 1.0


class Rounds(Struct, frozen=True):
    """The file."""

    version: str
    command: str
    chosen_by: tuple[int, ...]
    """Seeds of the results that say which cells are lost, and to whom."""
    seeds: tuple[int, ...]
    cells: tuple[Contested, ...]


def named(title: str) -> Metric:
    """Return the metric of a title."""
    return next(metric for metric in COMPARED if metric.title == title)


def contests(results: Results) -> list[Contest]:
    """Return the cells that the default policy loses, the worst first; groups of requests are left out."""
    lost = ranking.losing(ranking.judged(ranking.comparisons(results)), DEFAULT)
    whole = [row for row in lost if row.group is None]
    return [Contest(row.regime, row.load, row.metric, _rivals(row)) for row in whole if row.load is not None]


def _rivals(row: ranking.Comparison) -> tuple[str, ...]:
    others = [policy for policy in row.scores if policy != DEFAULT]
    return tuple(sorted(others, key=lambda policy: -row.scores[policy])[:RIVALS])


def tasks(wanted: Sequence[Contest], results: Results, seeds: Sequence[int]) -> list[CellTask]:
    """Return the runs that are needed, each once; all of a cell before the next, so that it is useful cut short.

    Args:
        wanted: In order.
        results: Have the regimes.
        seeds: Of each run.

    Raises:
        ConfigError: A seed has chosen the cells.
    """
    if used := set(seeds) & set(results.seeds):
        raise ConfigError(f"seed {min(used)} has chosen the cells; take others")
    regimes = {regime.name: regime for regime in results.regimes}
    found = [
        CellTask(regimes[contest.regime], policy, contest.load, seed, RouterConfig())
        for contest in wanted
        for policy in (DEFAULT, *contest.rivals)
        for seed in seeds
    ]
    return list({(task.regime.name, task.policy, task.load, task.seed): task for task in found}.values())


def rounds(
    wanted: Sequence[Contest],
    results: Results,
    done: Iterable[tuple[CellTask, Measures]],
    *,
    seeds: Sequence[int],
    command: str,
) -> Rounds:
    """Put together what was run; a cell that lacks a run is left out.

    Args:
        wanted: In order.
        results: That say what is wanted.
        done: In any order.
        seeds: Of each run.
        command: What somebody types to get the same.
    """
    have = {(task.regime.name, task.policy, task.load, task.seed): measures for task, measures in done}
    cells = []
    for contest in wanted:
        rows = {
            policy: [have.get((contest.regime, policy, contest.load, seed)) for seed in seeds]
            for policy in (DEFAULT, *contest.rivals)
        }
        figures = {policy: _figures(contest.metric, row) for policy, row in rows.items()}
        complete = {policy: row for policy, row in figures.items() if row is not None}
        if len(complete) == len(rows):
            own = complete.pop(DEFAULT)
            cells.append(Contested(contest.regime, contest.load, contest.metric, own, complete))
    return Rounds(results.version, command, results.seeds, tuple(seeds), tuple(cells))


def _figures(title: str, row: Sequence[Measures | None]) -> tuple[float | None, ...] | None:
    known = [measures for measures in row if measures is not None]
    return tuple(named(title).of(measures) for measures in known) if len(known) == len(row) else None


def _median(figures: Sequence[float | None]) -> float | None:
    found = statistics.median([float("inf") if figure is None else figure for figure in figures])
    return None if found == float("inf") else found
