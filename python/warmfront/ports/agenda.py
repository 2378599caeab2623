"""What is to happen at known times of a run on virtual time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count


class Agenda:
    """What is to happen at known times, in order; what was entered first comes first."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    @property
    def next_s(self) -> float:
        """When the next entry is due; never: infinity."""
        return self._entries[0][0] if self._entries else float("inf")

    def add(self, at_s: float, action: Callable[[], None]) -> None:
        """Enter something."""
        heapq.heappush(self._entries, (at_s, next(self._numbers), action))

    def every(self, interval_s: float, action: Callable[[], None], *, first_s: float) -> None:
        """Enter something that comes again and again."""

        def again(at_s: float) -> None:
            action()
            self.add(at_s + interval_s, lambda: again(at_s + interval_s))

        self.add(first_s, lambda: again(first_s))

    def run(self, now_s: float) -> None:
        """Do everything that is due."""
        while self.next_s <= now_s:
            heapq.heappop(self._entries)[2]()
