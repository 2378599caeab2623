"""Whatever code names a metric, the catalogue declares it, and the other way round."""

from __future__ import annotations

import re
from pathlib import Path

from warmfront.obs.catalog import METRICS

ROOT = Path(__file__).resolve().parents[3]
LITERAL = re.compile(r'"(warmfront_[a-z_]+)"')
NOT_METRICS = {"warmfront_core", "warmfront_py", "warmfront_bench", "warmfront_unknown_metrics_total"}
"""Crates; and the counter of names that the catalogue does not have, which cannot be in it."""


def named_in_code() -> set[str]:
    sources = [*ROOT.glob("crates/warmfront-core/src/**/*.rs"), *ROOT.glob("python/warmfront/**/*.py")]
    return {name for path in sources for name in LITERAL.findall(_without_tests(path))} - NOT_METRICS


def _without_tests(path: Path) -> str:
    """The part of a file that ships: Rust unit tests may invent names."""
    if path.stem.startswith("test"):
        return ""
    return path.read_text(encoding="utf-8").partition("#[cfg(test)]")[0]


def test_code_names_only_declared_metrics() -> None:
    assert named_in_code() <= {metric.name for metric in METRICS}


def test_every_declared_metric_is_used() -> None:
    assert {metric.name for metric in METRICS} <= named_in_code()
