"""What a running process holds and uses, from `/proc`."""

from __future__ import annotations

import os
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes(pid: int) -> int:
    """Return the memory that the process has in use now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES


def cpu_s(pid: int) -> float:
    """Return the processor time that the process has used, all threads, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def descriptors(pid: int) -> int:
    """Return how many files the process has open."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))
