"""Renders docs/reference/faults.md from what `fault_suite.py` measured."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lab_checks.text import table

from faults.cases import CASES, HEALS_S, Case
from faults.load import CLIENT_TIMEOUT_S
from faults.run import RATE

PAGE = "docs/reference/faults.md"
DATA = "docs/reference/faults.json"
OURS = "warmfront"
GROUPS = {
    "engine": "Engines",
    "events": "KV events",
    "metrics": "Metrics of engines",
    "sources": "Discovery and disk",
    "router": "The router itself",
}
INTRODUCTION = """\
# Faults

<!-- Rendered by `make faults` from faults.json. Do not edit. -->

What clients see when something breaks, how long it lasts, and what the index believes a minute later. First on real
processes: three `warmfront engine` servers, one router, {rate:g} streamed requests a second from clients that never
retry. Then on virtual time, with larger fleets.

{measured}

Routers of others run the same faults with their defaults, where a fault can be made without their help; they get no KV
events.
"""
READING = """\
- *requests*: on their way when the fault began, or sent after it. *seen*: what became of those that were not simply
  answered. `status`: the answer's. `error event`: the stream ended with one. `cut`: the connection ended in the middle
  of an answer. `timeout`: no end after {timeout:g} s. `refused`: nobody listened.
- *slow*: answered, but with a first token later than a second and five times the p90 before the fault.
- *recovered*: from the beginning of the fault to the start of the last request that failed or was slow. A fault that
  heals, heals after {heals:g} s unless the row says otherwise.
- *hit rate*: cached tokens of the prompts' tokens as the engines report them, before the fault and in the last five
  seconds of full load, some 20 s after it began.
- *a minute later*: how far the cached tokens that the router predicted are from those that the engine reported, as a
  share of the prompts' tokens, and how many predictions were exact.
"""


def read(root: Path) -> dict[str, Any]:
    """Return what was measured so far."""
    path = root / DATA
    if not path.exists():
        return {"rows": [], "virtual": []}
    return dict(json.loads(path.read_text(encoding="utf-8")))


def render(data: Mapping[str, Any]) -> str:
    """Return the page."""
    rows: Sequence[dict[str, Any]] = data["rows"]
    parts = [INTRODUCTION.format(rate=RATE, measured=_measured(rows))]
    parts += ["## Real processes", READING.format(heals=HEALS_S, timeout=CLIENT_TIMEOUT_S)]
    for group, title in GROUPS.items():
        cases = [case for case in CASES if case.group == group]
        if cases:
            parts += [f"### {title}", _section(cases, rows)]
    parts += ["## Virtual time", _virtual(data.get("virtual", []))]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _measured(rows: Sequence[dict[str, Any]]) -> str:
    """Say of what code and when the rows are: cases are run again one by one."""
    if not rows:
        return "Nothing was measured yet."
    counts = Counter((row["about"]["date"], row["about"]["commit"]) for row in rows)
    told = " and ".join(f"on {date} at commit {commit} ({count} rows)" for (date, commit), count in counts.items())
    return (
        f"Measured {told}; {rows[0]['about']['cores']} cores, on which other work ran, too: seconds are upper bounds."
    )


def _section(cases: Sequence[Case], rows: Sequence[dict[str, Any]]) -> str:
    head = ("fault", "router", "requests", "seen", "slow", "recovered", "hit rate", "a minute later")
    lines = []
    for case in cases:
        for row in rows:
            if row["case"] == case.name:
                lines.append(_line(case, row))
        if not any(row["case"] == case.name and row["router"] == OURS for row in rows):
            lines.append((case.what, f"`{OURS}`", "", "not run", "", "", "", ""))
    return table(head, lines)


def _line(case: Case, row: dict[str, Any]) -> tuple[str, ...]:
    is_ours = row["router"] == OURS
    seen = ", ".join(f"{count} {kind}" for kind, count in row["seen"].items() if kind != "ok") or "all answered"
    what = case.what + (f" (heals after {case.heals_s:g} s)" if case.heals_s != HEALS_S else "")
    return (
        what if is_ours else "",
        f"`{row['router']}`",
        str(row["requests"]),
        seen,
        str(row["slow"]),
        f"{row['recovered_s']:g} s",
        _hit_rates(row),
        _belief(row),
    )


def _hit_rates(row: dict[str, Any]) -> str:
    after = row["hit_rate_after"]
    return f"{100 * row['hit_rate_before']:.0f} → {'none' if after is None else f'{100 * after:.0f}'} %"


def _belief(row: dict[str, Any]) -> str:
    if row["belief_error"] is None:
        return ""
    return f"{100 * row['belief_error']:.1f} % off, {100 * row['belief_exact']:.0f} % exact"


def _virtual(rows: Sequence[dict[str, Any]]) -> str:
    head = ("fault", "unanswered", "sent again", "TTFT p99", "hit rate", "off", "exact")
    lines = [
        (
            row["what"],
            str(row["unanswered"]),
            str(row["retried"]),
            f"{row['ttft_p99_s']:.2f} s",
            f"{row['hit_rate']:.3f}",
            f"{100 * row['belief_error']:.1f} %",
            f"{100 * row['belief_exact']:.1f} %",
        )
        for row in rows
    ]
    text = (
        "Eight large replicas under load, 4,000 requests over documents, the same in every row; a fault begins after\n"
        "a minute or is there all the time. TTFT counts from the fault on, the other columns a minute after it.\n"
        "Requests that a crashed engine had begun to answer end with an error and count as unanswered."
    )
    return f"{text}\n\n{table(head, lines)}"
