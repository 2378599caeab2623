"""The soak, a short one: real processes under load while they are killed and stopped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).resolve().parents[2] / "benchmarks" / "soak.py"


@pytest.mark.parametrize("seed", [1, 2])
def test_nothing_is_lost_or_done_twice_while_engines_die_and_come_back(tmp_path: Path, seed: int) -> None:
    command = [sys.executable, str(SOAK), "--requests", "3000", "--seed", str(seed), "--fault-every-s", "1"]
    run = subprocess.run(
        [*command, "--folder", str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
