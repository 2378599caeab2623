"""cacheroute: copies by rate, placement, memory, what stays and what is drawn."""

from __future__ import annotations

from collections import Counter

import pytest
from support.peers import Peer
from support.routing import replica
from warmfront.lab.peers import cacheroute
from warmfront.lab.peers.cacheroute import Popularity, planned


def popularity(counts: dict[int, int], tokens: int = 1000) -> Popularity:
    made = Popularity()
    for key, count in counts.items():
        for _ in range(count):
            made.count(key, tokens)
    return made


def test_a_key_gets_a_copy_for_each_half_of_a_replicas_mean_rate() -> None:
    fleet = Peer("cacheroute", 4).fleet
    plan = planned(popularity({1: 60, 2: 26, 3: 25, 4: 25, 5: 64}), {}, fleet)  # 200: cap 25
    assert {key: len(slots) for key, slots in plan.items()} == {1: 3, 2: 2, 3: 1, 4: 1, 5: 3}


def test_copies_are_distinct_and_largest_rates_are_placed_first_on_the_least_planned() -> None:
    fleet = Peer("cacheroute", 3).fleet
    plan = planned(popularity({1: 5, 2: 4, 3: 3, 4: 3, 5: 2, 6: 1}), {}, fleet)  # 18 over 3: cap 3
    # loads 0 0 0; key 1 on 0 and 1: 2.5 2.5 0; key 2 on 2 and 0: 4.5 2.5 2; key 3 on 2: 4.5 2.5 5;
    # key 4 on 1: 4.5 5.5 5; key 5 on 0: 6.5 5.5 5; key 6 on 2
    assert plan == {1: [0, 1], 2: [2, 0], 3: [2], 4: [1], 5: [0], 6: [2]}


def test_no_more_is_planned_than_four_fifths_of_the_memory() -> None:
    small = Peer("cacheroute", 2)
    small.follow([replica(slot, capacity_tokens=5_000) for slot in range(2)])
    plan = planned(popularity(dict.fromkeys(range(20), 1), tokens=2_000), {}, small.fleet)
    assert len(plan) == 4  # two prompts of 2,000 tokens in 4,000 of each


def test_a_placement_stays_while_its_copies_do_and_its_replica_is_not_overloaded() -> None:
    fleet = Peer("cacheroute", 2).fleet
    before = {1: [1], 2: [0], 3: [0], 4: [1]}
    assert planned(popularity({1: 5, 2: 5, 3: 5, 4: 5}), before, fleet) == before
    crowded = {1: [0], 2: [0], 3: [0], 4: [1]}
    plan = planned(popularity({1: 5, 2: 5, 3: 5, 4: 5}), crowded, fleet)
    assert Counter(slot for slots in plan.values() for slot in slots) == {0: 2, 1: 2}


def test_a_planned_key_goes_to_its_emptiest_copy() -> None:
    small = Peer("cacheroute", 4)
    for number in range(40):
        small.send(prompt_tokens=1000, prefix_key=1 if number % 2 else number)
    small.fleet.now_s = 1.0
    small.send(prompt_tokens=1000, prefix_key=1)
    copies = small.policy._plan[1]
    assert len(copies) == 4  # half of all requests is the mean rate of two replicas: four caps
    small.fleet.in_flight[:] = [3, 1, 2, 3]
    assert small.slots(prompt_tokens=1000, prefix_key=1) == {1}


def test_a_key_without_room_in_the_plan_goes_to_the_better_of_two_drawn() -> None:
    small = Peer("cacheroute", 3)
    small.policy._left_out.add(7)
    small.fleet.in_flight[:] = [0, 1, 9]
    counts = Counter(small.ask(prompt_tokens=1000, prefix_key=7)[0].slot for _ in range(900))
    # drawn with repetition: the emptiest wins 5 of 9 pairs, the middle 3, the fullest only with itself
    assert abs(counts[0] - 500) < 60
    assert abs(counts[1] - 300) < 60
    assert abs(counts[2] - 100) < 40


def test_a_key_that_is_new_stays_where_it_began_until_the_next_plan() -> None:
    small = Peer("cacheroute", 4)
    small.follow([replica(slot, capacity_tokens=1_000) for slot in range(4)])  # no room for any prompt
    home = small.send(prompt_tokens=2000, prefix_key=7)
    small.fleet.in_flight[home] = 50
    assert small.slots(prompt_tokens=2000, prefix_key=7) == {home}
    small.fleet.now_s = 1.0
    assert len(small.slots(prompt_tokens=2000, prefix_key=7)) > 1


def test_a_session_is_one_key_whatever_its_prompts_begin_with() -> None:
    small = Peer("cacheroute", 4)
    home = small.send(prompt_tokens=1000, prefix_key=7, affinity_key=99)
    small.fleet.in_flight[home] = 50
    assert small.slots(prompt_tokens=1000, prefix_key=8, affinity_key=99) == {home}
    small.fleet.allow([slot for slot in range(4) if slot != home])
    assert home not in small.slots(prompt_tokens=1000, prefix_key=8, affinity_key=99)


def test_no_more_keys_are_remembered_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cacheroute, "KEYS_MAX", 10)
    small = Peer("cacheroute", 4)
    for key in range(100):
        small.send(prompt_tokens=1000, prefix_key=key)
    assert len(small.policy._homes) == len(small.policy._popularity.ranked()) == 10


def test_plans_come_after_1_2_4_seconds_and_then_each_minute_with_the_past_at_half_weight() -> None:
    small = Peer("cacheroute", 2)
    made = []
    for tick in range(3000):
        small.fleet.now_s = 0.1 * tick
        before = small.policy._next_s
        small.send(prompt_tokens=1000, prefix_key=1)
        if small.policy._next_s != before:
            made.append(round(small.fleet.now_s))
    assert made == [1, 3, 7, 15, 31, 63, 123, 183, 243]
    assert small.policy._popularity.ranked()[0][1] < 1400  # of 3,000 requests


def test_a_replica_that_left_is_not_chosen_by_an_old_plan() -> None:
    small = Peer("cacheroute", 3)
    for _ in range(30):
        small.send(prompt_tokens=1000, prefix_key=1)
    small.fleet.now_s = 1.0
    small.send(prompt_tokens=1000, prefix_key=1)
    small.follow([replica(0), replica(1)])
    assert small.slots(prompt_tokens=1000, prefix_key=1) == {0, 1}


def test_counts_are_bounded_by_age() -> None:
    small = popularity({1: 1, 2: 8})
    for _ in range(3):
        small.halve()
    assert small.ranked() == [(2, 1.0)]
