from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

WITHIN = Path(__file__).parents[2] / "scripts/within"


@pytest.mark.parametrize(
    ("seconds", "command", "status"),
    [
        ("60", "true", 0),
        ("60", "exit 3", 3),
        ("60", "exit 124", 1),
        ("0.05", "sleep 60", 0),
        ("0.5", "echo one of them FAILED; sleep 60", 1),
        ("60", 'test "$(printf %s "two  words")" = "two  words"', 0),
    ],
)
def test_a_command_passes_when_it_succeeds_or_its_time_is_up_without_a_failure(
    seconds: str, command: str, status: int
) -> None:
    run = subprocess.run([WITHIN, seconds, "sh", "-c", command], timeout=30)
    assert run.returncode == status
