"""What is to happen at known times of a run on virtual time, or after known numbers of its requests."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count


class Agenda:
    """What is to happen at known times, in order; what was entered first comes first."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._after: list[tuple[int, int, Callable[[], None]]] = []
        self._requests = 0

    @property
    def next_s(self) -> float:
        """When the next entry is due; never: infinity."""
        return self._entries[0][0] if self._entries else float("inf")

    def add(self, at_s: float, action: Callable[[], None]) -> None:
        """Enter something."""
        heapq.heappush(self._entries, (at_s, next(self._numbers), action))

    def add_after(self, requests: int, action: Callable[[], None]) -> None:
        """Enter something that happens when so many requests have come, before the next one does."""
        heapq.heappush(self._after, (requests, next(self._numbers), action))

    def request_came(self) -> None:
        """Count a request; what is due before it happens now."""
        while self._after and self._after[0][0] <= self._requests:
            heapq.heappop(self._after)[2]()
        self._requests += 1

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
