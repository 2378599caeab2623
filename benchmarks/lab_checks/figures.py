"""One set of figures for every check, whoever measured: requests in, hit rate and latencies out.

Percentiles are nearest ranks over single requests, on both sides. The summaries that other tools print use sketches
and would differ from ours by a per cent for that reason alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from warmfront.lab.measures import percentile
from warmfront.lab.model import Outcome

Figures = dict[str, float]


class Measured(NamedTuple):
    """One finished request."""

    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    tpot_s: float | None
    """`None`: a single token has no gap."""


def of_outcome(outcome: Outcome) -> Measured:
    """Take a request of the lab.

    Raises:
        RuntimeError: It did not finish; a check is not about lost requests.
    """
    if outcome.first_token_s is None or outcome.finished_s is None:
        raise RuntimeError(f"request {outcome.key} did not finish: {outcome.error}")
    gaps = outcome.output_tokens - 1
    return Measured(
        prompt_tokens=outcome.prompt_tokens,
        cached_tokens=outcome.cached_tokens,
        ttft_s=outcome.first_token_s - outcome.arrived_s,
        tpot_s=(outcome.finished_s - outcome.first_token_s) / gaps if gaps else None,
    )


def figures(requests: Sequence[Measured]) -> Figures:
    """Reduce requests to what is compared: a share, and milliseconds."""
    prompt_tokens = sum(each.prompt_tokens for each in requests)
    ttft_ms = [1e3 * each.ttft_s for each in requests]
    tpot_ms = [1e3 * each.tpot_s for each in requests if each.tpot_s is not None]
    return {
        "hit_rate": round(sum(each.cached_tokens for each in requests) / prompt_tokens, 5),
        **_latencies("ttft", ttft_ms),
        **_latencies("tpot", tpot_ms),
    }


def means(runs: Iterable[Mapping[str, float]]) -> Figures:
    """Average several runs of one case, figure by figure."""
    rows = list(runs)
    return {name: round(statistics.fmean(row[name] for row in rows), 5) for name in rows[0]}


def _latencies(name: str, values_ms: Sequence[float]) -> Figures:
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    ranks = {label: percentile(values_ms, share) or 0.0 for label, share in shares.items()}
    return {
        f"{name}_{label}_ms": round(value, 3) for label, value in {"mean": statistics.fmean(values_ms), **ranks}.items()
    }
