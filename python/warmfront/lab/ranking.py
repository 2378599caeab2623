"""Who wins where, and by how much: scores of every policy in every cell, and what follows from them.

A score compares with the best policy of the same regime and load: 1 is the best, 0.5 is twice as late or half as good.
Higher is always better and nothing is above 1. `results.scores` has the rule for ties and for what never came.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from warmfront.lab.measures import Figures
from warmfront.lab.model import Regime
from warmfront.lab.results import (
    COMPARED,
    COMPARED_IN_GROUPS,
    TPOT_P99,
    WITHIN,
    Metric,
    Results,
    compare,
    scores,
    significant,
)
from warmfront.lab.search import interpolate

HIGHEST = "highest load"
"""Title of the comparison by what was searched for."""
FLOOR = 0.01
"""Least score in a geometric mean, so that one cell in which nothing ever came does not erase all others."""


class Comparison(Struct, frozen=True):
    """Every policy in one regime, at one load, by one metric: of all requests, or of one group of them."""

    regime: str
    load: float | None
    """`None`: the highest load is what is compared."""
    metric: str
    figures: Mapping[str, str]
    """By policy, with unit, to be read."""
    scores: Mapping[str, float]
    group: str | None = None
    """`None`: all requests."""
    is_judged: bool = True
    """False: shown only, since rows of groups say the same more exactly, or since the regime says so."""
    weight: float = 1.0
    """In means: the rows of one regime, load and metric are as much as one together."""

    @property
    def place(self) -> str:
        """Regime, load and group in words."""
        at = self.regime if self.load is None else f"{self.regime} at {self.load:g}"
        return at if self.group is None else f"{at}, {self.group}"

    def best(self) -> str:
        """Return the policy that wins; the first of several."""
        return max(self.scores, key=lambda policy: self.scores[policy])


class Standing(Struct, frozen=True):
    """One policy over all cells it was run in."""

    policy: str
    mean: float
    """Geometric mean of its scores."""
    worst: Comparison
    at_best: int
    """Cells within 3 % of the best."""
    cells: int

    @property
    def worst_score(self) -> float:
        """Its score where it is worst."""
        return self.worst.scores[self.policy]


class Duel(Struct, frozen=True):
    """Two policies over the rows that both ran."""

    own: float
    """Geometric mean of the scores of the one that is asked about."""
    other: float
    rows: int

    @property
    def ratio(self) -> float:
        """Above 1: it is better."""
        return self.own / self.other


def comparisons(results: Results) -> list[Comparison]:
    """Compare the policies in every cell that was run, metric by metric: all requests, then each group of them.

    Where some group is compared by a metric, the row of all requests is not judged by it: it mixes what the groups
    tell apart.
    """
    places = [(regime, load, _groups(results, regime, load)) for regime, load in results.places()]
    return [
        row
        for metric in (*COMPARED, TPOT_P99)
        for regime, load, groups in places
        for row in _by_metric(regime, load, metric, results.at(regime, load), groups)
    ]


def judged(compared: Iterable[Comparison]) -> list[Comparison]:
    """Return the rows by which policies are judged."""
    return [row for row in compared if row.is_judged]


class Part(Struct, frozen=True):
    """What one table is about: all requests of a regime at a load, or one group of them."""

    group: str | None
    """`None`: all requests."""
    row: Mapping[str, Figures]
    """By policy."""
    compared: list[Comparison]


def parts(results: Results, regime: str, load: float, compared: Iterable[Comparison]) -> list[Part]:
    """Sort the comparisons of one regime and load by what they are about: all requests first, then each group."""
    here = [row for row in compared if (row.regime, row.load) == (regime, load)]
    rows: list[tuple[str | None, Mapping[str, Figures]]] = [(None, results.at(regime, load))]
    rows += results.groups(regime, load).items()
    return [Part(group, row, [each for each in here if each.group == group]) for group, row in rows]


Groups = Mapping[str, tuple[Mapping[str, Figures], frozenset[str]]]
"""By name: figures by policy, and the fields that the group is compared by."""


def _groups(results: Results, regime: str, load: float) -> Groups:
    named = results.named(regime)
    compared = {} if named is None else {group.name: frozenset(group.compared) for group in named.groups}
    return {name: (row, compared.get(name, frozenset[str]())) for name, row in results.groups(regime, load).items()}


def _by_metric(
    regime: str, load: float, metric: Metric, everyone: Mapping[str, Figures], groups: Groups
) -> Iterable[Comparison]:
    parts = groups if metric in COMPARED_IN_GROUPS else {}
    judges = sum(metric.field in fields for _, fields in parts.values())
    if metric in COMPARED:
        yield _row(regime, load, metric, everyone, is_judged=not judges)
    for name, (row, fields) in parts.items():
        is_judged = metric.field in fields
        yield _row(regime, load, metric, row, group=name, is_judged=is_judged, weight=1 / judges if is_judged else 1.0)


def _row(
    regime: str,
    load: float,
    metric: Metric,
    row: Mapping[str, Figures],
    *,
    group: str | None = None,
    is_judged: bool,
    weight: float = 1.0,
) -> Comparison:
    figures = {policy: metric.show(each) for policy, each in row.items()}
    return Comparison(regime, load, metric.title, figures, compare(row, metric), group, is_judged, weight)


def highest_loads(results: Results) -> list[Comparison]:
    """Compare by the highest load that holds: as searched for, else estimated between the loads that were run.

    A regime that was run at one load only, and not searched in, has no such comparison.
    """
    found = []
    for regime in results.regimes:
        loads, figures = _searched(results, regime.name) or _estimated(results, regime)
        if loads:
            found.append(Comparison(regime.name, None, HIGHEST, figures, scores(loads, is_higher_better=True)))
    return found


Loads = tuple[dict[str, float | None], dict[str, str]]
"""By policy: the load, and how it is written."""


def _searched(results: Results, regime: str) -> Loads | None:
    found = [search for search in results.searches if search.regime == regime]
    if not found:
        return None
    figures = {search.policy: significant(search.load) if search.load else "none" for search in found}
    return {search.policy: search.load for search in found}, figures


def _estimated(results: Results, regime: Regime) -> Loads:
    loads = [load for name, load in results.places() if name == regime.name]
    if len(loads) < 2:
        return {}, {}
    answers: dict[str, float | None] = {}
    figures = {}
    for policy in results.at(regime.name, loads[0]):
        points = [(load, row[policy]) for load in loads if policy in (row := results.at(regime.name, load))]
        answer = interpolate(points, regime)
        answers[policy] = answer or 0.0
        figures[policy] = _estimate(answer, lowest=loads[0], highest=loads[-1])
    return answers, figures


def _estimate(answer: float | None, *, lowest: float, highest: float) -> str:
    if answer is None:
        return f"< {significant(lowest)}"
    return f"≥ {significant(highest)}" if answer >= highest else f"~ {significant(answer)}"


def standings(compared: Iterable[Comparison]) -> list[Standing]:
    """Sum up every policy, the best first."""
    by_policy: dict[str, list[Comparison]] = {}
    for comparison in compared:
        for policy in comparison.scores:
            by_policy.setdefault(policy, []).append(comparison)
    found = [_standing(policy, rows) for policy, rows in by_policy.items()]
    return sorted(found, key=lambda standing: -standing.mean)


def _standing(policy: str, rows: Sequence[Comparison]) -> Standing:
    own = [row.scores[policy] for row in rows]
    return Standing(
        policy=policy,
        mean=geometric_mean(own, [row.weight for row in rows]),
        worst=min(rows, key=lambda row: row.scores[policy]),
        at_best=sum(score >= WITHIN for score in own),
        cells=len(rows),
    )


def losing(compared: Iterable[Comparison], policy: str) -> list[Comparison]:
    """Return the cells in which a policy is more than 3 % behind the best, the worst first."""
    lost = [comparison for comparison in compared if comparison.scores.get(policy, 1.0) < WITHIN]
    return sorted(lost, key=lambda comparison: comparison.scores[policy])


Better = dict[tuple[str, str], list[str]]
"""By place and metric: policies, the best first."""


def better_everywhere(compared: Iterable[Comparison], policy: str) -> Better:
    """Say who is more than 3 % better than a policy in a cell, and in no other metric of it more than 3 % worse.

    What the best of a cell has gained may be paid for in another metric; who is named here has paid nothing.
    """
    places: dict[str, list[Comparison]] = {}
    for row in compared:
        if policy in row.scores:
            places.setdefault(row.place, []).append(row)
    found: Better = {}
    for place, rows in places.items():
        others = [
            other
            for other in rows[0].scores
            if all(row.scores.get(other, 0.0) >= WITHIN * row.scores[policy] for row in rows)
        ]
        for row in rows:
            scores = row.scores
            better = [(-scores[other], other) for other in others if scores[policy] < WITHIN * scores[other]]
            found[place, row.metric] = [other for _, other in sorted(better)]
    return found


def duels(compared: Iterable[Comparison], policy: str) -> dict[str, Duel]:
    """Compare a policy with each other one over the rows that both ran: a cell that was left out flatters nobody."""
    common: dict[str, list[Comparison]] = {}
    for row in compared:
        for other in row.scores:
            if policy in row.scores and other != policy:
                common.setdefault(other, []).append(row)
    return {other: _duel(rows, policy, other) for other, rows in common.items()}


def _duel(rows: Sequence[Comparison], policy: str, other: str) -> Duel:
    weights = [row.weight for row in rows]
    own, others = [row.scores[policy] for row in rows], [row.scores[other] for row in rows]
    return Duel(geometric_mean(own, weights), geometric_mean(others, weights), len(rows))


def strictly_best(compared: Iterable[Comparison], policy: str) -> dict[str, bool]:
    """Say of each regime that a policy was run in whether it is better than every other one, over what both ran."""
    by_regime: dict[str, list[Comparison]] = {}
    for comparison in compared:
        if policy in comparison.scores:
            by_regime.setdefault(comparison.regime, []).append(comparison)
    return {
        regime: all(duel.ratio > 1.0 for duel in duels(rows, policy).values()) for regime, rows in by_regime.items()
    }


def geometric_mean(values: Sequence[float], weights: Sequence[float] | None = None) -> float:
    """Return the geometric mean, by weight where there are any, no value counting less than `FLOOR`."""
    weights = weights or [1.0] * len(values)
    total = sum(weight * math.log(max(FLOOR, value)) for value, weight in zip(values, weights, strict=True))
    return math.exp(total / sum(weights))


def shown_score(score: float) -> str:
    """Return a score with two digits, rounded down: nothing but the best is written as 1.00."""
    return f"{math.floor(score * 100 + 1e-9) / 100:.2f}"
