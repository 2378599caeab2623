"""Where benchmarks find and leave their files."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target").resolve()
RESULTS = TARGET / "bench"
"""Figures and logs of the last run; never committed, only the rendered page is."""
PAGE = ROOT / "docs/reference/benchmarks.md"
