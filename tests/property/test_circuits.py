"""Whatever replicas do: never all of them are taken away, never more than the share, and all of them come back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.routing import request
from warmfront.config import HealthConfig
from warmfront.router.health import SERVING, Health, Stretch
from warmfront.types import Slot

ROWS = 5
IDLE = [Stretch(0.0, False)] * ROWS

Steps = list[tuple[str, int, float]]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["sent", "succeeded", "failed", "refused", "progressed", "unready", "joined", "check"]),
        st.integers(0, ROWS - 1),
        st.floats(0, 4),
    ),
    max_size=120,
)


class Play:
    """Circuits under a random history."""

    def __init__(self, config: HealthConfig) -> None:
        self.health = Health(config)
        self.now_s = 0.0
        self.ready = [Slot(slot) for slot in range(ROWS)]
        self.in_flight = [0] * ROWS
        self.sent: dict[int, int] = {}
        self.number = 0
        self.health.follow(self.ready, [], 0.0)

    def step(self, kind: str, row: int, seconds: float) -> None:
        slot, health = Slot(row), self.health
        self.now_s += seconds
        if kind == "sent":
            self.number += 1
            self.sent[self.number] = row
            self.in_flight[row] += 1
            health.sent(slot, request(self.number), self.now_s)
        elif kind in ("succeeded", "failed", "refused"):
            self.end(kind, row)
        elif kind == "progressed":
            health.progressed(slot, self.now_s)
        elif kind == "unready":
            self.ready = [each for each in self.ready if each != slot]
            health.follow(self.ready, [], self.now_s)
        elif kind == "joined":
            self.ready = sorted({*self.ready, slot})
            health.follow(self.ready, [slot], self.now_s)
        else:
            health.check(self.now_s, IDLE)

    def end(self, kind: str, row: int) -> None:
        number = next((number for number, where in self.sent.items() if where == row), None)
        if number is None:
            return
        del self.sent[number]
        self.in_flight[row] -= 1
        ended, slot = request(number), Slot(row)
        if kind == "succeeded":
            self.health.succeeded(slot, ended, self.now_s)
        elif kind == "failed":
            self.health.failed(slot, ended, "connect", self.now_s)
        else:
            self.health.refused(slot, None, self.now_s)
        self.health.ended(slot, ended)


@pytest.mark.bug(185)
@settings(max_examples=200, deadline=None, derandomize=True)
@given(steps=STEPS, share=st.sampled_from([0.0, 0.3, 0.5, 0.9]))
def test_the_last_replica_stays_and_no_more_than_the_share_is_taken_away(steps: Steps, share: float) -> None:
    play = Play(HealthConfig(ejected_share_max=share, failures_in_a_row=2))
    for step in steps:
        play.step(*step)
        admitted = play.health.admitted(play.in_flight, play.now_s)
        assert set(admitted) <= set(play.ready)
        assert admitted == sorted(admitted)
        assert bool(admitted) == bool(play.ready)
        limited = play.health.limited(play.now_s)
        assert set(limited) <= set(play.ready)
        slow = sum(limited[slot].state == "slow_start" for slot in limited)
        assert len(play.ready) - len(admitted) <= int(share * len(play.ready)) + slow


@settings(max_examples=100, deadline=None, derandomize=True)
@given(steps=STEPS)
def test_every_replica_is_back_in_full_service_once_requests_succeed_again(steps: Steps) -> None:
    config = HealthConfig(failures_in_a_row=2)
    play = Play(config)
    for step in steps:
        play.step(*step)
    for number in list(play.sent):
        play.end("succeeded", play.sent[number])
    for _ in range(200):
        play.now_s += 1.0
        for slot in play.health.admitted(play.in_flight, play.now_s):
            play.step("sent", slot, 0.0)
            play.end("succeeded", slot)
    assert play.health.admitted(play.in_flight, play.now_s) == play.ready
    assert all(play.health.verdict(slot, play.now_s) is SERVING for slot in play.ready)
    assert not play.health.watches
