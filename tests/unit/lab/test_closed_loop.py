"""Users who wait for their answers: never more of them at once than the load says, and always the same errands."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Any

import pytest
from warmfront.lab.model import SimRequest
from warmfront.lab.workloads import Draw, read

USERS = 7
CLOSED = {"process": "closed", "think_s": 0.5, "ramp_s": 2.0}


def run(table: dict[str, Any], *, answer_s: float, requests: int = 200) -> tuple[list[SimRequest], int]:
    """Run on a clock of its own; return what was sent, in order of time, and the most jobs in flight."""
    source = read(table).source(Draw(seed=3, load=USERS, requests=requests))
    ends: list[tuple[float, int, SimRequest]] = []
    sent: list[SimRequest] = []
    in_flight_max = 0
    waiting = [(request.at_s, request.key, request) for request in source.arrivals()]
    while waiting or ends:
        if waiting and (not ends or waiting[0][0] <= ends[0][0]):
            at_s, key, request = heappop(waiting)
            sent.append(request)
            heappush(ends, (at_s + answer_s, key, request))
        else:
            now_s, _, request = heappop(ends)
            for following in source.finished(request, now_s):
                assert following.at_s >= now_s
                heappush(waiting, (following.at_s, following.key, following))
        in_flight = {request.key if request.session is None else -1 - request.session for _, _, request in ends}
        in_flight_max = max(in_flight_max, len(in_flight))
    return sent, in_flight_max


@pytest.mark.parametrize("kind", ["unique", "documents", "chat", "fan_out", "siblings", "mooncake", "azure"])
def test_users_never_have_more_than_one_errand_each(kind: str) -> None:
    sent, in_flight_max = run({"kind": kind, "arrival": CLOSED}, answer_s=10.0)
    assert len(sent) == 200
    assert in_flight_max == USERS


@pytest.mark.parametrize("kind", ["unique", "chat", "fan_out"])
def test_a_slow_fleet_is_asked_the_same_only_later(kind: str) -> None:
    fast, slow = (run({"kind": kind, "arrival": CLOSED}, answer_s=answer_s)[0] for answer_s in (0.5, 5.0))
    assert {(r.session, r.turn, r.prompt) for r in fast} == {(r.session, r.turn, r.prompt) for r in slow}
    assert slow[-1].at_s > fast[-1].at_s


def test_users_begin_evenly_over_the_ramp_and_think_before_they_go_on() -> None:
    sent, _ = run({"kind": "unique", "arrival": CLOSED}, answer_s=3.0)
    begun = [request.at_s for request in sent[: 2 * USERS]]
    assert begun[:USERS] == pytest.approx([2.0 * user / USERS for user in range(USERS)])
    assert begun[USERS:] == pytest.approx([at_s + 3.5 for at_s in begun[:USERS]])


def test_keys_are_numbers_in_the_order_of_creation() -> None:
    sent, _ = run({"kind": "chat", "arrival": CLOSED}, answer_s=1.0)
    assert sorted(request.key for request in sent) == list(range(200))
