"""What a router adds to the time until the first byte: one relayed run between two direct ones.

What one would get wrong: subtracting a direct run of another minute. The two runs around the relayed one use the same
upstream and load generator seconds apart; half the distance between them is noise that no figure here can be better
than. No request goes both ways, so what is shown is the difference of percentiles, not the percentile of differences.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

Row = dict[str, Any]
BEFORE, RELAYED, AFTER = LEGS = ("direct before", "relayed", "direct after")


class Added(NamedTuple):
    """One round of one router, in milliseconds."""

    contender: str
    byte_p50_ms: float
    byte_p99_ms: float
    event_p99_ms: float
    relayed_p99_ms: float
    direct_p99_ms: tuple[float, float]
    """To the first byte, before and after."""
    open_mean: float
    """Streams in progress, on average over the window of the relayed run."""
    core: float
    """Share of its core that the router used meanwhile."""


def added(rows: Sequence[Row]) -> Iterator[Added]:
    """Compare the runs of every round that has all three, without errors, in the order of appearance."""
    rounds: dict[tuple[str, int], dict[str, Row]] = {}
    for row in rows:
        rounds.setdefault((row["contender"], row["round"]), {})[row["leg"]] = row
    for (contender, _), legs in rounds.items():
        if all(leg in legs and is_clean(legs[leg]) for leg in LEGS):
            yield _compare(contender, legs)


def is_clean(row: Row) -> bool:
    """Every request was sent and answered as it should be."""
    return bool(row["refused"] == 0 and row["broken"] == 0 and row.get("unsent", 0) == 0 and row.get("waiting", 0) == 0)


def _compare(contender: str, legs: dict[str, Row]) -> Added:
    relayed = legs[RELAYED]
    return Added(
        contender=contender,
        byte_p50_ms=_difference_ms(legs, "first_byte_p50_ms"),
        byte_p99_ms=_difference_ms(legs, "first_byte_p99_ms"),
        event_p99_ms=_difference_ms(legs, "first_event_p99_ms"),
        relayed_p99_ms=relayed["first_byte_p99_ms"],
        direct_p99_ms=(legs[BEFORE]["first_byte_p99_ms"], legs[AFTER]["first_byte_p99_ms"]),
        open_mean=relayed["open_mean"],
        core=relayed["cpu_s"] / relayed["window_s"],
    )


def _difference_ms(legs: dict[str, Row], field: str) -> float:
    direct = statistics.mean(legs[leg][field] for leg in (BEFORE, AFTER))
    return float(legs[RELAYED][field] - direct)


def noise_ms(rounds: Sequence[Added]) -> float:
    """Half the distance of the direct 99th percentiles around a relayed run; the median of the rounds."""
    return statistics.median(abs(before - after) / 2 for before, after in (each.direct_p99_ms for each in rounds))
