"""What the project promises of the default policy, held against results.

Each promise becomes a verdict with the figures that decide it, the worst cell by name. What is easy to get wrong: not
every policy was run in every cell, and one that was left out of the hard ones has a better mean. Two policies are
compared over the rows that both ran and no others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from warmfront.config import PolicyConfig
from warmfront.lab import ranking
from warmfront.lab.measures import Measures
from warmfront.lab.ranking import Comparison, Duel, shown_score
from warmfront.lab.results import COMPARED, Metric, Results
from warmfront.lab.search import TOLERANCE

DEFAULT = PolicyConfig().name
ITL_P50 = Metric("itl_p50_s", "ITL p50", "ms")
EVEN = "round_robin"
"""The policy that mixes prefill into decoding the least, and evenly."""
ITL_OVER_EVEN_MAX = 1.05
THROUGHPUT_WITHIN = 1.02
"""Throughputs with a ratio up to this are equal."""
SUSTAINED_RIVALS = ("cacheroute", "llmd_affinity_filter", "dynamo_kv")
SUSTAINED_REGIMES = ("llmd-ladder", "llmd-shared-prefix", "cacheroute-paper", "cacheroute-long")
"""The regimes that the rivals' own publications are about."""


class Verdict(Struct, frozen=True):
    """A target and what was measured."""

    target: str
    measured: str
    is_met: bool | None
    """`None`: nothing was run that could tell."""


def verdicts(results: Results) -> list[Verdict]:
    """Hold the default policy against what the project promises of it."""
    compared = ranking.judged(ranking.comparisons(results))
    return [
        _in_every_cell([row for row in compared if DEFAULT in row.scores]),
        *(_over_all(title, rows) for title, rows in by_metric(compared)),
        _strictly_best(compared),
        _gaps(results),
        _sustained(ranking.highest_loads(results)),
    ]


def by_metric(compared: Sequence[Comparison]) -> Iterable[tuple[str, list[Comparison]]]:
    """Return all rows, then those of each metric, with a title."""
    yield "all metrics", list(compared)
    for metric in COMPARED:
        yield metric.title, [row for row in compared if row.metric == metric.title]


def _in_every_cell(cells: Sequence[Comparison]) -> Verdict:
    lost = ranking.losing(cells, DEFAULT)
    measured = f"{len(cells) - len(lost)} of {len(cells)} cells"
    if lost:
        measured += f"; worst {shown_score(lost[0].scores[DEFAULT])}: {lost[0].metric}, {lost[0].place}"
    return Verdict(f"{DEFAULT} is within 3 % of the best in every cell", measured, not lost)


def _over_all(title: str, rows: Sequence[Comparison]) -> Verdict:
    target = f"{DEFAULT} is better than each other policy over the cells that both ran, geometric mean of {title}"
    duels = ranking.duels(rows, DEFAULT)
    if not duels:
        return Verdict(target, "no other policy was run", None)
    rival = min(duels, key=lambda name: duels[name].ratio)
    return Verdict(target, _shown(duels[rival], rival), duels[rival].ratio > 1.0)


def _shown(duel: Duel, rival: str) -> str:
    return f"{duel.own:.3f} against {duel.other:.3f} ({rival}, {duel.rows} cells)"


def _strictly_best(compared: Sequence[Comparison]) -> Verdict:
    best = ranking.strictly_best(compared, DEFAULT)
    return Verdict(
        f"{DEFAULT} is strictly the best in at least half of the regimes, by the geometric mean of its cells",
        f"{sum(best.values())} of {len(best)}",
        sum(best.values()) * 2 >= len(best),
    )


def _gaps(results: Results) -> Verdict:
    """Compare the median gap between tokens with that of even spreading, where both get as much done."""
    found: list[tuple[float, str]] = []
    for regime, load in results.places():
        row = results.at(regime, load)
        own, even = row.get(DEFAULT), row.get(EVEN)
        if own is None or even is None or not _as_much(own, even):
            continue
        if own.itl_p50_s is not None and even.itl_p50_s:
            figures = f"{ITL_P50.show(own)} against {ITL_P50.show(even)}"
            found.append((own.itl_p50_s / even.itl_p50_s, f"{regime} at {load:g}, {figures}"))
    target = f"ITL p50 of {DEFAULT} is at most 5 % above {EVEN}, where both finish all and as many a second within 2 %"
    if not found:
        return Verdict(target, "no such cell was run", None)
    ratio, place = max(found)
    held = sum(ratio <= ITL_OVER_EVEN_MAX for ratio, _ in found)
    measured = f"{held} of {len(found)} cells; worst {100 * (ratio - 1):+.0f} %: {place}"
    return Verdict(target, measured, held == len(found))


def _as_much(one: Measures, other: Measures) -> bool:
    if one.failures or other.failures or not one.throughput or not other.throughput:
        return False
    low, high = sorted((one.throughput, other.throughput))
    return high <= THROUGHPUT_WITHIN * low


def _sustained(highest: Sequence[Comparison]) -> Verdict:
    """Compare the highest load under the targets with those that were published for such traffic."""
    found: list[tuple[float, str]] = []
    regimes: set[str] = set()
    for row in highest:
        if row.regime not in SUSTAINED_REGIMES or DEFAULT not in row.scores:
            continue
        for rival in SUSTAINED_RIVALS:
            if rival in row.scores:
                regimes.add(row.regime)
                behind = row.scores[DEFAULT] * TOLERANCE - row.scores[rival]
                found.append((behind, f"{row.regime}, {row.figures[DEFAULT]} against {row.figures[rival]} ({rival})"))
    names = ", ".join(SUSTAINED_RIVALS)
    target = (
        f"the highest load of {DEFAULT} under the targets is at or above {names} in {', '.join(SUSTAINED_REGIMES)}, "
        f"as far as a search can tell: it ends within {100 * (TOLERANCE - 1):.0f} %"
    )
    if not found:
        return Verdict(target, "none of them was run", None)
    behind, place = min(found)
    held = sum(behind >= 0 for behind, _ in found)
    measured = f"{held} of {len(found)} comparisons in {len(regimes)} of {len(SUSTAINED_REGIMES)} regimes"
    lacking = len(found) < len(SUSTAINED_REGIMES) * len(SUSTAINED_RIVALS)
    is_met = False if behind < 0 else None if lacking else True
    return Verdict(target, measured + (f"; worst: {place}" if behind < 0 else ""), is_met)
