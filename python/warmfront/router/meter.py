"""Where the router's own numbers go. Names and labels are those of the metric catalogue."""

from __future__ import annotations

from typing import Protocol


class Meter(Protocol):
    """A registry of metrics. Calls must be cheap and must not raise."""

    def count(self, name: str, labels: tuple[str, ...], n: float) -> None:
        """Add `n` to a counter."""

    def observe(self, name: str, labels: tuple[str, ...], value: float) -> None:
        """Add a value to a histogram."""

    def set(self, name: str, labels: tuple[str, ...], value: float) -> None:
        """Set a gauge."""


class NullMeter:
    """Keeps nothing."""

    def count(self, name: str, labels: tuple[str, ...], n: float) -> None:
        """Do nothing."""

    def observe(self, name: str, labels: tuple[str, ...], value: float) -> None:
        """Do nothing."""

    def set(self, name: str, labels: tuple[str, ...], value: float) -> None:
        """Do nothing."""
