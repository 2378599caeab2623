"""The benchmark page says what the figures say."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PATH = Path(__file__).parents[2] / "benchmarks/report.py"


@pytest.fixture(scope="module")
def report() -> Iterator[ModuleType]:
    sys.path.insert(0, str(PATH.parent))
    spec = importlib.util.spec_from_file_location("benchmark_report", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(PATH.parent))


def request_row(contender: str, rate: float, **fields: Any) -> dict[str, Any]:
    figures = {"requests_per_cpu_s": rate, "p50_ms": 1.0, "p99_ms": 2.0, "cpu_s": 5.0, "window_s": 5.0}
    memory = {"resident_bytes_max": 2**20}
    row = {"contender": contender, "size": "1 KB", "round": 0, "requests_per_s": rate, "refused": 0, "broken": 0}
    return {**row, **figures, **memory, **fields}


def results(*requests: dict[str, Any], core: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    machine = {"processor": "P", "cores": 2, "memory_gib": 8, "kernel": "6", "load_average_at_start": 0.1}
    parameters = {"rounds": 3, "warmup_s": 2.0, "window_s": 5.0, "connections": 16, "shared": 0.8, "pace_ms": 20}
    about = {"date": "2026-01-01", "commit": "abc", "quick": False, "command": "run", "machine": machine}
    about |= {"versions": {"python": "3", "rust": "1"}, "parameters": parameters, "contenders": []}
    return {
        "about": about,
        "failures": [],
        "core": core or [],
        "decision": [],
        "requests": list(requests),
        "streams": [],
    }


def verdict(report: ModuleType, measured: dict[str, Any], beginning: str) -> Any:
    return next(verdict for verdict in report.verdicts(measured) if verdict.target.startswith(beginning))


def test_a_target_is_held_against_the_median_of_the_best_peer(report: ModuleType) -> None:
    rows = [request_row("warmfront", rate) for rate in (90, 110, 500)]
    rows += [request_row("slow", 50), request_row("fast", 100), request_row("fast", 104)]
    held = verdict(report, results(*rows), "requests/s, 1 KB")
    assert held.met
    assert held.measured == "110 against 102 (fast): 1.08 times"


def test_a_missed_target_is_called_missed(report: ModuleType) -> None:
    measured = results(request_row("warmfront", 99), request_row("fast", 100))
    assert verdict(report, measured, "requests/s, 1 KB").met is False
    assert "| **missed** |" in report.render(measured)


def test_a_peer_with_refused_requests_is_shown_but_not_ranked(report: ModuleType) -> None:
    measured = results(request_row("warmfront", 10), request_row("loud", 900, refused=3), request_row("fair", 9))
    assert "(fair)" in verdict(report, measured, "requests/s, 1 KB").measured
    assert "3 refused, 0 broken; not ranked" in report.render(measured)


def test_an_idle_core_is_pointed_out(report: ModuleType) -> None:
    assert "not the bottleneck" in report.render(results(request_row("warmfront", 10, cpu_s=1.0)))


def test_without_figures_a_target_is_neither_met_nor_missed(report: ModuleType) -> None:
    assert {held.met for held in report.verdicts(results())} == {None}


def test_index_targets_look_at_the_slowest_case(report: ModuleType) -> None:
    stores = [
        {"name": "store_shared_names", "first_replica_mblocks_s": first, "second_replica_mblocks_s": second}
        for first, second in ((9.0, 8.0), (7.0, 4.9))
    ]
    lookup = {"name": "lookup", "blocks": 6250, "replicas": 64, "lookup_us": 60.0}
    size = {"name": "size_own_names", "share_of_allowed": 0.9}
    measured = results(core=[*stores, lookup, size])
    assert verdict(report, measured, "stored blocks").met is False
    assert verdict(report, measured, "lookup of").met is True
    assert verdict(report, measured, "resident memory").met is True


def leg(name: str, p99_ms: float, contender: str = "warmfront", number: int = 0, **fields: Any) -> dict[str, Any]:
    times = {"first_byte_p50_ms": p99_ms / 2, "first_byte_p99_ms": p99_ms, "first_event_p99_ms": p99_ms + 0.5}
    row = {"contender": contender, "leg": name, "round": number, "refused": 0, "broken": 0, "unsent": 0, "waiting": 0}
    return {**row, **times, "open_mean": 1000.0, "cpu_s": 2.5, "window_s": 5.0, **fields}


def legs(before_ms: float, relayed_ms: float, after_ms: float, **fields: Any) -> list[dict[str, Any]]:
    return [
        leg("direct before", before_ms, **fields),
        leg("relayed", relayed_ms, **fields),
        leg("direct after", after_ms, **fields),
    ]


def silent_row(kib: float, **fields: Any) -> dict[str, Any]:
    row = {"contender": "warmfront", "case": "clients that never read", "streams": 256, "refused": 0, "broken": 0}
    return {**row, "resident_bytes_a_stream": kib * 1024, "resident_bytes_max": 2**28, **fields}


def decision_row(replicas: int, median_us: float, bench: str = "decision") -> dict[str, Any]:
    times = {"min_us": 0.5 * median_us, "median_us": median_us, "p99_us": 2 * median_us, "rounds": 10}
    return {"bench": bench, "policy": "marginal_cost", "replicas": replicas, **times}


def test_added_time_is_the_relayed_run_less_the_mean_of_the_direct_ones(report: ModuleType) -> None:
    measured = {**results(), "first_bytes": legs(1.0, 5.0, 3.0)}
    held = verdict(report, measured, "added time to the first byte")
    assert (held.met, held.measured) == (True, "3.0 ms, 3.0 ms")
    assert "| warmfront | 1.50 | 3.00 | 3.00 | 5.00 | 1.00, 3.00 | 1,000 | 50% |  |" in report.render(measured)


def test_added_time_is_the_median_of_the_rounds_at_the_bound_missed(report: ModuleType) -> None:
    rounds = [row for number, p99_ms in enumerate((2.0, 6.0, 90.0)) for row in legs(1.0, p99_ms, 1.0, number=number)]
    held = verdict(report, {**results(), "first_bytes": rounds}, "added time to the first byte")
    assert (held.met, held.measured) == (False, "5.0 ms, 5.0 ms")


def test_a_late_first_event_misses_the_target_of_the_first_byte(report: ModuleType) -> None:
    rows = legs(1.0, 2.0, 1.0)
    rows[1]["first_event_p99_ms"] = 30.0
    assert verdict(report, {**results(), "first_bytes": rows}, "added time to the first byte").met is False


def test_a_round_without_its_second_direct_run_is_no_measurement(report: ModuleType) -> None:
    measured = {**results(), "first_bytes": legs(1.0, 2.0, 1.0)[:2]}
    assert verdict(report, measured, "added time to the first byte").met is None
    assert "not measured in one piece" in report.render(measured)


@pytest.mark.parametrize("trouble", ["refused", "broken", "unsent", "waiting"])
def test_unanswered_streams_miss_the_target_of_the_first_byte(report: ModuleType, trouble: str) -> None:
    rows = legs(1.0, 2.0, 1.0)
    rows[1][trouble] = 7
    measured = {**results(), "first_bytes": rows}
    assert verdict(report, measured, "added time to the first byte").met is False
    assert f"7 {trouble}" in report.render(measured)


def test_noise_above_what_was_added_is_pointed_out(report: ModuleType) -> None:
    noisy, quiet = legs(1.0, 5.0, 8.0), legs(1.0, 2.0, 1.1)
    remark = "the direct runs differ by more than was added"
    assert remark in report.render({**results(), "first_bytes": noisy})
    assert remark not in report.render({**results(), "first_bytes": quiet})


def test_figures_of_an_earlier_run_without_first_bytes_still_render(report: ModuleType) -> None:
    page = report.render(results())
    assert "## Time to the first byte" not in page
    assert (
        "added time to the first byte and event, 1,000 paced streams: p99 under 5 ms | warmfront not measured" in page
    )


@pytest.mark.parametrize(("kib", "met"), [(256.0, True), (257.0, False)])
def test_a_stream_that_is_never_read_may_cost_256_kib(report: ModuleType, kib: float, met: bool) -> None:
    measured = results()
    measured["streams"] = [silent_row(kib)]
    held = verdict(report, measured, "memory a stream")
    assert (held.met, held.target) == (met, "memory a stream whose client never reads: at most 256 KiB")
    assert f"| warmfront | 256 | 256 | {kib:.0f} |  |" in report.render(measured)


def test_refused_streams_cost_nothing_and_prove_nothing(report: ModuleType) -> None:
    measured = results()
    measured["streams"] = [silent_row(0.0, refused=256)]
    assert verdict(report, measured, "memory a stream").met is False


def test_the_median_of_a_decision_counts(report: ModuleType) -> None:
    measured = results()
    measured["decision"] = [decision_row(64, 99.9), decision_row(512, 400.0)]
    measured["decision"] += [decision_row(512, 10.0, bench="request_life")]
    assert verdict(report, measured, "decision over 64").met is True
    held = verdict(report, measured, "decision over 512")
    assert (held.met, held.measured) == (False, "400.0 µs in the median")
