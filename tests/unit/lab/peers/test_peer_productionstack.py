"""The production stack: a trie that never forgets, and match minus beta times load."""

from __future__ import annotations

from support.peers import Peer, prompt
from support.routing import replica
from warmfront.policy.affinity import ranked


def test_one_of_those_that_were_sent_the_longest_prefix_is_drawn_whatever_their_load() -> None:
    small = Peer("productionstack_prefixaware", 4)
    small.place(1, prompt(1, 6))
    small.place(2, prompt(1, 6))
    small.place(3, prompt(1, 5))
    small.fleet.in_flight[:] = [0, 90, 90, 0]
    assert small.slots(prompt(1, 8)) == {1, 2}


def test_one_chunk_is_enough_and_without_any_all_are_drawn() -> None:
    small = Peer("productionstack_prefixaware", 3)
    small.place(2, prompt(1, 1))
    assert small.slots(prompt(1, 100)) == {2}
    assert small.slots(prompt(2, 100)) == {0, 1, 2}


def test_a_longest_match_that_is_not_ready_leaves_the_next_one() -> None:
    small = Peer("productionstack_prefixaware", 3)
    small.place(1, prompt(1, 6))
    small.place(2, prompt(1, 3))
    small.fleet.allow([0, 2])
    assert small.slots(prompt(1, 6)) == {2}


def test_another_replica_in_the_slot_was_sent_nothing() -> None:
    small = Peer("productionstack_prefixaware", 2)
    small.place(1, prompt(1, 6))
    small.follow([replica(0), replica(1, id="http://10.0.0.9:8000")])
    assert small.slots(prompt(1, 6)) == {0, 1}


def loadaware(held: list[int], in_flight: list[int]) -> set[int]:
    small = Peer("productionstack_loadaware", len(held))
    small.holds(device=held)
    small.fleet.in_flight[:] = in_flight
    return small.slots(prompt(1, 10))


def test_a_full_hit_is_worth_the_mean_load_once() -> None:
    # mean 10: relative loads +0.5 and -0.5, a gap of one full hit at beta 1; the tie goes to the first
    assert loadaware([160, 0], [15, 5]) == {0}
    assert loadaware([160, 0], [16, 4]) == {1}
    assert loadaware([0, 160], [5, 15]) == {0}
    assert loadaware([0, 160], [6, 14]) == {1}


def test_half_a_hit_is_worth_half_of_it() -> None:
    assert loadaware([80, 0], [12, 8]) == {0}  # 0.5 - 0.2 against 0.2
    assert loadaware([80, 0], [13, 7]) == {1}  # 0.5 - 0.3 against 0.3


def test_a_nearly_idle_fleet_has_no_relative_load_to_speak_of() -> None:
    # mean 0.5 is clamped to 1: +0.5 and -0.5, not +1 and -1
    assert loadaware([160, 0], [1, 0]) == {0}
    assert loadaware([128, 0], [1, 0]) == {1}


def test_without_a_holder_sessions_are_hashed_and_the_rest_go_to_the_lowest_rate() -> None:
    small = Peer("productionstack_loadaware", 3)
    small.fleet.arrivals[:] = [2.0, 1.0, 3.0]
    assert small.slots(prompt(1, 10)) == {1}
    for key in range(20):
        assert small.slots(prompt(1, 10), affinity_key=key, times=2) == {ranked(key, [0, 1, 2], small.fleet.hash)[0]}
