"""Meters that tests look into."""

from __future__ import annotations

from warmfront.router.meter import NullMeter


class LastValues(NullMeter):
    """Keeps what was measured last, by metric."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def observe(self, name: str, labels: tuple[str, ...], value: float) -> None:
        self.values[name] = value

    def set(self, name: str, labels: tuple[str, ...], value: float) -> None:
        self.values[name] = value
