"""The only module that reads a clock. Everything else is handed a time or a `Clock`."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds from an arbitrary origin, never going back."""

    def now_s(self) -> float:
        """Return the current time in seconds."""


class MonotonicClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        """Return seconds since an arbitrary origin."""
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told to: for tests and simulations."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        """Return the time set last."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward.

        Raises:
            ValueError: `seconds` is negative.
        """
        if seconds < 0:
            raise ValueError(f"time cannot go back by {-seconds} s")
        self._now_s += seconds


def wall_time_s() -> float:
    """Return seconds since the Unix epoch, for labels and logs only."""
    return time.time()
