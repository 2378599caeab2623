"""The part of the page about real processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lab_checks.text import Difference, milliseconds, signed, table

DIFFERS = "Outside the tolerance"
COLUMNS = {
    "hit_rate": "hit rate",
    "ttft_mean_ms": "TTFT mean",
    "ttft_p50_ms": "TTFT p50",
    "ttft_p90_ms": "TTFT p90",
    "ttft_p99_ms": "TTFT p99",
}

TEXT = """\
## Real processes

The traffic of `warmfront demo`, {requests} requests of {conversations_per_s:g} conversations a second for
{seconds:g} s, over HTTP through `warmfront serve` to {engines} `warmfront engine` processes on one machine, and the
same prompts at the same moments on virtual time. Both have the same router and the same engine model; virtual time has
no sockets, no tokenizing, and no interpreters that wait for a core. Times are in milliseconds, measured at the client.

{table}

Tolerance: the hit rate within {hit_points:g} points, the TTFT p50 within {ttft:.0%}. The other figures are shown, not
held to a bound: a p99 of {requests} requests rests on a handful of them."""


def render(part: Mapping[str, Any]) -> str:
    """Return the section up to its list of differences."""
    return TEXT.format(
        requests=part["requests"],
        conversations_per_s=part["conversations_per_s"],
        seconds=part["seconds"],
        engines=part["engines"],
        hit_points=100 * part["within"]["hit_rate"],
        ttft=part["within"]["ttft_p50_ms"],
        table=table(["", *COLUMNS.values()], _rows(part)),
    )


def differences(part: Mapping[str, Any]) -> list[Difference]:
    """Return what is outside the tolerance."""
    found = []
    for policy, sides in part["policies"].items():
        for name, within in part["within"].items():
            apart = _apart(sides, name)
            if abs(apart) > within:
                real, virtual = (_shown(sides[side], name) for side in ("processes", "virtual"))
                told = f"{COLUMNS[name]}: processes {real}, virtual time {virtual}: {_told(name, apart)}"
                found.append(Difference(policy, told))
    return found


def _rows(part: Mapping[str, Any]) -> Iterator[list[str]]:
    for policy, sides in part["policies"].items():
        yield [f"`{policy}`: processes", *(_shown(sides["processes"], name) for name in COLUMNS)]
        virtual = (f"{_shown(sides['virtual'], name)} ({_told(name, _apart(sides, name))})" for name in COLUMNS)
        yield ["virtual time", *virtual]


def _apart(sides: Mapping[str, Mapping[str, float]], name: str) -> float:
    """Return how far virtual time is from the processes: the hit rate in its own unit, times as a share."""
    real, virtual = sides["processes"][name], sides["virtual"][name]
    return virtual - real if name == "hit_rate" else virtual / real - 1


def _told(name: str, apart: float) -> str:
    return f"{100 * apart:+.1f} points" if name == "hit_rate" else signed(apart)


def _shown(figures: Mapping[str, float], name: str) -> str:
    return f"{figures[name]:.3f}" if name == "hit_rate" else milliseconds(figures[name])
