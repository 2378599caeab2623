"""The targets of the project, each held against what `run.py` measured.

Wall-clock figures are medians over the rounds; a ratio compares medians of the same run. Rows with refused or broken
requests are not ranked. Of a decision the median counts too: what a router waits for that runs nothing else.
"""

from __future__ import annotations

import operator
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from first_bytes import Row, added, is_clean

OURS = "warmfront"
KIB = 1024
RATIO_MIN = {"1 KB": 1.0, "16 KB": 1.5, "400 KB": 1.5}
RELAY_CASES = ("flat out, 32 streams", "paced, 256 streams", "paced, 1,024 streams")
SILENT_CASE = "clients that never read"
SILENT_STREAM_BYTES_MAX = 256 * KIB
"""Bound on what a stream may cost whose client never reads."""
ADDED_P99_MS_MAX = 5.0
STORE_MBLOCKS_MIN = 5.0
LOOKUP_US_MAX = 100.0
LOOKUP_BLOCKS, LOOKUP_REPLICAS = 6250, 64
DECISION_POLICY = "marginal_cost"
DECISION_US_MAX = {64: 100.0, 512: 400.0}
"""By number of replicas."""
NOT_CLEAN = "not every stream was answered"


class Verdict(NamedTuple):
    """One target with what was measured."""

    target: str
    measured: str
    met: bool | None
    """`None`: not measured in this run."""


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
    yield _first_bytes(results.get("first_bytes", []))
    yield _silent_clients(results["streams"])
    yield from _index_verdicts(results["core"])
    yield from _decision_verdicts(results["decision"])


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


def _first_bytes(rows: Sequence[Row]) -> Verdict:
    target = f"added time to the first byte and event, 1,000 paced streams: p99 under {ADDED_P99_MS_MAX:g} ms"
    rows = [row for row in rows if row["contender"] == OURS]
    if not all(map(is_clean, rows)):
        return Verdict(target, NOT_CLEAN, False)
    own = list(added(rows))
    if not own:
        return Verdict(target, f"{OURS} not measured", None)
    byte_ms = statistics.median(each.byte_p99_ms for each in own)
    event_ms = statistics.median(each.event_p99_ms for each in own)
    return Verdict(target, f"{byte_ms:.1f} ms, {event_ms:.1f} ms", max(byte_ms, event_ms) < ADDED_P99_MS_MAX)


def _silent_clients(rows: Sequence[Row]) -> Verdict:
    target = f"memory a stream whose client never reads: at most {SILENT_STREAM_BYTES_MAX // KIB} KiB"
    silent = [row for row in rows if row["case"] == SILENT_CASE and row["contender"] == OURS]
    if not silent:
        return Verdict(target, f"{OURS} not measured", None)
    if not all(map(is_clean, silent)):
        return Verdict(target, NOT_CLEAN, False)
    own = statistics.median(row["resident_bytes_a_stream"] for row in silent)
    return Verdict(target, f"{own / KIB:,.0f} KiB", own <= SILENT_STREAM_BYTES_MAX)


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


def _decision_verdicts(rows: Sequence[Row]) -> Iterator[Verdict]:
    own = [row for row in rows if row["bench"] == "decision" and row["policy"] == DECISION_POLICY]
    for replicas, time_us_max in DECISION_US_MAX.items():
        times = [row["median_us"] for row in own if row["replicas"] == replicas]
        yield _bound(
            f"decision over {replicas} replicas: under {time_us_max:g} µs",
            min(times, default=None),
            partial(operator.gt, time_us_max),
            "{:.1f} µs in the median",
        )


def _bound(target: str, figure: float | None, holds: Callable[[float], bool], text: str) -> Verdict:
    if figure is None:
        return Verdict(target, "not measured", None)
    return Verdict(target, text.format(figure), holds(figure))


def _medians(rows: Sequence[Row], key: str, field: str) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for row in rows:
        if row[field] is not None and is_clean(row):
            values.setdefault(row[key], []).append(row[field])
    return {name: statistics.median(figures) for name, figures in values.items()}
