"""How far a figure can be trusted: the same requests again, each up to a millisecond later.

No policy could know of that millisecond or use it, yet queues and caches take another course after a while, and so do
percentiles. Whoever was best in a cell runs it again this way, and the default policy, too. What its own figure does
between the two says how near to another's figure it could be told to be.

What is easy to get wrong: the best of two dozen policies in a cell was best also by luck, so its figure gets worse more
often than better when it is drawn again. That is no fault of the method; it is what is to be shown.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

from warmfront.config import RouterConfig
from warmfront.errors import ConfigError
from warmfront.lab import ranking
from warmfront.lab.cells import CellTask
from warmfront.lab.measures import Measures
from warmfront.lab.ranking import Comparison
from warmfront.lab.results import COMPARED, TPOT_P99, WITHIN, Metric, Results
from warmfront.lab.targets import DEFAULT

_METRICS = {metric.title: metric for metric in (*COMPARED, TPOT_P99)}


class Repeat(Struct, frozen=True):
    """One row and one policy, as it was and again. Figures; `None`: infinitely late."""

    regime: str
    load: float
    group: str | None
    metric: str
    """Its title."""
    policy: str
    is_best: bool
    """Of all policies in this row."""
    before: float | None
    after: float | None

    def score(self) -> float:
        """Compare the worse of the two with the better: 1, the figure is the same."""
        if self.before == self.after:
            return 1.0
        if self.before is None or self.after is None:
            return 0.0
        low, high = sorted((self.before, self.after))
        return low / high

    def is_worse(self) -> bool:
        """Whether the figure is more than 3 % worse than before."""
        if self.score() >= WITHIN:
            return False
        if self.before is None or self.after is None:
            return self.after is None
        return (self.after < self.before) == _METRICS[self.metric].is_higher_better


class Repeats(Struct, frozen=True):
    """The file."""

    version: str
    command: str
    draw: int
    rows: tuple[Repeat, ...]


class Trust(Struct, frozen=True):
    """What repeats say of one metric, or of all."""

    title: str
    rows: int
    best_again: int
    """Rows whose best policy is within 3 % of its own figure."""
    best_worse: int
    """Rows whose best policy is more than 3 % worse than its own figure."""
    own_rows: int
    own_again: int
    """Rows in which the default policy is within 3 % of its own figure."""
    moved: float
    """How far the best policy's figure moved, median: 0.02 is 2 %."""


def trust(rows: Sequence[Repeat]) -> list[Trust]:
    """Sum up by metric, then over all of them."""
    titles = dict.fromkeys(row.metric for row in rows)
    return [*(_trust(title, [row for row in rows if row.metric == title]) for title in titles), _trust("all", rows)]


def _trust(title: str, rows: Sequence[Repeat]) -> Trust:
    best = [row for row in rows if row.is_best]
    own = [row for row in rows if row.policy == DEFAULT]
    return Trust(
        title=title,
        rows=len(best),
        best_again=sum(row.score() >= WITHIN for row in best),
        best_worse=sum(row.is_worse() for row in best),
        own_rows=len(own),
        own_again=sum(row.score() >= WITHIN for row in own),
        moved=1.0 - statistics.median([row.score() for row in best]),
    )


def tasks(results: Results, draw: int) -> list[CellTask]:
    """Return the runs that are needed, each once.

    Args:
        results: Of one seed; say who was best where.
        draw: Seed of the delays, above 0.

    Raises:
        ConfigError: The results are means over several seeds, or there is no such draw.
    """
    if len(results.seeds) != 1:
        raise ConfigError("the results are means over several seeds; a repeat is of one run")
    if draw < 1:
        raise ConfigError(f"draw {draw}: expected 1 or more")
    regimes = {regime.name: regime for regime in results.regimes}
    found = {
        (row.regime, load, policy): CellTask(
            regimes[row.regime], policy, load, results.seeds[0], RouterConfig(), later=draw
        )
        for row, load in _judged(results)
        for policy in sorted({DEFAULT, row.best()})
    }
    return list(found.values())


def repeats(results: Results, done: Iterable[tuple[CellTask, Measures]], *, draw: int, command: str) -> Repeats:
    """Put together what was run; a row that lacks its run is left out.

    Args:
        results: That say what is wanted.
        done: In any order.
        draw: Seed of the delays.
        command: What somebody types to get the same.
    """
    again = {(task.regime.name, task.load, task.policy): measures for task, measures in done}
    rows = [
        Repeat(
            row.regime,
            load,
            row.group,
            row.metric,
            policy,
            policy == row.best(),
            _figure(row, results.at(row.regime, load)[policy]),
            _figure(row, again[row.regime, load, policy]),
        )
        for row, load in _judged(results)
        for policy in sorted({DEFAULT, row.best()})
        if (row.regime, load, policy) in again and policy in row.scores
    ]
    return Repeats(results.version, command, draw, tuple(rows))


def _judged(results: Results) -> Iterator[tuple[Comparison, float]]:
    for row in ranking.judged(ranking.comparisons(results)):
        if row.load is not None:
            yield row, row.load


def _figure(row: Comparison, measures: Measures) -> float | None:
    metric: Metric = _METRICS[row.metric]
    if row.group is None:
        return metric.of(measures)
    figures = measures.groups.get(row.group)
    return None if figures is None else metric.of(figures)
