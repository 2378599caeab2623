"""Whose turn it is: the flows of one priority band, served by weight.

Each flow carries the tokens that were served to it, divided by its weight; the one with the least is next. That is what
deficit round robin approximates with quanta, without the rounds that a request of 100,000 tokens would need. What is
easy to get wrong: a flow that comes back starts where the one served last stood, or where it left off if that is later.
So idling saves nothing up, and leaving for a moment sheds no debt.

Nothing here looks at all that waits: the next flow and the fullest one are the tops of two heaps. Entries that have
become wrong are dropped when they come up, and both heaps are rebuilt before they outgrow the flows.

Source: P. Goyal, H. Vin, H. Cheng, "Start-time fair queuing", SIGCOMM 1996; the counter is that of Y. Sheng et al.,
"Fairness in serving large language models", OSDI 2024.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec import Struct

from warmfront.types import Request, RequestId, Slot

REMEMBERED_MAX = 4096
"""Flows without a waiting request whose debt is remembered; the oldest are forgotten first."""
SLACK = 64
"""Wrong entries a heap may hold beyond one for each flow."""


class Waiting(Struct):
    """A request without a replica."""

    request: Request
    since_s: float
    deadline_s: float
    tried: list[Slot]
    """Replicas that could not be reached for it."""
    attempts: int
    """Decisions made for it already."""
    band: int = 0
    """Priority band; a lower number is served first."""


@dataclass(slots=True, eq=False)
class _Line:
    """What one flow has waiting in a band."""

    flow: str
    served: float
    """Tokens by weight, from where it started."""
    listed: float = 0.0
    """Fullness under which it is listed: never below the true one."""
    is_passed: bool = False
    aside: list[RequestId] = field(default_factory=list)
    """Requests that stepped back since `resume`, in order."""
    requests: OrderedDict[RequestId, Waiting] = field(default_factory=OrderedDict)


class Band:
    """The waiting requests of one priority band of one pool."""

    def __init__(self, weight_of: Callable[[str], float]) -> None:
        """Make an empty band; `weight_of` gives a flow's weight, above 0."""
        self._weight_of = weight_of
        self._lines: dict[str, _Line] = {}
        self._turns: list[tuple[float, int, _Line]] = []
        self._fullest: list[tuple[float, int, _Line]] = []
        self._passed: list[_Line] = []
        self._debts: dict[str, float] = {}
        self._start = 0.0
        """Where a new flow starts: what the flow served last had before."""
        self._entries = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __contains__(self, flow: str) -> bool:
        return flow in self._lines

    def add(self, waiting: Waiting, *, first: bool = False) -> None:
        """Put a request at the end of its flow, or at its beginning."""
        request = waiting.request
        line = self._lines.get(request.flow)
        if line is None:
            line = _Line(request.flow, max(self._start, self._debts.pop(request.flow, 0.0)))
            self._lines[request.flow] = line
            self._push_turn(line)
        line.requests[request.id] = waiting
        if first:
            line.requests.move_to_end(request.id, last=False)
        self._size += 1
        fullness = self._fullness(line)
        if fullness > line.listed:
            self._push_fullest(line, fullness)

    def head(self) -> Waiting | None:
        """Return the request whose turn it is; `None`: no flow waits that was not passed over."""
        turns = self._turns
        while turns:
            served, _, line = turns[0]
            if line.requests and not line.is_passed and served == line.served:
                return next(iter(line.requests.values()))
            heapq.heappop(turns)
        return None

    def served(self, waiting: Waiting, tokens: float) -> None:
        """Take out a request that got its replica, and charge its flow."""
        line = self._lines[waiting.request.flow]
        self._start = max(self._start, line.served)
        line.served += tokens / self._weight_of(line.flow)
        self.remove(waiting)
        if line.requests:
            self._push_turn(line)

    def remove(self, waiting: Waiting) -> None:
        """Take out a request that waits no more."""
        flow = waiting.request.flow
        line = self._lines[flow]
        del line.requests[waiting.request.id]
        self._size -= 1
        if line.requests:
            return
        del self._lines[flow]
        if not self._size:
            self._forget()
        elif line.served > self._start:
            self._remember(line)

    def pass_over(self, waiting: Waiting) -> None:
        """Leave the flow of this request out until `resume`: it waits for a replica that others do not need.

        A request that was sent before steps back alone: which replicas it may not go to again says nothing of its flow.
        """
        line = self._lines[waiting.request.flow]
        if not line.aside:
            self._passed.append(line)
        line.aside.append(waiting.request.id)
        if waiting.attempts and len(line.aside) < len(line.requests):
            line.requests.move_to_end(waiting.request.id)
        else:
            line.is_passed = True

    def resume(self) -> None:
        """Let every flow that was passed over take its turn again."""
        for line in self._passed:
            for request_id in reversed(line.aside):
                if request_id in line.requests:
                    line.requests.move_to_end(request_id, last=False)
            line.aside.clear()
            if line.is_passed and line.requests:
                self._push_turn(line)
            line.is_passed = False
        self._passed.clear()

    def newest_of_fullest(self) -> Waiting:
        """Return the newest request of the flow that has most waiting for its weight. The band is not empty."""
        while True:
            listed, _, line = self._fullest[0]
            fullness = self._fullness(line)
            if -listed == line.listed and line.requests and fullness >= line.listed:
                return next(reversed(line.requests.values()))
            heapq.heappop(self._fullest)
            if -listed == line.listed and line.requests:
                self._push_fullest(line, fullness)

    def newest_of(self, flow: str) -> Waiting:
        """Return the newest request of a flow that waits here."""
        return next(reversed(self._lines[flow].requests.values()))

    def _fullness(self, line: _Line) -> float:
        return len(line.requests) / self._weight_of(line.flow)

    def _push_turn(self, line: _Line) -> None:
        if len(self._turns) > 2 * len(self._lines) + SLACK:
            self._turns = [
                (each.served, row, each) for row, each in enumerate(self._lines.values()) if each is not line
            ]
            heapq.heapify(self._turns)
        self._entries += 1
        heapq.heappush(self._turns, (line.served, self._entries, line))

    def _push_fullest(self, line: _Line, fullness: float) -> None:
        line.listed = fullness
        if len(self._fullest) > 2 * len(self._lines) + SLACK:
            others = [each for each in self._lines.values() if each is not line]
            self._fullest = [(-each.listed, row, each) for row, each in enumerate(others)]
            heapq.heapify(self._fullest)
        self._entries += 1
        heapq.heappush(self._fullest, (-fullness, self._entries, line))

    def _remember(self, line: _Line) -> None:
        self._debts.pop(line.flow, None)
        self._debts[line.flow] = line.served
        if len(self._debts) > REMEMBERED_MAX:
            del self._debts[next(iter(self._debts))]

    def _forget(self) -> None:
        """Begin anew: nobody waits, so nobody is owed anything."""
        self._turns.clear()
        self._fullest.clear()
        self._passed.clear()
        self._debts.clear()
        self._start = 0.0
