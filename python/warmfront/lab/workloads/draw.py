"""What workloads are made from: random streams, fresh content ids, and the size of the run."""

from __future__ import annotations

import itertools
from random import Random


class Draw:
    """What a workload is made from: random streams by name, fresh content ids, and the size of the run.

    Streams of different names are independent, so that drawing more from one leaves the others as they were. Content
    and session ids are shared with the parts of a mixture: no two parts ever mean the same content by accident.
    """

    def __init__(self, *, seed: int, load: float, requests: int, path: str = "", ids: _Ids | None = None) -> None:
        self.load = load
        self.requests = requests
        self._seed = seed
        self._path = path
        self._ids = ids or _Ids()

    def stream(self, name: str) -> Random:
        """Return a new stream; the same name begins it anew."""
        return Random(f"{self._seed}/{self._path}{name}")

    def part(self, name: str) -> Draw:
        """Return the same for a part of this workload, with streams of its own."""
        return Draw(seed=self._seed, load=self.load, requests=self.requests, path=f"{self._path}{name}/", ids=self._ids)

    def contents(self, number: int) -> range:
        """Return content ids that mean nothing yet."""
        start = self._ids.content
        self._ids.content += number
        return range(start, self._ids.content)

    def content(self) -> int:
        """Return one such id."""
        return self.contents(1).start

    def session(self) -> int:
        """Return a number for one more conversation."""
        return next(self._ids.sessions)


class _Ids:
    def __init__(self) -> None:
        self.content = 1
        self.sessions = itertools.count()
