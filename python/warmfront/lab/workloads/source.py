"""Runs planned jobs: a `Source` that hands out requests as their time comes.

Requests are numbered as they are handed out. With a closed loop the k-th job is the same whichever user is free first,
so that two policies see the same jobs in the same order, at other times.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from random import Random

from warmfront.lab.jobs import Job, Step, count, cut
from warmfront.lab.model import SimRequest
from warmfront.lab.workloads.amounts import draw
from warmfront.lab.workloads.arrivals import Closed


class JobSource:
    """Hands out the first `requests` requests of a stream of jobs, each job in full except the last."""

    def __init__(self, jobs: Iterator[Job]) -> None:
        self._jobs = jobs
        self._keys = itertools.count()
        self._steps: dict[int, tuple[int, Step]] = {}
        """Key of a request in flight → number of its job, its step."""
        self._left: dict[int, int] = {}
        """Number of a job → its requests that have not ended yet, sent or not."""

    def arrivals(self) -> Iterator[SimRequest]:
        """Yield the requests that do not depend on answers, `at_s` never decreasing."""
        waiting: list[tuple[float, int, int, Step]] = []
        order = itertools.count()
        for number, job in enumerate(self._first_jobs()):
            while waiting and waiting[0][0] <= job.at_s:
                at_s, _, owner, step = heappop(waiting)
                yield self._send(at_s, owner, step)
            self._left[number] = count(job.steps)
            for step in job.steps:
                heappush(waiting, (job.at_s + step.delay_s, next(order), number, step))
        while waiting:
            at_s, _, owner, step = heappop(waiting)
            yield self._send(at_s, owner, step)

    def finished(self, request: SimRequest, now_s: float) -> Sequence[SimRequest]:
        """Return what follows an answer: the next turn, children; each with `at_s >= now_s`.

        To be called once for each request, also when it failed: a user goes on either way.
        """
        number, step = self._steps.pop(request.key)
        follow = [self._send(now_s + next_step.delay_s, number, next_step) for next_step in step.then]
        self._left[number] -= 1
        if self._left[number] == 0:
            del self._left[number]
            follow += self._next_job(now_s)
        return follow

    def _first_jobs(self) -> Iterator[Job]:
        return self._jobs

    def _next_job(self, now_s: float) -> list[SimRequest]:
        return []

    def _send(self, at_s: float, number: int, step: Step) -> SimRequest:
        key = next(self._keys)
        self._steps[key] = (number, step)
        return SimRequest(
            key=key,
            at_s=at_s,
            prompt=step.prompt,
            output_tokens=step.output_tokens,
            output_tokens_max=step.output_tokens_max,
            answer=step.answer,
            session=step.session,
            turn=step.turn,
            flow=step.flow,
            priority=step.priority,
            adapter=step.adapter,
            group=step.group,
        )


class UserSource(JobSource):
    """The closed loop: a user's next job begins when the last request of the one before has ended."""

    def __init__(self, jobs: Iterator[Job], users: int, closed: Closed, random: Random) -> None:
        super().__init__(jobs)
        self._closed = closed
        self._random = random
        self._users = users
        self._numbers = itertools.count(users)

    def _first_jobs(self) -> Iterator[Job]:
        for user, job in enumerate(itertools.islice(self._jobs, self._users)):
            yield Job(self._closed.ramp_s * user / self._users, job.steps)

    def _next_job(self, now_s: float) -> list[SimRequest]:
        job = next(self._jobs, None)
        if job is None:
            return []
        number = next(self._numbers)
        self._left[number] = count(job.steps)
        begin_s = now_s + draw(self._closed.think_s, self._random)
        return [self._send(begin_s + step.delay_s, number, step) for step in job.steps]


def limited(jobs: Iterator[Job], requests: int) -> Iterator[Job]:
    """Yield jobs until they hold `requests` requests; the last one is cut."""
    left = requests
    for job in jobs:
        size = count(job.steps)
        yield job if size <= left else Job(job.at_s, cut(job.steps, left))
        left -= size
        if left <= 0:
            return
