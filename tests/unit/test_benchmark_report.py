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
