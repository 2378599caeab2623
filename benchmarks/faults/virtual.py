"""Faults on virtual time: eight large replicas under load, where a minute costs nothing and nothing is noise.

Each fault is a change of one regime's fleet; everything else, the seed included, stays as in the run without it. The
router is the one that serves; engines, events and scrapes are modelled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from warmfront.lab import regime
from warmfront.lab.measures import percentile
from warmfront.lab.model import EngineSpec, EventSpec, FleetSpec, Outcome, Regime
from warmfront.lab.run import run

BASE, LOAD, SEED = "scale-down", 18.0, 1
POLICY = "marginal_cost"
PRESET = "qwen3-32b-tp2-h100"
FAULT_S = 60.0
WINDOW_S = 10.0
LATE_FACTOR = 3.0
"""A window counts as disturbed while the p90 of its first tokens is this many times what the same window has without
the fault."""


def observe() -> Iterator[dict[str, Any]]:
    """Yield a row for the run without a fault, then one for each fault."""
    base = msgspec.structs.replace(regime.load(BASE), fleet=FleetSpec(engines=(EngineSpec(PRESET, count=8),)))
    calm = _outcomes(base)
    yield _row("none", "no fault", calm, calm)
    for name, what, fleet in _faults(base.fleet):
        yield _row(name, what, _outcomes(msgspec.structs.replace(base, fleet=fleet)), calm)


def _faults(fleet: FleetSpec) -> Iterator[tuple[str, str, FleetSpec]]:
    seven, eighth = EngineSpec(PRESET, count=7), EngineSpec(PRESET)

    def last(what: str, value: float, **more: float) -> FleetSpec:
        return msgspec.structs.replace(fleet, engines=(seven, msgspec.structs.replace(eighth, **{what: value}, **more)))

    def events(**what: Any) -> FleetSpec:
        return msgspec.structs.replace(fleet, events=EventSpec(**what))

    yield "crash", "one replica crashes and comes back empty 30 s later", last("crashes_s", FAULT_S, restart_s=30.0)
    yield "leave", "one replica is taken away", last("leaves_s", FAULT_S)
    yield "join", "one replica comes only now, empty", last("joins_s", FAULT_S)
    yield "late-1", "events are 1 s late", events(delay_s=1.0)
    yield "late-30", "events are 30 s late", events(delay_s=30.0)
    yield "loss-10", "one batch of events in ten is lost", events(loss=0.1)
    yield "loss-50", "every second batch of events is lost", events(loss=0.5)
    yield "no-events", "no events at all", events(publish=False)
    yield "scrape-60", "metrics are read once a minute", msgspec.structs.replace(fleet, scrape_s=60.0)


def _outcomes(what: Regime) -> list[Outcome]:
    return list(run(what, POLICY, LOAD, SEED).outcomes)


def _row(name: str, what: str, outcomes: Sequence[Outcome], calm: Sequence[Outcome]) -> dict[str, Any]:
    later = [each for each in outcomes if each.arrived_s >= FAULT_S + 60.0 and each.finished_s is not None]
    errors = [abs(each.predicted_tokens - each.cached_tokens) for each in later]
    tokens = sum(each.prompt_tokens for each in later)
    return {
        "fault": name,
        "what": what,
        "requests": len(outcomes),
        "unanswered": sum(each.finished_s is None for each in outcomes),
        "retried": sum(each.attempts > 1 for each in outcomes),
        "ttft_p99_s": percentile([_ttft_s(each) for each in outcomes if each.arrived_s >= FAULT_S], 0.99),
        "disturbed_s": _disturbed_s(outcomes, calm),
        "hit_rate": round(sum(each.cached_tokens for each in later) / tokens, 4),
        "belief_error": round(sum(errors) / tokens, 5),
        "belief_exact": round(sum(error == 0 for error in errors) / len(later), 4),
    }


def _ttft_s(outcome: Outcome) -> float:
    return float("inf") if outcome.first_token_s is None else outcome.first_token_s - outcome.arrived_s


def _disturbed_s(outcomes: Sequence[Outcome], calm: Sequence[Outcome]) -> float:
    """Seconds from the fault to the end of the last window that is disturbed."""
    usual, seen = _windows(calm), _windows(outcomes)
    disturbed = [
        window
        for window, seconds in seen.items()
        if window in usual and (seconds or float("inf")) > LATE_FACTOR * (usual[window] or float("inf"))
    ]
    return max((window + 1 for window in disturbed), default=0) * WINDOW_S


def _windows(outcomes: Sequence[Outcome]) -> dict[int, float | None]:
    """Return the p90 of the first tokens by window since the fault."""
    by_window: dict[int, list[float]] = {}
    for each in outcomes:
        if each.arrived_s >= FAULT_S:
            by_window.setdefault(int((each.arrived_s - FAULT_S) // WINDOW_S), []).append(_ttft_s(each))
    return {window: percentile(values, 0.9) for window, values in by_window.items()}
