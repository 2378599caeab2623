"""Curves over the load as SVG that can stand inside a page.

matplotlib draws them: it needs no browser to test, writes plain SVG, and a page with its output needs no script of
3 MB. Text and axes are drawn in one marker colour that is then replaced by `currentColor`, so that a plot follows the
page's own light or dark colours. Every line carries the class `policy-N`, by which the page hides it.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter
from msgspec import Struct

from warmfront.lab.measures import Measures
from warmfront.lab.results import Metric, Results

FOREGROUND = "#010203"
"""Becomes `currentColor`."""
COLOURS = ("#4477cc", "#dd7722", "#22995c", "#cc3f4e", "#8a63c9", "#8c6d46", "#d661a8", "#7d8a22", "#1a9fb5", "#b58900")
"""Mid-tones that are read on white and on black."""
DASHES: tuple[str, ...] = ("solid", "dashed", "dotted")
"""Tells apart the policies that share a colour; those beyond 30 repeat."""
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "warmfront",
    "font.size": 9.0,
    "font.sans-serif": ["DejaVu Sans"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    **dict.fromkeys(
        (
            "text.color",
            "axes.edgecolor",
            "axes.labelcolor",
            "axes.titlecolor",
            "xtick.color",
            "ytick.color",
            "grid.color",
        ),
        FOREGROUND,
    ),
}
SIZE_INCHES = (4.2, 2.9)


class Curve(Struct, frozen=True):
    """One plot: a metric over the load."""

    metric: Metric
    is_logarithmic: bool = False


CURVES = (
    Curve(Metric("ttft_p50_s", "TTFT p50 (s)", "s"), is_logarithmic=True),
    Curve(Metric("ttft_p90_s", "TTFT p90 (s)", "s"), is_logarithmic=True),
    Curve(Metric("ttft_p99_s", "TTFT p99 (s)", "s"), is_logarithmic=True),
    Curve(Metric("goodput", "goodput under the targets (requests/s)", "1/s", is_higher_better=True)),
    Curve(Metric("hit_rate", "hit rate (share of prompt tokens)", "", is_higher_better=True)),
    Curve(Metric("imbalance", "load imbalance (most in flight / mean)", "")),
    Curve(Metric("itl_p50_s", "ITL p50 (s)", "s"), is_logarithmic=True),
    Curve(Metric("itl_p99_s", "ITL p99 (s)", "s"), is_logarithmic=True),
)


class Line(Struct, frozen=True):
    """How a policy is drawn."""

    policy: str
    number: int
    colour: str
    """CSS."""
    dash: str
    width: float


def lines(policies: Sequence[str], default: str) -> list[Line]:
    """Give every policy a look of its own; the default one gets the colour of the text and a thick line."""
    others = [policy for policy in policies if policy != default]
    made = [
        Line(policy, number, COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)], 1.3)
        for number, policy in enumerate(others)
    ]
    own = [Line(default, len(others), "currentColor", "solid", 2.6)] if default in policies else []
    return own + made


def plot(curve: Curve, results: Results, regime: str, looks: Sequence[Line]) -> str:
    """Return one plot as an `<svg>` element. A point that is infinitely late is left out."""
    loads = [load for name, load in results.places() if name == regime]
    rows = {load: results.at(regime, load) for load in loads}
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=SIZE_INCHES, layout="constrained")
        axes = figure.add_subplot()
        for look in looks:
            points = _points(curve.metric, rows, look.policy)
            axes.plot(
                [load for load, _ in points],
                [value for _, value in points],
                color=FOREGROUND if look.colour == "currentColor" else look.colour,
                linestyle=look.dash,
                linewidth=look.width,
                marker="o",
                markersize=3 + look.width / 2,
                gid=f"policy-{look.number}",
            )
        axes.set_title(curve.metric.title, fontsize=9)
        axes.grid(alpha=0.15)
        axes.set_xticks(loads, [f"{load:g}" for load in loads])
        if curve.is_logarithmic and axes.lines and any(len(line.get_xdata()) for line in axes.lines):  # type: ignore[arg-type]
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.yaxis.set_major_formatter(ScalarFormatter())
            axes.yaxis.set_minor_formatter(NullFormatter())
        else:
            axes.set_ylim(bottom=0)
        return _svg(figure)


def _points(metric: Metric, rows: Mapping[float, Mapping[str, Measures]], policy: str) -> list[tuple[float, float]]:
    found = [(load, metric.of(row[policy])) for load, row in rows.items() if policy in row]
    return [(load, value) for load, value in found if value is not None]


def _svg(figure: Figure) -> str:
    written = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(written, format="svg", transparent=True, metadata=nothing)
    element = written.getvalue()
    element = element[element.index("<svg") :]
    element = re.sub(r' xmlns(:\w+)?="[^"]*"', "", element)  # a page knows them
    element = re.sub(r' id="(?!policy-|[mp][0-9a-f]{10}")[^"]*"', "", element)  # nothing refers to the others
    element = re.sub(r'id="(policy-\d+)"', r'class="\1"', element)
    return element.replace(FOREGROUND, "currentColor")
