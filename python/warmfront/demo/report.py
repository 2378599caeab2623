"""What the demo shows at the end: one table, every figure measured at the client."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.table import Table

from warmfront.demo.load import Outcome, Progress

MISSING = "–"


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of one phase. `None`: the router told no predictions."""

    requests: int
    errors: int
    hit_rate: float
    """Cached prompt tokens, as the engines reported them, over all prompt tokens."""
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    requests_per_s: float
    output_tokens_per_s: float
    prediction_error_tokens: float | None
    """Mean distance between predicted and reported cached tokens."""
    predictions_exact: float | None
    """Share of predictions that were right to the token."""


def summarise(progress: Progress) -> Summary:
    """Compute the figures of a finished phase; zeros when nothing succeeded."""
    outcomes = progress.outcomes
    seconds = max(progress.ended_s - progress.started_s, 1e-9)
    prompt = sum(outcome.prompt_tokens for outcome in outcomes)
    ttft = sorted(outcome.ttft_s for outcome in outcomes)
    distances = _distances(outcomes)
    return Summary(
        requests=len(outcomes),
        errors=len(progress.errors),
        hit_rate=sum(outcome.cached_tokens for outcome in outcomes) / prompt if prompt else 0.0,
        ttft_p50_s=percentile(ttft, 0.5),
        ttft_p90_s=percentile(ttft, 0.9),
        ttft_p99_s=percentile(ttft, 0.99),
        requests_per_s=len(outcomes) / seconds,
        output_tokens_per_s=sum(outcome.output_tokens for outcome in outcomes) / seconds,
        prediction_error_tokens=sum(distances) / len(distances) if distances else None,
        predictions_exact=distances.count(0) / len(distances) if distances else None,
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of the values do not exceed; 0 when there are none."""
    if not ordered:
        return 0.0
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def table(summaries: Sequence[tuple[str, Summary]], *, engines: int) -> Table:
    """Return the table: one row a figure, one column a policy."""
    result = Table(title=f"The same traffic over {engines} cold engines", title_justify="left")
    result.add_column("")
    for name, _summary in summaries:
        result.add_column(name, justify="right")
    for label, show in ROWS:
        result.add_row(label, *(show(summary) for _name, summary in summaries))
    return result


ROWS: tuple[tuple[str, Callable[[Summary], str]], ...] = (
    ("hit rate (prompt tokens)", lambda summary: f"{summary.hit_rate:.1%}"),
    ("TTFT p50", lambda summary: f"{summary.ttft_p50_s * 1000:.0f} ms"),
    ("TTFT p90", lambda summary: f"{summary.ttft_p90_s * 1000:.0f} ms"),
    ("TTFT p99", lambda summary: f"{summary.ttft_p99_s * 1000:.0f} ms"),
    ("requests/s", lambda summary: f"{summary.requests_per_s:.1f}"),
    ("output tokens/s", lambda summary: f"{summary.output_tokens_per_s:.0f}"),
    (
        "predicted against reported: mean error",
        lambda summary: _known(summary.prediction_error_tokens, "{:.1f} tokens"),
    ),
    ("predicted against reported: exact", lambda summary: _known(summary.predictions_exact, "{:.1%}")),
    ("requests", lambda summary: str(summary.requests)),
    ("failed", lambda summary: str(summary.errors)),
)
"""Label and text of every figure."""


def _known(value: float | None, form: str) -> str:
    return MISSING if value is None else form.format(value)


def _distances(outcomes: Sequence[Outcome]) -> list[int]:
    return [
        abs(outcome.predicted_tokens - outcome.cached_tokens)
        for outcome in outcomes
        if outcome.predicted_tokens is not None
    ]
