"""What one run says about a policy: one `RunResult` in, one row of `Measures` out, with a row for each group in it.

Three rules decide every figure here, and each would flatter a bad policy if it were left out:

* A request that did not finish is infinitely late in every latency. It stays in the percentiles; a policy cannot win
  by losing its slow requests.
* The first `regime.warmup` of the requests, in order of arrival, is not counted: caches are empty, constants unknown.
* A percentile is the nearest rank (the smallest value that is not below a share q of all), never interpolated, so
  that "p99 within the target" and "99 % are within the target" are the same statement.

A request that belongs to a group with targets of its own is held to these, in the figures of all requests too.

Infinity is written as `None`, which JSON can hold. Shares are of 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from msgspec import Struct

from warmfront.lab.model import Group, Outcome, Regime, RunResult, Slo
from warmfront.sim.latency import Preset, preset

Row = TypeVar("Row")

HOLDS = 0.99
"""Share of the requests that must meet a target for a load to count as held: the p99 meets it."""


class Figures(Struct, frozen=True):
    """Figures of some requests of a run, or the mean of several seeds. A latency is `None` when it is infinite."""

    requests: float
    """Counted ones: all but the warm-up."""
    failures: float
    """Counted requests that did not finish."""
    ttft_p50_s: float | None
    """Arrival at the router to first token."""
    ttft_p90_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    """Mean gap of one request, of those that generate at least two tokens."""
    tpot_p99_s: float | None
    e2e_p99_s: float | None
    """Arrival to last token."""
    overrun_p99: float | None
    """TTFT over the request's own target: above 1, the p99 TTFT misses it."""
    ttft_share: float
    """Share of the counted requests that meet their TTFT target."""
    tpot_share: float
    """Share that meets its TPOT target; one token has no gap and meets it by finishing."""
    good_share: float
    """Share that meets both."""
    goodput: float
    """Requests that meet both, per second between the first and the last counted arrival."""
    throughput: float
    """Requests that finished, per second between the first counted arrival and the last finish."""
    hit_rate: float
    """Prompt tokens that the engine did not compute, of the prompt tokens of all counted requests it admitted."""

    @property
    def holds(self) -> bool:
        """Whether p99 TTFT and p99 TPOT are within their targets."""
        return self.ttft_share >= HOLDS and self.tpot_share >= HOLDS


class Measures(Figures, frozen=True):
    """Figures of all requests of a run, of the fleet, and of each group that the regime declares."""

    itl_p50_s: float | None
    """Gap between two tokens, over all gaps of the run, warm-up included; upper bound of its 2 % wide bin."""
    itl_p99_s: float | None
    imbalance: float
    """Most requests in flight at a replica over the mean of all replicas, averaged over the counted arrivals."""
    busy: float
    """Share of the run in which a replica computed, averaged over replicas."""
    preemptions: float
    wall_s: float
    """Real seconds that the run took."""
    groups: dict[str, Figures] = {}
    """By name, those with a counted request; gaps cannot be told apart by group, so TPOT stands for them."""

    def holds_in(self, regime: Regime) -> bool:
        """Return whether all requests hold, and each group by which policies are compared in `regime`."""
        judges = {group.name for group in regime.groups if group.compared}
        return self.holds and all(figures.holds for name, figures in self.groups.items() if name in judges)


def measure(result: RunResult, regime: Regime) -> Measures:
    """Reduce a run to its figures.

    Args:
        result: A run of `regime`.
        regime: Gives the targets, the groups, the warm-up, and the preset for targets that depend on the prompt.

    Raises:
        ValueError: The run holds no requests, so that nothing can be said.
        ConfigError: The fleet names a preset that does not exist.
    """
    outcomes = _counted(result.outcomes, regime.warmup)
    if not outcomes:
        raise ValueError(f"{result.regime} with {result.policy}: no requests to measure")
    targets = Targets(regime)
    by_group: dict[str, list[Outcome]] = {group.name: [] for group in regime.groups}
    for outcome in outcomes:
        group = targets.group(outcome)
        if group is not None:
            by_group[group.name].append(outcome)
    return Measures(
        **_figures(outcomes, targets, result.ended_s),
        itl_p50_s=histogram_percentile(result.gaps, 0.5),
        itl_p99_s=histogram_percentile(result.gaps, 0.99),
        imbalance=_mean(_after_warmup(result.imbalance, regime.warmup)),
        busy=_mean(result.busy_s) / result.ended_s if result.ended_s else 0.0,
        preemptions=result.preemptions,
        wall_s=result.wall_s,
        groups={
            name: Figures(**_figures(members, targets, result.ended_s)) for name, members in by_group.items() if members
        },
    )


def _figures(outcomes: Sequence[Outcome], targets: Targets, ended_s: float) -> dict[str, Any]:
    """Return the fields of `Figures` of some requests, in order of arrival, of a run that ended at `ended_s`."""
    ttft = [_since_arrival(outcome, outcome.first_token_s) for outcome in outcomes]
    tpot = [_tpot_s(outcome) for outcome in outcomes]
    overrun = [seconds / targets.ttft_s(outcome) for seconds, outcome in zip(ttft, outcomes, strict=True)]
    gaps = [seconds for seconds, outcome in zip(tpot, outcomes, strict=True) if outcome.output_tokens > 1]
    in_time = [ratio <= 1 for ratio in overrun]
    smooth = [seconds <= targets.tpot_s(outcome) for seconds, outcome in zip(tpot, outcomes, strict=True)]
    good = sum(first and second for first, second in zip(in_time, smooth, strict=True))
    finished = [outcome.finished_s for outcome in outcomes if _is_finished(outcome) and outcome.finished_s is not None]
    return {
        "requests": len(outcomes),
        "failures": len(outcomes) - len(finished),
        "ttft_p50_s": percentile(ttft, 0.5),
        "ttft_p90_s": percentile(ttft, 0.9),
        "ttft_p99_s": percentile(ttft, 0.99),
        "tpot_p50_s": percentile(gaps, 0.5),
        "tpot_p99_s": percentile(gaps, 0.99),
        "e2e_p99_s": percentile([_since_arrival(outcome, outcome.finished_s) for outcome in outcomes], 0.99),
        "overrun_p99": percentile(overrun, 0.99),
        "ttft_share": sum(in_time) / len(outcomes),
        "tpot_share": sum(smooth) / len(outcomes),
        "good_share": good / len(outcomes),
        "goodput": _per_second(good, outcomes, max(outcome.arrived_s for outcome in outcomes), ended_s),
        "throughput": _per_second(len(finished), outcomes, max(finished, default=ended_s), ended_s),
        "hit_rate": _hit_rate(outcomes),
    }


def mean(rows: Sequence[Measures]) -> Measures:
    """Average the figures of several seeds, field by field; one infinite latency makes the mean infinite.

    A group is there if it is in all rows.

    Raises:
        ValueError: No rows.
    """
    if not rows:
        raise ValueError("no rows to average")
    names = [name for name in rows[0].groups if all(name in row.groups for row in rows)]
    return Measures(
        **_means(rows), groups={name: Figures(**_means([row.groups[name] for row in rows])) for name in names}
    )


def _means(rows: Sequence[Figures]) -> dict[str, Any]:
    fields = [name for name in rows[0].__struct_fields__ if name != "groups"]
    columns = {name: [getattr(row, name) for row in rows] for name in fields}
    return {name: None if None in column else _mean(column) for name, column in columns.items()}


class Targets:
    """The targets of each request: its group's, which are the regime's where the group has none of its own.

    TTFT: `ttft_s`, and `ttft_prefills` cold prefills of the prompt.
    """

    def __init__(self, regime: Regime) -> None:
        self._slo = regime.slo
        self._groups = [(group, group.slo(regime.slo)) for group in regime.groups]
        self._engine = regime.fleet.engines[0]
        self._requests = max(1, regime.requests)

    def group(self, outcome: Outcome) -> Group | None:
        """Return the group of a request; `None`: it is in none."""
        return next((group for group, _ in self._groups if self._selects(group, outcome)), None)

    def ttft_s(self, outcome: Outcome) -> float:
        """Return the target of one request for its first token."""
        slo = self._of(outcome)
        if not slo.ttft_prefills:
            return slo.ttft_s
        engine = preset(self._engine.preset, speed=self._engine.speed)
        return slo.ttft_s + slo.ttft_prefills * cold_prefill_s(engine, outcome.prompt_tokens)

    def tpot_s(self, outcome: Outcome) -> float:
        """Return the target of one request for its mean gap between two tokens."""
        return self._of(outcome).tpot_s

    def _of(self, outcome: Outcome) -> Slo:
        return next((slo for group, slo in self._groups if self._selects(group, outcome)), self._slo)

    def _selects(self, group: Group, outcome: Outcome) -> bool:
        share = outcome.key / self._requests
        return group.selects(part=outcome.group, flow=outcome.flow, priority=outcome.priority, share=share)


def cold_prefill_s(preset: Preset, prompt_tokens: int) -> float:
    """Return the seconds an idle engine with an empty cache takes for a prompt: steps of at most its batch limit.

    Which engine of a mixed fleet is a matter of definition: the first one the regime names.
    """
    seconds, done = 0.0, 0
    while done < prompt_tokens:
        chunk = min(preset.max_batched_tokens, prompt_tokens - done)
        pairs = chunk * done + chunk * (chunk + 1) / 2
        seconds += preset.latency.step_s(
            prefill_tokens=chunk, attention_pairs=pairs, decode_sequences=0, context_tokens=0
        )
        done += chunk
    return seconds


def percentile(values: Iterable[float], share: float) -> float | None:
    """Return the nearest rank: the smallest value that at least `share` of all do not exceed.

    `None` when it is infinite, or when there are no values.
    """
    ordered = sorted(values)
    if not ordered:
        return None
    found = ordered[_rank(share, len(ordered)) - 1]
    return None if math.isinf(found) else found


def histogram_percentile(bins: Iterable[tuple[float, int]], share: float) -> float | None:
    """Return the upper bound of the bin that holds the nearest rank; `None` for an empty histogram."""
    ordered = sorted(bins)
    rank = _rank(share, sum(count for _, count in ordered))
    seen = 0
    for bound, count in ordered:
        seen += count
        if count and seen >= rank:
            return bound
    return None


def _rank(share: float, count: int) -> int:
    return max(1, math.ceil(share * count - 1e-9))  # 0.99 · 100 is a little above 99 in binary


def _counted(outcomes: Sequence[Outcome], warmup: float) -> list[Outcome]:
    return _after_warmup(sorted(outcomes, key=lambda outcome: (outcome.arrived_s, outcome.key)), warmup)


def _after_warmup(rows: Sequence[Row], warmup: float) -> list[Row]:
    return list(rows[int(warmup * len(rows)) :])


def _is_finished(outcome: Outcome) -> bool:
    return outcome.error is None and outcome.finished_s is not None and outcome.first_token_s is not None


def _since_arrival(outcome: Outcome, moment_s: float | None) -> float:
    if moment_s is None or not _is_finished(outcome):
        return math.inf
    return moment_s - outcome.arrived_s


def _tpot_s(outcome: Outcome) -> float:
    if outcome.finished_s is None or outcome.first_token_s is None or not _is_finished(outcome):
        return math.inf
    return (outcome.finished_s - outcome.first_token_s) / max(1, outcome.output_tokens - 1)


def _per_second(count: int, outcomes: Sequence[Outcome], until_s: float, ended_s: float) -> float:
    """Divide by the time since the first arrival; where that is one moment (a burst), by the time to the end."""
    begin_s = outcomes[0].arrived_s
    seconds = until_s - begin_s if until_s > begin_s else ended_s - begin_s
    return count / seconds if seconds > 0 else 0.0


def _hit_rate(outcomes: Iterable[Outcome]) -> float:
    admitted = [outcome for outcome in outcomes if outcome.first_token_s is not None]
    prompt_tokens = sum(outcome.prompt_tokens for outcome in admitted)
    return sum(outcome.cached_tokens for outcome in admitted) / prompt_tokens if prompt_tokens else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
