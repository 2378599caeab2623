from __future__ import annotations

import io

from rich.console import Console
from warmfront.demo.load import Outcome, Progress
from warmfront.demo.report import MISSING, percentile, summarise, table


def outcome(ttft_s: float, cached: int, predicted: int | None) -> Outcome:
    return Outcome(ttft_s, prompt_tokens=100, cached_tokens=cached, output_tokens=10, predicted_tokens=predicted)


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [percentile(values, share) for share in (0.5, 0.9, 0.99, 1.0)] == [50.0, 90.0, 99.0, 100.0]
    assert percentile([3.0], 0.5) == 3.0
    assert percentile([], 0.5) == 0.0


def test_figures_are_weighted_by_tokens_and_time() -> None:
    progress = Progress(planned=3, sent=3, outcomes=[outcome(0.1, 80, 80), outcome(0.3, 0, 16), outcome(0.2, 40, None)])
    progress.ended_s = 2.0
    summary = summarise(progress)
    assert summary.hit_rate == 0.4
    assert summary.ttft_p50_s == 0.2
    assert summary.requests_per_s == 1.5
    assert summary.output_tokens_per_s == 15.0
    assert summary.prediction_error_tokens == 8.0
    assert summary.predictions_exact == 0.5


def test_a_phase_without_answers_has_a_summary_too() -> None:
    summary = summarise(Progress(planned=1, sent=1, errors=["refused"]))
    assert (summary.hit_rate, summary.errors, summary.predictions_exact) == (0.0, 1, None)


def test_the_table_fits_a_terminal_and_shows_what_is_missing() -> None:
    output = io.StringIO()
    console = Console(file=output, width=80)
    summary = summarise(Progress(planned=1, outcomes=[outcome(0.123, 50, None)], ended_s=1.0))
    console.print(table([("round_robin", summary), ("marginal_cost", summary)], engines=4))
    text = output.getvalue()
    assert "50.0%" in text
    assert "123 ms" in text
    assert MISSING in text
    assert "…" not in text
