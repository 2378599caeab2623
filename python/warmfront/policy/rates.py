"""How often each of many keys is asked for: decayed counts, bounded in number."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from itertools import islice
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Rates(Generic[Key]):
    """Counts by key. The key that was asked for longest ago goes first."""

    def __init__(self, *, window_s: float, keys_max: int) -> None:
        """Make an empty one.

        Args:
            window_s: Time constant of the decay.
            keys_max: Bound on keys.
        """
        self._window_s = window_s
        self._keys_max = keys_max
        self._counts: dict[Key, tuple[float, float]] = {}
        """Count and when it was that, the newest last."""

    def count(self, key: Key, now_s: float) -> None:
        """Note that a key is asked for."""
        self._put(key, self.requests(key, now_s) + 1.0, now_s)

    def requests(self, key: Key, now_s: float) -> float:
        """Return the requests for a key in the last window, decayed."""
        known = self._counts.get(key)
        if known is None:
            return 0.0
        count, counted_s = known
        return count * math.exp((counted_s - now_s) / self._window_s)

    def newest(self, keys: int, now_s: float) -> list[tuple[Key, float, float]]:
        """Return the keys asked for last, the oldest of them first: key, count, and seconds since it was that."""
        rows = list(islice(reversed(self._counts.items()), keys))
        return [(key, count, now_s - counted_s) for key, (count, counted_s) in reversed(rows)]

    def take(self, rows: Sequence[tuple[Key, float, float]], now_s: float) -> None:
        """Add rows of another one to what was counted since."""
        for key, count, age_s in rows:
            self._put(key, self.requests(key, now_s) + count * math.exp(-age_s / self._window_s), now_s)

    def _put(self, key: Key, count: float, now_s: float) -> None:
        self._counts.pop(key, None)
        self._counts[key] = (count, now_s)
        if len(self._counts) > self._keys_max:
            del self._counts[next(iter(self._counts))]
