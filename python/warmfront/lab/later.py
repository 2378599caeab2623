"""The same requests, each up to a millisecond later: what changes then is chance.

Each request is moved by its own number and not by the order in which requests come, so that what a policy does to one
does not move another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from msgspec.structs import replace

from warmfront.lab.model import SimRequest, Source

LATER_S_MAX = 1e-3


class Later:
    """A workload whose requests come a little later. See `model.Source`."""

    def __init__(self, source: Source, draw: int) -> None:
        """Take the requests of `source`; `draw` is the seed of the delays."""
        self._source, self._draw = source, draw

    def arrivals(self) -> Iterator[SimRequest]:
        """Yield the requests that do not depend on answers, `at_s` never decreasing."""
        last_s = 0.0
        for request in self._source.arrivals():
            last_s = max(last_s, self._at_s(request))
            yield replace(request, at_s=last_s)

    def finished(self, request: SimRequest, now_s: float) -> Sequence[SimRequest]:
        """Return what follows an answer."""
        return [replace(each, at_s=self._at_s(each)) for each in self._source.finished(request, now_s)]

    def _at_s(self, request: SimRequest) -> float:
        return request.at_s + Random(f"{self._draw}:{request.key}").uniform(0.0, LATER_S_MAX)
