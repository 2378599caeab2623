"""Requests that wait for a replica, in arrival order and bounded.

One queue per pool, each with the configured bound: a pool with nothing ready fills its own queue and no other. Today a
request waits only while nothing is ready; priorities and fairness between flows will change the order in here and
nothing outside. What is easy to get wrong: the bound counts requests that had to be held, so the router offers room
first and calls `hold` only for those it could not place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from warmfront.config import FlowConfig
from warmfront.types import Request, RequestId, Slot

WAIT_PRIOR_S = 5.0
"""How long requests wait, before any was seen to be served after waiting."""
RETRY_AFTER_S_MIN = 1.0


@dataclass(slots=True)
class Waiting:
    """A request without a replica."""

    request: Request
    since_s: float
    deadline_s: float
    tried: list[Slot]
    """Replicas that could not be reached for it."""
    attempts: int
    """Decisions made for it already."""


class Flow:
    """All waiting requests."""

    def __init__(self, config: FlowConfig) -> None:
        self._config = config
        self._queues: dict[str, dict[RequestId, Waiting]] = {}
        self._pool_of: dict[RequestId, str] = {}
        self._stop_s = math.inf
        self._due_s = math.inf
        """No request is due to be shed before this time, so that most steps need not look at all that wait."""
        self._mean_wait_s = WAIT_PRIOR_S

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._pool_of

    def __len__(self) -> int:
        return len(self._pool_of)

    def reconfigure(self, config: FlowConfig) -> None:
        """Use other bounds from now on; requests that wait keep their deadline."""
        self._config = config

    def stop(self, at_s: float) -> None:
        """Let nothing wait beyond `at_s`."""
        self._stop_s = at_s
        self._due_s = min(self._due_s, at_s)

    def add(self, request: Request, now_s: float, *, tried: list[Slot], attempts: int) -> None:
        """Put a request at the end of its pool's queue."""
        deadline_s = now_s + self._config.queue_timeout_s
        self._queues.setdefault(request.pool, {})[request.id] = Waiting(request, now_s, deadline_s, tried, attempts)
        self._pool_of[request.id] = request.pool
        self._due_s = min(self._due_s, deadline_s, self._stop_s)

    def cancel(self, request_id: RequestId) -> bool:
        """Forget a request; return whether it waited."""
        pool = self._pool_of.pop(request_id, None)
        if pool is None:
            return False
        queue = self._queues[pool]
        del queue[request_id]
        if not queue:
            del self._queues[pool]
        return True

    def served(self, waiting: Waiting, now_s: float) -> None:
        """Take out a request that got its replica, and learn how long such requests wait."""
        self.cancel(waiting.request.id)
        waited_s = now_s - waiting.since_s
        if waited_s > 0:
            self._mean_wait_s += 0.1 * (waited_s - self._mean_wait_s)

    def pools(self) -> list[str]:
        """Return the pools for which something waits, the one that waits longest first."""
        return list(self._queues)

    def waiting(self, pool: str) -> list[Waiting]:
        """Return a pool's requests in order."""
        return list(self._queues.get(pool, {}).values())

    def depth(self, pool: str) -> int:
        """Count a pool's waiting requests."""
        return len(self._queues.get(pool, {}))

    def expired(self, now_s: float) -> list[Waiting]:
        """Take out every request whose time is up."""
        if now_s < self._due_s:
            return []
        everything = [waiting for queue in self._queues.values() for waiting in queue.values()]
        stopped = now_s >= self._stop_s
        over = [waiting for waiting in everything if stopped or now_s >= waiting.deadline_s]
        for waiting in over:
            self.cancel(waiting.request.id)
        self._due_s = min([self._stop_s, *(each.deadline_s for each in everything if each.deadline_s > now_s)])
        return over

    def overflowing(self, pool: str) -> list[Waiting]:
        """Take out the newest requests of a pool beyond its bound."""
        if self.depth(pool) <= self._config.queue_max:
            return []
        beyond = self.waiting(pool)[self._config.queue_max :]
        for waiting in beyond:
            self.cancel(waiting.request.id)
        return beyond

    def retry_after_s(self) -> float:
        """Suggest when to come back: as long as served requests had to wait, within reason."""
        return round(min(max(RETRY_AFTER_S_MIN, self._mean_wait_s), self._config.queue_timeout_s), 1)
