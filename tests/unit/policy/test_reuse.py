from __future__ import annotations

import pytest
from warmfront.policy.reuse import UNTESTED_S, Reuse, Trial
from warmfront.types import Slot

STEP_S = 0.015
FOUND_S, MISSED_S = 0.02, 0.38
"""Prefill of a prompt of which nearly all is cached, and of the same if it is not."""


class Fleet:
    """Replicas that are sent one prompt after the other."""

    def __init__(self, replicas: int) -> None:
        self.reuse = Reuse()
        self.now_s = 0.0
        for _ in range(replicas):
            self.reuse.grow()

    def prefill(self, slot: int, seconds: float, *, together: int = 1, is_telling: bool = True) -> Trial:
        """Let first tokens of one step come after so many seconds, and judge them."""
        self.now_s += 1.0
        self.reuse.began(Slot(slot), self.now_s)
        self.now_s += seconds
        trial = [
            self.reuse.first_token(
                Slot(slot),
                self.now_s + 1e-4 * number,
                found_s=FOUND_S,
                missed_s=MISSED_S,
                step_s=STEP_S,
                is_telling=is_telling,
                is_usable=True,
            )
            for number in range(together)
        ][-1]
        self.now_s += STEP_S
        self.reuse.judge(self.now_s)
        return trial

    def finds(self, slot: int, *, slower: float = 1.0) -> Trial:
        return self.prefill(slot, slower * (FOUND_S + STEP_S))

    def misses(self, slot: int, *, slower: float = 1.0) -> Trial:
        return self.prefill(slot, slower * (MISSED_S + STEP_S))

    @property
    def believed(self) -> list[float]:
        return self.reuse.factor


def test_three_prefills_show_that_an_engine_has_ceased_to_reuse_and_three_that_it_has_begun_again() -> None:
    fleet = Fleet(1)
    fleet.finds(0)
    believed = [fleet.misses(0).is_reused for _ in range(3)]
    assert believed == [True, True, False]
    assert [fleet.finds(0).is_reused for _ in range(3)] == [False, False, True]


def test_a_miss_now_and_then_is_none_of_the_engine() -> None:
    fleet = Fleet(1)
    for number in range(200):
        fleet.misses(0) if number % 5 == 0 else fleet.finds(0)
        assert fleet.believed == [1.0]


@pytest.mark.parametrize("slower", [0.4, 2.0, 60.0])
def test_an_engine_that_is_slower_or_faster_than_expected_reuses_all_the_same(slower: float) -> None:
    fleet = Fleet(1)
    for _ in range(50):
        fleet.finds(0, slower=slower)
    assert fleet.believed == [1.0]


def test_a_slow_engine_that_reuses_nothing_is_found_out_too() -> None:
    fleet = Fleet(1)
    for _ in range(3):
        fleet.misses(0, slower=1.5)
    assert fleet.believed == [0.0]


def test_prompts_that_share_a_step_are_judged_together() -> None:
    fleet = Fleet(1)
    for _ in range(10):
        trial = fleet.prefill(0, 12 * FOUND_S + STEP_S, together=12)
        assert trial.members == 12
        assert trial.evidence > 3.0
    assert fleet.believed == [1.0]


def test_what_tells_nothing_changes_nothing() -> None:
    fleet = Fleet(1)
    for _ in range(10):
        fleet.prefill(0, MISSED_S, is_telling=False)
    fleet.reuse.began(Slot(0), 100.0)
    fleet.reuse.spoiled(Slot(0))
    trial = fleet.reuse.first_token(
        Slot(0), 100.4, found_s=FOUND_S, missed_s=MISSED_S, step_s=STEP_S, is_telling=True, is_usable=True
    )
    assert trial.evidence == 0.0
    trial = fleet.reuse.first_token(
        Slot(0), 101.0, found_s=0.2, missed_s=0.38, step_s=STEP_S, is_telling=True, is_usable=True
    )
    assert trial.evidence == 0.0, "both expectations are too near to each other"
    assert fleet.believed == [1.0]


def test_one_prefill_each_is_enough_once_other_replicas_have_changed() -> None:
    fleet = Fleet(8)
    for slot in range(8):
        fleet.finds(slot)
    for _ in range(3):
        fleet.misses(0)
    assert fleet.believed == [0.0] + 7 * [1.0]
    for slot in (1, 2, 3):
        fleet.misses(slot)
    assert fleet.believed == 4 * [0.0] + 4 * [1.0]
    fleet.misses(4)
    assert fleet.believed == 8 * [0.0], "more than half have shown it"


def test_what_was_seen_before_others_changed_counts_as_well() -> None:
    fleet = Fleet(8)
    for slot in range(8):
        fleet.finds(slot)
    for slot in (0, 0, 1, 2, 0):
        fleet.misses(slot)
    assert fleet.believed[:4] == [0.0, 0.0, 0.0, 1.0]


def test_one_engine_that_reuses_nothing_discredits_no_other() -> None:
    fleet = Fleet(8)
    for _ in range(20):
        fleet.misses(0)
        for slot in range(1, 8):
            fleet.finds(slot)
    fleet.misses(1)
    assert fleet.believed == [0.0] + 7 * [1.0]


def test_what_others_show_is_believed_of_replicas_that_are_sent_nothing_they_hold() -> None:
    fleet = Fleet(4)
    for slot in range(4):
        for _ in range(3):
            fleet.misses(slot)
    assert fleet.believed == 4 * [0.0]
    for _ in range(3):
        for slot in (0, 1, 2):
            fleet.finds(slot)
    assert fleet.believed == 4 * [1.0]


def test_a_replica_that_shows_nothing_any_more_is_trusted_again() -> None:
    fleet = Fleet(2)
    for _ in range(3):
        fleet.misses(0)
    assert fleet.reuse.judge(fleet.now_s + UNTESTED_S - 1.0) == []
    assert fleet.reuse.judge(fleet.now_s + UNTESTED_S + 1.0) == [0]
    assert fleet.believed == [1.0, 1.0]


def test_answers_that_tell_are_believed_and_not_times() -> None:
    fleet = Fleet(1)
    for _ in range(10):
        trial = fleet.misses(0)  # an engine that became ten times slower
        fleet.reuse.reported(Slot(0), trial, is_found=True)
        assert fleet.believed == [1.0]
    stray = fleet.prefill(0, MISSED_S, is_telling=False)
    for _ in range(10):
        fleet.reuse.reported(Slot(0), stray, is_found=False)
    assert fleet.believed == [1.0], "what waits for memory may be evicted meanwhile"


def test_a_new_replica_in_the_slot_is_believed() -> None:
    fleet = Fleet(1)
    for _ in range(3):
        fleet.misses(0)
    fleet.reuse.reset(Slot(0))
    assert fleet.believed == [1.0]
    assert fleet.reuse.judge(1e6) == []
