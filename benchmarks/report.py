"""Render `docs/reference/benchmarks.md` from what `run.py` measured, and from nothing else.

Every target is stated with the figure it is held against and a plain verdict (`targets.py`). Wall-clock figures are
medians over the rounds. The page says when it was made by a quick run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from first_bytes import Added, Row, added, is_clean, noise_ms
from places import PAGE, RESULTS
from targets import KIB, RATIO_MIN, RELAY_CASES, SILENT_CASE, verdicts

MIB = 2**20
CORE_BUSY_MIN = 0.85
"""Below this share of its core a router was not the bottleneck and its wall rate says nothing about it."""


INTRODUCTION = """\
# Benchmarks

Rendered by `benchmarks/report.py` from one run of `make bench`; not edited by hand. Figures depend on the machine:
compare ratios within this page.

Measured on {date} at commit {commit}: {processor}, {cores} cores, {memory_gib} GiB, Linux {kernel}, load average
{load_average_at_start} at the start; Python {python}, {rust}."""
QUICK = "**This page was made by a quick run: its figures only show that the harness works.**"
REQUESTS_NOTE = """\
Chat completions, not streamed, of one size; 80 % of each body is shared by all, the rest never repeats. Medians of the
rounds, best round in brackets."""
STREAMS_NOTE = "One event of about 180 bytes a write of the engine. Gaps are between reads of one client."
CORE_NOTE = """\
One thread. `store_*`: blocks a second from wire frames into the index, for a first replica and for a second one with
the same blocks. `lookup*`: microseconds for one prompt. `size_*`: resident memory; `share_of_allowed` above 1 misses
the target."""
DECISION_NOTE = """\
Microseconds of `Router.step` for one request, the index lookup replaced by a stub. What else the machine does only adds
to them: the minimum is what counts, and medians of a loaded machine are not comparable with those of another run."""
FIRST_BYTES_NOTE = """\
1,000 streams in progress that begin one after the other at a steady rate, with an event every 20 ms; the upstream sends
its head and first event at once. Measured from sending a request, directly, through the router, and directly again;
added is the relayed figure less the mean of the direct ones. Medians of the rounds."""
SILENT_NOTE = """\
Growth of the router's resident memory, divided by the streams. The growth is over the router at rest after it has
served ordinary streams, because memory freed at start would hide it."""
METHOD = """\
## Method

Command: `{command}`. Rounds: {rounds}; in each the contenders take turns, every one started afresh. {warmup_s:g} s of
warm-up, then {window_s:g} s measured. All threads and processes of a router are pinned to core 0; the load generator
and the engines share core 1. CPU seconds are user and system time of the router's whole process tree.

Requests: {connections} connections, each sending its next request when the last is answered; four engines that answer
at once with a fixed body. Bodies are English-like text of a fixed seed, a system prompt shared by all and a user turn
that never repeats. The engines publish no KV events, so warmfront's index lives on its own predictions. Dynamo brings
mock engines of its own; one output token is asked for, so that decoding costs it next to nothing.

Streams: 200 events each, flat out or one every {pace_ms} ms with phases spread; clients that never read are offered
17 MB each, in a window three times as long. For the time to the first byte 250 streams of 4 s begin a second, each at a
random point of its own 4 ms, over connections that are kept; the measurement begins when 1,000 are in progress."""


def main() -> int:
    """Read `benchmarks.json` of a folder and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=RESULTS, help="where run.py wrote benchmarks.json")
    parser.add_argument("page", type=Path, nargs="?", default=PAGE, help="file to write")
    arguments = parser.parse_args()
    results = json.loads((arguments.folder / "benchmarks.json").read_text())
    arguments.page.parent.mkdir(parents=True, exist_ok=True)
    arguments.page.write_text(render(results))
    return 0


def render(results: Row) -> str:
    """Return the whole page."""
    parts = [_introduction(results["about"]), _verdicts(results), _requests(results), _streams(results)]
    parts += [_first_bytes(results.get("first_bytes", []))]
    parts += [_lines(results["core"], "The index", CORE_NOTE), _lines(results["decision"], "Decisions", DECISION_NOTE)]
    parts += [_failures(results["failures"]), _method(results["about"])]
    return "\n\n".join(part for part in parts if part) + "\n"


def _introduction(about: Row) -> str:
    machine, versions = about["machine"], about["versions"]
    text = INTRODUCTION.format(**about, **machine, **versions)
    return text + ("\n\n" + QUICK if about["quick"] else "")


def _verdicts(results: Row) -> str:
    words = {True: "met", False: "**missed**", None: "not measured"}
    rows = [[verdict.target, verdict.measured, words[verdict.met]] for verdict in verdicts(results)]
    return "## Targets\n\n" + _table(["target", "measured", ""], rows)


def _requests(results: Row) -> str:
    parts = ["## Requests\n\n" + REQUESTS_NOTE]
    for size in RATIO_MIN:
        rows = [row for row in results["requests"] if row["size"] == size]
        if rows:
            parts.append(f"### {size} bodies\n\n" + _table(REQUEST_HEADER, list(_request_rows(rows))))
    return "\n\n".join(parts)


REQUEST_HEADER = ["router", "requests/s", "per CPU-second", "p50 ms", "p99 ms", "core used", "memory MiB", ""]


def _request_rows(rows: Sequence[Row]) -> Iterator[list[str]]:
    for name, own in _by(rows, "contender"):
        busy = statistics.median(row["cpu_s"] / row["window_s"] for row in own)
        remarks = [_errors(own), "not the bottleneck" if busy < CORE_BUSY_MIN else ""]
        yield [
            name,
            f"{_median(own, 'requests_per_s'):,.0f} ({max(row['requests_per_s'] for row in own):,.0f})",
            f"{_median(own, 'requests_per_cpu_s'):,.0f}",
            f"{_median(own, 'p50_ms'):,.1f}",
            f"{_median(own, 'p99_ms'):,.1f}",
            f"{busy:.0%}",
            f"{max(row['resident_bytes_max'] for row in own) / MIB:,.0f}",
            "; ".join(filter(None, remarks)),
        ]


def _streams(results: Row) -> str:
    parts = ["## Streams\n\n" + STREAMS_NOTE]
    for case in RELAY_CASES:
        rows = [row for row in results["streams"] if row["case"] == case]
        if rows:
            header = ["router", "events per CPU-second", "events/s", "gap p50 ms", "gap p99 ms", "memory MiB", ""]
            parts.append(f"### {case[0].upper()}{case[1:]}\n\n" + _table(header, list(_stream_rows(rows))))
    silent = [row for row in results["streams"] if row["case"] == SILENT_CASE]
    if silent:
        header = ["router", "streams", "memory MiB", "KiB a stream", ""]
        title = f"### {SILENT_CASE[0].upper()}{SILENT_CASE[1:]}\n\n{SILENT_NOTE}\n\n"
        parts.append(title + _table(header, list(_silent_rows(silent))))
    return "\n\n".join(parts)


def _stream_rows(rows: Sequence[Row]) -> Iterator[list[str]]:
    for name, own in _by(rows, "contender"):
        yield [
            name,
            f"{_median(own, 'events_per_cpu_s'):,.0f} ({max(row['events_per_cpu_s'] or 0 for row in own):,.0f})",
            f"{_median(own, 'events_per_s'):,.0f}",
            f"{_median(own, 'gap_p50_ms'):,.1f}",
            f"{_median(own, 'gap_p99_ms'):,.1f}",
            f"{max(row['resident_bytes_max'] for row in own) / MIB:,.0f}",
            _errors(own),
        ]


def _silent_rows(rows: Sequence[Row]) -> Iterator[list[str]]:
    for name, own in _by(rows, "contender"):
        memory = max(row["resident_bytes_max"] for row in own) / MIB
        growth = _median(own, "resident_bytes_a_stream") / KIB
        yield [name, f"{own[0]['streams']:,}", f"{memory:,.0f}", f"{growth:,.0f}", _errors(own)]


FIRST_BYTES_HEADER = [
    "router",
    "added p50 ms",
    "added p99 ms",
    "first event, added p99 ms",
    "p99 ms",
    "direct p99 ms",
    "streams",
    "core used",
    "",
]


def _first_bytes(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    table = [_first_bytes_row(name, own) for name, own in _by(rows, "contender")]
    return f"## Time to the first byte\n\n{FIRST_BYTES_NOTE}\n\n" + _table(FIRST_BYTES_HEADER, table)


def _first_bytes_row(name: str, rows: Sequence[Row]) -> list[str]:
    rounds = list(added(rows))
    if not rounds:
        return [name, *[""] * (len(FIRST_BYTES_HEADER) - 2), _errors(rows) or "not measured in one piece"]

    def median(figure: Callable[[Added], float]) -> float:
        return statistics.median(map(figure, rounds))

    before, after = median(lambda each: each.direct_p99_ms[0]), median(lambda each: each.direct_p99_ms[1])
    is_noise = noise_ms(rounds) > abs(median(lambda each: each.byte_p99_ms))
    return [
        name,
        f"{median(lambda each: each.byte_p50_ms):,.2f}",
        f"{median(lambda each: each.byte_p99_ms):,.2f}",
        f"{median(lambda each: each.event_p99_ms):,.2f}",
        f"{median(lambda each: each.relayed_p99_ms):,.2f}",
        f"{before:,.2f}, {after:,.2f}",
        f"{median(lambda each: each.open_mean):,.0f}",
        f"{median(lambda each: each.core):.0%}",
        "; ".join(filter(None, [_errors(rows), "the direct runs differ by more than was added" if is_noise else ""])),
    ]


def _errors(rows: Sequence[Row]) -> str:
    """Say what went wrong; empty where nothing did."""
    if all(map(is_clean, rows)):
        return ""
    counts = {word: sum(row.get(word, 0) for row in rows) for word in ("refused", "broken", "unsent", "waiting")}
    said = [f"{count:,} {word}" for word, count in counts.items() if count or word in ("refused", "broken")]
    return ", ".join(said) + "; not ranked"


def _lines(rows: Sequence[Row], title: str, note: str) -> str:
    """Render benchmark lines: one table for each set of columns, in the order of appearance."""
    if not rows:
        return f"## {title}\n\nNot measured in this run."
    parts = [f"## {title}\n\n{note}"]
    for columns, own in _by_columns(rows):
        parts.append(_table(list(columns), [[_figure(row[column]) for column in columns] for row in own]))
    return "\n\n".join(parts)


def _by_columns(rows: Sequence[Row]) -> Iterator[tuple[tuple[str, ...], list[Row]]]:
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row), []).append(row)
    yield from groups.items()


def _figure(value: Any) -> str:
    if isinstance(value, float) and not value.is_integer():
        return f"{value:,.2f}"
    return f"{value:,.0f}" if isinstance(value, int | float) else str(value)


def _failures(failures: Sequence[str]) -> str:
    if not failures:
        return ""
    lines = [f"- {failure.splitlines()[0]}" for failure in failures]
    return "## Not measured\n\nThese did not run to their end:\n\n" + "\n".join(lines)


def _method(about: Row) -> str:
    notes = [[row["name"], row["version"], row["note"]] for row in about["contenders"]]
    return (
        METHOD.format(command=about["command"], **about["parameters"])
        + "\n\n"
        + _table(["router", "version", "note"], notes)
    )


def _by(rows: Sequence[Row], key: str) -> Iterator[tuple[str, list[Row]]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[key], []).append(row)
    yield from groups.items()


def _median(rows: Sequence[Row], field: str) -> float:
    values = [row[field] for row in rows if row[field] is not None]
    return statistics.median(values) if values else float("nan")


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


if __name__ == "__main__":
    sys.exit(main())
