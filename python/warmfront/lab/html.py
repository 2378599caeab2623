"""Results as one page that needs nothing else: no network, no script, light or dark as the reader has it.

Needs the extra `lab` (matplotlib, jinja2). This module and `plots` are the only ones that import them.
"""

from __future__ import annotations

from importlib import resources

import msgspec
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from msgspec import Struct

from warmfront.config import PolicyConfig
from warmfront.lab import plots, ranking, table
from warmfront.lab.model import Regime
from warmfront.lab.ranking import Comparison, Part, Standing
from warmfront.lab.regimes_page import group_in_words
from warmfront.lab.results import TPOT_P99, WITHIN, Metric, Results

TEMPLATE = "report.html"
MORE = (
    Metric("itl_p50_s", "ITL p50", "ms"),
    Metric("tpot_p50_s", "TPOT p50", "ms"),
    TPOT_P99,
    Metric("throughput", "throughput", "1/s", is_higher_better=True),
    Metric("busy", "busy", "%"),
    Metric("preemptions", "pre-emptions", "count"),
)
"""Columns for which a terminal has no room."""


class PartTable(Struct, frozen=True):
    """All requests of one regime at one load, or one group of them."""

    part: Part
    verdict: str
    standings: list[Standing]
    shown: list[Metric]
    """Beside those that are compared."""


class Place(Struct, frozen=True):
    """One regime at one load."""

    load: float
    tables: list[PartTable]


class Section(Struct, frozen=True):
    """One regime."""

    regime: Regime
    groups: str
    """In words; empty: none."""
    plots: list[Markup]
    places: list[Place]
    definition: str
    """As JSON."""


def render(results: Results) -> str:
    """Return the page."""
    compared = ranking.comparisons(results)
    looks = plots.lines(results.policies(), PolicyConfig().name)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(resources.files(__package__).joinpath(TEMPLATE).read_text(encoding="utf-8"))
    return template.render(
        results=results,
        config=_json(results.config),
        lines=looks,
        sections=[_section(results, regime, compared, looks) for regime in results.regimes],
        highest=ranking.highest_loads(results),
        standings=ranking.standings(ranking.judged(compared)),
        shown_score=ranking.shown_score,
        within=WITHIN,
    )


def _section(results: Results, regime: Regime, compared: list[Comparison], looks: list[plots.Line]) -> Section:
    return Section(
        regime=regime,
        groups="; ".join(group_in_words(group, regime.slo) for group in regime.groups),
        plots=[Markup(plots.plot(curve, results, regime.name, looks)) for curve in plots.CURVES],
        places=[
            Place(load, [_table(part) for part in ranking.parts(results, name, load, compared)])
            for name, load in results.places()
            if name == regime.name
        ],
        definition=_json(regime),
    )


def _table(part: Part) -> PartTable:
    fields = {comparison.metric for comparison in part.compared}
    shown = [metric for metric in table.shown_in(part, (*table.SHOWN, *MORE)) if metric.title not in fields]
    return PartTable(part, "; ".join(table.verdicts(part.compared)), ranking.standings(part.compared), shown)


def _json(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
