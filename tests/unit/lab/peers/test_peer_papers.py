"""The policies from papers, one rule at a time."""

from __future__ import annotations

import pytest
from support.peers import Peer, prompt

from warmfront.lab.peers.lmetric import TTFT_BUDGET_S


def test_lmetric_multiplies_prefill_work_by_the_batch_with_the_request_in_it() -> None:
    small = Peer("lmetric", 3)
    small.fleet.pending_tokens[:] = [0, 100, 0]
    small.fleet.in_flight[:] = [3, 1, 1]
    small.holds(device=[80, 0, 0])
    # (0 + 80)·4 = 320, (100 + 160)·2 = 520, (0 + 160)·2 = 320: the first and the last tie
    assert small.slots(prompt(1, 10)) == {0, 2}
    small.holds(device=[96, 0, 0])
    assert small.slots(prompt(1, 10)) == {0}


def test_min_ttft_adds_the_queue_and_the_requests_own_prefill_and_ignores_decoding() -> None:
    small = Peer("min_ttft", 2)
    seconds = small.fleet.learned.prefill.seconds(0, 80, 160)
    small.holds(device=[80, 0])
    small.fleet.in_flight[:] = [50, 0]
    small.fleet.pending_s[:] = [seconds * 0.9, 0.0]
    assert small.slots(prompt(1, 10)) == {0}
    small.fleet.pending_s[:] = [seconds * 1.1, 0.0]
    assert small.slots(prompt(1, 10)) == {1}


@pytest.mark.parametrize("name", ["lmetric", "min_ttft", "smetric"])
def test_ties_are_drawn(name: str) -> None:
    assert Peer(name, 3).slots(prompt(1, 10)) == {0, 1, 2}


def test_smetric_sends_first_turns_by_lmetric() -> None:
    small = Peer("smetric", 2)
    small.holds(device=[144, 0])
    small.fleet.in_flight[:] = [19, 0]
    assert small.slots(prompt(1, 10), turn=0) == {1}  # 16·20 against 160·1


def test_smetric_sends_later_turns_home_as_long_as_the_budget_holds() -> None:
    small = Peer("smetric", 2)
    small.holds(device=[144, 0])
    small.fleet.in_flight[:] = [19, 0]
    assert small.slots(prompt(1, 10), turn=1) == {0}
    own_s = small.fleet.learned.prefill.seconds(0, 16, 160)
    small.fleet.pending_s[:] = [TTFT_BUDGET_S - own_s, 0.0]
    assert small.slots(prompt(1, 10), turn=1) == {0}
    small.fleet.pending_s[:] = [TTFT_BUDGET_S - own_s + 1e-6, 0.0]
    assert small.slots(prompt(1, 10), turn=1) == {1}


def test_smetric_prefers_the_emptier_of_equal_homes_and_has_none_for_a_turn_without_a_hit() -> None:
    small = Peer("smetric", 3)
    small.holds(device=[144, 144, 0])
    small.fleet.pending_tokens[:] = [100, 50, 0]
    assert small.slots(prompt(1, 10), turn=2) == {1}
    small.holds(device=[0, 0, 0])
    assert small.slots(prompt(1, 10), turn=2) == {2}
