"""`warmfront demo` as a user runs it: engines and router as processes, one table, nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DEADLINE_S = 90.0
COMMAND = [sys.executable, "-m", "warmfront", "demo", "--seconds", "3", "--rate", "6", "--engines", "2"]


@contextmanager
def demo(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """Run the demo with its logs in `directory`, which also marks every process it starts."""
    process = subprocess.Popen(
        COMMAND,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"TMPDIR": str(directory), "COLUMNS": "100", "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(timeout=DEADLINE_S)
        assert process.stdout is not None
        process.stdout.close()


def started_by(directory: Path) -> list[str]:
    """Command lines of living processes that carry the mark."""
    mark = f"TMPDIR={directory}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue  # It has just ended, or is not ours.
    return found


def test_demo_ends_with_one_table_and_leaves_nothing_running(tmp_path: Path) -> None:
    with demo(tmp_path) as process:
        output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, output
    rows = dict(re.findall(r"^│ (\S.*?) +│ +(\S.*?) +│", output, re.MULTILINE))
    assert rows["failed"] == "0", output
    exact = re.findall(r"predicted against reported: exact +│ +([\d.]+)% +│ +([\d.]+)%", output)
    assert exact, output
    assert min(float(share) for share in exact[0]) > 80.0, output
    assert started_by(tmp_path) == []


def test_a_terminated_demo_leaves_nothing_running(tmp_path: Path) -> None:
    with demo(tmp_path) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "round_robin" in line:
                break
        deadline_s = time.monotonic() + DEADLINE_S
        while len(started_by(tmp_path)) < 3:  # The demo and its engines.
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert started_by(tmp_path) == []
