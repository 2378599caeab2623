"""Results in the terminal: one table for each regime and load and one for each group there, then one over all of them.

A cell shows the figure and its score against the best of its column. A losing cell (more than 3 % behind) carries `▼`
as well as a colour, since colours do not survive a pipe. Where groups are compared by a figure, that of all requests
is shown without a mark: it is not judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from warmfront.lab import ranking
from warmfront.lab.measures import Figures
from warmfront.lab.ranking import Comparison, Part
from warmfront.lab.results import COMPARED, TPOT_P99, WITHIN, Metric, Results

SHOWN = (
    Metric("hit_rate", "hit rate", "%", is_higher_better=True),
    Metric("failures", "failed", "count"),
    Metric("imbalance", "imbalance", ""),
    Metric("ttft_p50_s", "TTFT p50", "s"),
    Metric("ttft_p90_s", "TTFT p90", "s"),
    Metric("e2e_p99_s", "end to end p99", "s"),
)
"""Columns beside those that are compared, the most telling first: as many are printed as fit."""

REGIMES_MAX = 4
"""Regimes side by side in the table of highest loads."""
WIDTH_MAX = 1000
"""Columns in which every table fits."""


def tables(results: Results, *, width: int) -> Iterator[Table | str]:
    """Yield what to print, in order: places, highest loads, and the sum of all.

    Args:
        results: Anything with a cell.
        width: Columns of the terminal. Where not all of a place fits, columns of `SHOWN` are left out.
    """
    compared = ranking.comparisons(results)
    for regime, load in results.places():
        described = results.named(regime)
        assert described is not None
        yield f"{regime}: {described.title}, {load:g} {described.unit}"
        for part in ranking.parts(results, regime, load, compared):
            if part.group is not None:
                yield f"{regime} at {load:g}, {part.group}"
            yield _fitting(part, width)
            yield from verdicts(part.compared)
            yield ""
    highest = ranking.highest_loads(results)
    if highest:
        yield "highest load with p99 TTFT and p99 TPOT within the targets"
        for first in range(0, len(highest), REGIMES_MAX):
            yield _highest(highest[first : first + REGIMES_MAX])
        yield ""
    if len(results.policies()) > 1:
        rows = ranking.judged(compared)
        titles = [metric.title for metric in (*COMPARED, TPOT_P99) if metric.title in {row.metric for row in rows}]
        yield f"over all cells ({', '.join(titles)})"
        yield _overall(rows)


def verdicts(here: list[Comparison]) -> list[str]:
    """Say for each metric that is judged in one place who wins and how far ahead of the next."""
    return [_winner(comparison) for comparison in ranking.judged(here)]


def _winner(comparison: Comparison) -> str:
    ordered = sorted(comparison.scores.items(), key=lambda item: -item[1])
    tied = [policy for policy, score in ordered if score == 1.0]
    if len(tied) > 1:
        return f"{comparison.metric}: {len(tied)} policies tie"
    if len(ordered) == 1:
        return f"{comparison.metric}: {comparison.figures[tied[0]]}"
    second, score = ordered[1]
    return f"{comparison.metric}: {tied[0]}, {_ahead(score)} of {second}"


def _ahead(score: float) -> str:
    """Say how far the best is ahead of a score below 1."""
    if score < 0.1:
        return "far ahead"
    return f"{100 * (1 / score - 1):.0f} % ahead" if score < 0.99 else "less than 1 % ahead"


def shown_in(part: Part, metrics: Sequence[Metric]) -> list[Metric]:
    """Return those of some metrics that a part has figures of: a group has none of the fleet."""
    return [metric for metric in metrics if part.group is None or metric.field in Figures.__struct_fields__]


def _fitting(part: Part, width: int) -> Table:
    measuring = Console(width=WIDTH_MAX)
    shown = shown_in(part, SHOWN)
    for count in range(len(shown), 0, -1):
        made = _part(part, shown[:count])
        if Measurement.get(measuring, measuring.options, made).maximum <= width:
            return made
    return _part(part, ())


def _part(part: Part, shown: Sequence[Metric]) -> Table:
    made = _table()
    made.add_column("policy", no_wrap=True)
    for title in [comparison.metric for comparison in part.compared] + [metric.title for metric in shown]:
        made.add_column(title, justify="right", no_wrap=True)
    for standing in ranking.standings(part.compared):
        policy = standing.policy
        compared = [_cell(comparison, policy) for comparison in part.compared]
        made.add_row(policy, *compared, *(Text(metric.show(part.row[policy])) for metric in shown))
    return made


def _highest(highest: list[Comparison]) -> Table:
    made = _table()
    made.add_column("policy")
    for comparison in highest:
        made.add_column(comparison.regime, justify="right", no_wrap=True)
    for standing in ranking.standings(highest):
        made.add_row(standing.policy, *(_cell(comparison, standing.policy) for comparison in highest))
    return made


def _overall(compared: list[Comparison]) -> Table:
    titles = ("geometric mean", "worst", "within 3 %")
    made = _table()
    made.add_column("policy")
    for title in titles:
        made.add_column(title, justify="right", no_wrap=True)
    made.add_column("worst cell")
    for standing in ranking.standings(compared):
        worst = f"{standing.worst.metric}, {standing.worst.place}"
        share = f"{standing.at_best} of {standing.cells}"
        made.add_row(standing.policy, f"{standing.mean:.3f}", ranking.shown_score(standing.worst_score), share, worst)
    return made


def _table() -> Table:
    return Table(box=None, header_style="bold", pad_edge=False)


def _cell(comparison: Comparison, policy: str) -> Text:
    if policy not in comparison.scores:
        return Text("-")
    score = comparison.scores[policy]
    is_lost, is_best = comparison.is_judged and score < WITHIN, comparison.is_judged and score == 1.0
    mark = "▼" if is_lost else " "
    style = "red" if is_lost else "bold green" if is_best else ""
    return Text(f"{comparison.figures[policy]} {mark}{ranking.shown_score(score)}", style=style)
