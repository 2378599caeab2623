"""Requests that wait for a replica: bounded, in strict priority bands, in fair turns inside a band.

One queue for each pool, each with the configured bounds: a pool without room fills its own queue and no other. What
arrives is offered room as it comes (`take_new`); only what cannot be placed enters a queue. What is easy to get wrong:
nothing here may look at all that waits, since thousands may. Deadlines are a heap, turns and the fullest flow are heaps
of the band (`turns.py`), and the oldest request is the first of an ordered dictionary.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections import OrderedDict
from collections.abc import Callable

from warmfront.config import FlowConfig
from warmfront.router.admission import NOT_READY
from warmfront.router.turns import SLACK, Band, Waiting
from warmfront.types import Request, RequestId, Slot

WAIT_PRIOR_S = 5.0
"""How long requests wait, before any was seen to be served after waiting."""
RETRY_AFTER_S_MIN = 1.0
BAND_MAX = 8
"""Priorities beyond ±8 count as ±8: 17 bands, whatever clients send."""


class Queue:
    """All that waits for one pool."""

    def __init__(self, weight_of: Callable[[str], float]) -> None:
        """Make an empty queue."""
        self._weight_of = weight_of
        self._bands: dict[int, Band] = {}
        self._order: list[int] = []
        self.requests: OrderedDict[RequestId, Waiting] = OrderedDict()
        """In the order in which they began to wait."""
        self.of_flow: dict[str, int] = {}
        """Requests by flow, over all bands."""
        self.grown: dict[str, None] = {}
        """Flows with a new request since their bound was last checked."""
        self.held = NOT_READY
        """Why the last request that was tried could not be placed."""
        self.waits_for_memory: tuple[RequestId, int] | None = None
        """The request in front and the pool's releases, when only a release can make room for it."""

    def __len__(self) -> int:
        return len(self.requests)

    def add(self, waiting: Waiting) -> None:
        """Put a request in its flow's line: a new one at the end, one that was sent before in front."""
        number, flow = waiting.band, waiting.request.flow
        if number not in self._bands:
            self._bands[number] = Band(self._weight_of)
            insort(self._order, number)
        self._bands[number].add(waiting, first=waiting.attempts > 0)
        self.requests[waiting.request.id] = waiting
        self.of_flow[flow] = self.of_flow.get(flow, 0) + 1
        self.grown[flow] = None

    def remove(self, waiting: Waiting) -> None:
        """Take out a request that waits no more."""
        self._bands[waiting.band].remove(waiting)
        self._gone(waiting)

    def served(self, waiting: Waiting, tokens: float) -> None:
        """Take out a request that got its replica, and charge its flow."""
        self._bands[waiting.band].served(waiting, tokens)
        self._gone(waiting)

    def head(self) -> Waiting | None:
        """Return the request whose turn it is; `None`: nothing waits that was not passed over."""
        for number in self._order:
            if (waiting := self._bands[number].head()) is not None:
                return waiting
        return None

    def pass_over(self, waiting: Waiting) -> None:
        """Leave the flow of this request out until `resume`."""
        self._bands[waiting.band].pass_over(waiting)

    def resume(self) -> None:
        """Let every flow that was passed over take its turn again."""
        for band in self._bands.values():
            band.resume()

    def last(self) -> Waiting:
        """Return the request to shed first: of the lowest priority, of the fullest flow there, the newest."""
        number = next(number for number in reversed(self._order) if len(self._bands[number]))
        return self._bands[number].newest_of_fullest()

    def last_of(self, flow: str) -> Waiting:
        """Return the newest request of a flow's lowest priority."""
        number = next(number for number in reversed(self._order) if flow in self._bands[number])
        return self._bands[number].newest_of(flow)

    def oldest_s(self) -> float:
        """Return since when the first of all waits. The queue is not empty."""
        return next(iter(self.requests.values())).since_s

    def by_band(self) -> dict[int, int]:
        """Count requests by band, those bands included that were used before."""
        return {number: len(self._bands[number]) for number in self._order}

    def _gone(self, waiting: Waiting) -> None:
        flow = waiting.request.flow
        del self.requests[waiting.request.id]
        if self.of_flow[flow] == 1:
            del self.of_flow[flow]
        else:
            self.of_flow[flow] -= 1


class Flow:
    """All waiting requests."""

    def __init__(self, config: FlowConfig) -> None:
        self.config = config
        self._new: dict[RequestId, Waiting] = {}
        self._queues: dict[str, Queue] = {}
        self._queue_of: dict[RequestId, Queue] = {}
        self._deadlines: list[tuple[float, RequestId]] = []
        self._stop_s = math.inf
        self._mean_wait_s = WAIT_PRIOR_S

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._new or request_id in self._queue_of

    def __len__(self) -> int:
        return len(self._new) + len(self._queue_of)

    def reconfigure(self, config: FlowConfig) -> None:
        """Use other bounds and weights from now on; requests that wait keep their deadline."""
        self.config = config

    def stop(self, at_s: float) -> None:
        """Let nothing wait beyond `at_s`."""
        self._stop_s = at_s

    def add(self, request: Request, now_s: float, *, tried: list[Slot], attempts: int) -> None:
        """Take in a request that is to be offered room."""
        deadline_s = now_s + self.config.queue_timeout_s
        if request.deadline_s is not None and request.deadline_s < deadline_s:
            deadline_s = request.deadline_s
        priority = request.priority
        band = priority if -BAND_MAX <= priority <= BAND_MAX else max(-BAND_MAX, min(BAND_MAX, priority))
        self._new[request.id] = Waiting(request, now_s, deadline_s, tried, attempts, band)

    def take_new(self) -> list[Waiting]:
        """Take out the requests that were not offered room yet: by band, else in the order of arrival."""
        new = list(self._new.values())
        self._new.clear()
        if len(new) > 1:
            new.sort(key=_band)
        return new

    def is_late(self, waiting: Waiting, now_s: float) -> bool:
        """Return whether a request's time is up."""
        return now_s >= waiting.deadline_s or now_s >= self._stop_s

    def may_still_go(self, waiting: Waiting, now_s: float) -> bool:
        """Return whether only our own bound is over: the client has not given up, and this process serves on."""
        deadline_s = waiting.request.deadline_s
        return self.config.overflow == "send" and now_s < self._stop_s and (deadline_s is None or now_s < deadline_s)

    def hold(self, waiting: Waiting) -> None:
        """Let a request wait in its pool's queue."""
        request = waiting.request
        queue = self._queues.get(request.pool)
        if queue is None:
            queue = self._queues[request.pool] = Queue(self._weight)
        queue.add(waiting)
        self._queue_of[request.id] = queue
        if len(self._deadlines) > 2 * len(self._queue_of) + SLACK:
            self._deadlines = [
                (each.deadline_s, id_) for one in self._queues.values() for id_, each in one.requests.items()
            ]
            heapq.heapify(self._deadlines)
        else:
            heapq.heappush(self._deadlines, (waiting.deadline_s, request.id))

    def cancel(self, request_id: RequestId) -> bool:
        """Forget a request; return whether it waited."""
        if self._new.pop(request_id, None) is not None:
            return True
        queue = self._queue_of.pop(request_id, None)
        if queue is None:
            return False
        queue.remove(queue.requests[request_id])
        return True

    def served(self, waiting: Waiting, now_s: float, tokens: float) -> None:
        """Take out a request that got its replica, if it was held, and learn how long such requests wait.

        Args:
            waiting: The request.
            now_s: Time of its dispatch.
            tokens: What its flow is charged with: tokens to compute and to produce.
        """
        queue = self._queue_of.pop(waiting.request.id, None)
        if queue is None:
            return
        queue.served(waiting, tokens)
        self._mean_wait_s += 0.1 * (now_s - waiting.since_s - self._mean_wait_s)

    def pools(self) -> list[str]:
        """Return the pools for which something is held."""
        return [name for name, queue in self._queues.items() if queue]

    def queue(self, pool: str) -> Queue | None:
        """Return a pool's queue; `None`: nothing has waited there yet."""
        return self._queues.get(pool)

    def forget(self, pool: str) -> None:
        """Drop the queue of a pool that is gone. It is empty."""
        self._queues.pop(pool, None)

    def depth(self, pool: str) -> int:
        """Count a pool's held requests."""
        queue = self._queues.get(pool)
        return 0 if queue is None else len(queue)

    def expired(self, now_s: float) -> list[Waiting]:
        """Return every held request whose time is up; each is told once, and to be sent or cancelled by the caller."""
        if now_s >= self._stop_s:
            over = [waiting for queue in self._queues.values() for waiting in queue.requests.values()]
        else:
            over = []
            while self._deadlines and self._deadlines[0][0] <= now_s:
                _, request_id = heapq.heappop(self._deadlines)
                queue = self._queue_of.get(request_id)
                if queue is not None and now_s >= queue.requests[request_id].deadline_s:
                    over.append(queue.requests[request_id])
        return over

    def retry_after_s(self) -> float:
        """Suggest when to come back: as long as served requests had to wait, within reason."""
        return round(min(max(RETRY_AFTER_S_MIN, self._mean_wait_s), self.config.queue_timeout_s), 1)

    def _weight(self, flow: str) -> float:
        return self.config.weights.get(flow, 1.0)


def _band(waiting: Waiting) -> int:
    return waiting.band
