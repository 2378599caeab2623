"""Render `docs/reference/benchmarks.md` from what `run.py` measured, and from nothing else.

Every target is stated with the figure it is held against and a plain verdict. Wall-clock figures are medians over the
rounds; a ratio compares medians of the same run. The page says when it was made by a quick run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from places import PAGE, RESULTS

Row = dict[str, Any]
OURS = "warmfront"
MIB = 2**20
CORE_BUSY_MIN = 0.85
"""Below this share of its core a router was not the bottleneck and its wall rate says nothing about it."""
RATIO_MIN = {"1 KB": 1.0, "16 KB": 1.5, "400 KB": 1.5}
RELAY_CASES = ("flat out, 32 streams", "paced, 256 streams", "paced, 1,024 streams")
SILENT_CASE = "clients that never read"
SILENT_STREAM_BYTES_MAX = 2 * MIB
"""Bound on what a stream may cost whose client never reads."""
STORE_MBLOCKS_MIN = 5.0
LOOKUP_US_MAX = 100.0
LOOKUP_BLOCKS, LOOKUP_REPLICAS = 6250, 64


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
DECISION_NOTE = "Microseconds of `Router.step` for one request, the index lookup replaced by a stub."
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
17 MB each."""


class Verdict(NamedTuple):
    """One target with what was measured."""

    target: str
    measured: str
    met: bool | None
    """`None`: not measured in this run."""


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
    parts += [_lines(results["core"], "The index", CORE_NOTE), _lines(results["decision"], "Decisions", DECISION_NOTE)]
    parts += [_failures(results["failures"]), _method(results["about"])]
    return "\n\n".join(part for part in parts if part) + "\n"


def verdicts(results: Row) -> Iterator[Verdict]:
    """Hold what was measured against the targets of the project."""
    for size, ratio_min in RATIO_MIN.items():
        yield _against_best(
            results["requests"], "size", size, "requests_per_s", ratio_min, f"requests/s, {size} bodies"
        )
    for case in RELAY_CASES:
        yield _against_best(
            results["streams"], "case", case, "events_per_cpu_s", 1.0, f"relayed events per CPU-second, {case}"
        )
    yield _silent_clients(results["streams"])
    yield from _index_verdicts(results["core"])


def _against_best(rows: Sequence[Row], key: str, value: str, field: str, ratio_min: float, what: str) -> Verdict:
    figures = _medians([row for row in rows if row[key] == value], "contender", field)
    own = figures.pop(OURS, None)
    target = f"{what}: at least {ratio_min:g} times the best peer"
    if own is None or not figures:
        missing = OURS if own is None else "peers"
        return Verdict(target, f"{missing} not measured", None)
    best = max(figures, key=lambda name: figures[name])
    ratio = own / figures[best]
    return Verdict(target, f"{own:,.0f} against {figures[best]:,.0f} ({best}): {ratio:.2f} times", ratio >= ratio_min)


def _silent_clients(rows: Sequence[Row]) -> Verdict:
    target = f"memory a stream whose client never reads: at most {SILENT_STREAM_BYTES_MAX // MIB} MiB"
    own = _medians([row for row in rows if row["case"] == SILENT_CASE], "contender", "resident_bytes_a_stream").get(
        OURS
    )
    if own is None:
        return Verdict(target, f"{OURS} not measured", None)
    return Verdict(target, f"{own / 1024:,.0f} KiB", own <= SILENT_STREAM_BYTES_MAX)


def _index_verdicts(rows: Sequence[Row]) -> Iterator[Verdict]:
    stores = [row for row in rows if row["name"].startswith("store_")]
    rates = [min(row["first_replica_mblocks_s"], row["second_replica_mblocks_s"]) for row in stores]
    yield _bound(
        f"stored blocks applied a second and core: at least {STORE_MBLOCKS_MIN:g} million",
        min(rates, default=None),
        lambda rate: rate >= STORE_MBLOCKS_MIN,
        "{:.1f} million in the slowest case",
    )
    lookups = [row for row in rows if row.get("blocks") == LOOKUP_BLOCKS and row.get("replicas") == LOOKUP_REPLICAS]
    times = [row["lookup_us"] for row in lookups if "lookup_us" in row]
    yield _bound(
        f"lookup of {LOOKUP_BLOCKS:,} blocks over {LOOKUP_REPLICAS} replicas: under {LOOKUP_US_MAX:g} µs",
        max(times, default=None),
        lambda time: time < LOOKUP_US_MAX,
        "{:.1f} µs in the slowest case",
    )
    shares = [row["share_of_allowed"] for row in rows if row["name"].startswith("size_")]
    yield _bound(
        "resident memory: at most 64 bytes a distinct block plus 16 a (replica, block) fact",
        max(shares, default=None),
        lambda share: share <= 1.0,
        "{:.2f} times that in the largest case",
    )


def _bound(target: str, figure: float | None, holds: Callable[[float], bool], text: str) -> Verdict:
    if figure is None:
        return Verdict(target, "not measured", None)
    return Verdict(target, text.format(figure), holds(figure))


def _medians(rows: Sequence[Row], key: str, field: str) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for row in rows:
        if row[field] is not None and _is_clean(row):
            values.setdefault(row[key], []).append(row[field])
    return {name: statistics.median(figures) for name, figures in values.items()}


def _is_clean(row: Row) -> bool:
    return bool(row["refused"] == 0 and row["broken"] == 0)


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
        remarks = [_errors(own)] if not all(map(_is_clean, own)) else []
        remarks += ["not the bottleneck"] if busy < CORE_BUSY_MIN else []
        yield [
            name,
            f"{_median(own, 'requests_per_s'):,.0f} ({max(row['requests_per_s'] for row in own):,.0f})",
            f"{_median(own, 'requests_per_cpu_s'):,.0f}",
            f"{_median(own, 'p50_ms'):,.1f}",
            f"{_median(own, 'p99_ms'):,.1f}",
            f"{busy:.0%}",
            f"{max(row['resident_bytes_max'] for row in own) / MIB:,.0f}",
            "; ".join(remarks),
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
        header = ["router", "memory MiB", "KiB a stream"]
        parts.append(f"### {SILENT_CASE[0].upper()}{SILENT_CASE[1:]}\n\n" + _table(header, list(_silent_rows(silent))))
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
            "" if all(map(_is_clean, own)) else _errors(own),
        ]


def _silent_rows(rows: Sequence[Row]) -> Iterator[list[str]]:
    for name, own in _by(rows, "contender"):
        memory = max(row["resident_bytes_max"] for row in own) / MIB
        yield [name, f"{memory:,.0f}", f"{_median(own, 'resident_bytes_a_stream') / 1024:,.0f}"]


def _errors(rows: Sequence[Row]) -> str:
    refused, broken = sum(row["refused"] for row in rows), sum(row["broken"] for row in rows)
    return f"{refused:,} refused, {broken:,} broken; not ranked"


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
