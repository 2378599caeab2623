"""sglang_cache_aware: thresholds on both sides, the tree, ties by position, the bound."""

from __future__ import annotations

from support.peers import Peer, prompt
from support.routing import replica
from warmfront.lab.peers.sglang import TREE_CHARACTERS_MAX, is_imbalanced


def peer(replicas: int = 3) -> Peer:
    return Peer("sglang_cache_aware", replicas)


def test_a_prompt_follows_the_replica_that_was_sent_more_than_three_tenths_of_it() -> None:
    small = peer()
    small.place(2, prompt(1, 10))
    assert small.slots(prompt(1, 4) + prompt(2, 6)) == {2}  # 4 of 10 blocks are known


def test_three_tenths_of_a_prompt_are_not_enough() -> None:
    small = peer()
    small.place(2, prompt(1, 10))
    assert small.slots(prompt(1, 3) + prompt(2, 7)) == {0}


def test_an_unknown_prompt_goes_to_the_shortest_queue_and_ties_to_the_first_position() -> None:
    small = peer()
    assert small.slots(prompt(1, 10)) == {0}
    small.fleet.in_flight[:] = [2, 1, 1]
    assert small.slots(prompt(1, 10)) == {1}


def test_the_first_of_several_holders_is_preferred() -> None:
    small = peer()
    small.place(1, prompt(1, 9))
    small.place(2, prompt(1, 9))
    small.place(0, prompt(1, 10))
    assert small.slots(prompt(1, 9) + prompt(2, 1)) == {1}
    assert small.slots(prompt(1, 10)) == {0}


def test_the_gate_needs_both_a_difference_above_64_and_a_ratio_above_one_and_a_half() -> None:
    assert is_imbalanced([65, 0])
    assert not is_imbalanced([64, 0])
    assert is_imbalanced([195, 129])  # 66 apart, 1.51 times
    assert not is_imbalanced([198, 132])  # 66 apart, exactly 1.5 times


def test_behind_the_gate_the_shortest_queue_wins_over_a_known_prompt() -> None:
    small = peer()
    small.place(2, prompt(1, 10))
    small.fleet.in_flight[:] = [1, 0, 65]
    assert small.slots(prompt(1, 10)) == {1}
    small.fleet.in_flight[:] = [1, 0, 64]
    assert small.slots(prompt(1, 10)) == {2}


def test_requests_sent_by_the_gate_enter_the_tree() -> None:
    small = peer()
    small.fleet.in_flight[:] = [1, 0, 65]
    assert small.send(prompt(1, 10)) == 1
    small.fleet.in_flight[:] = [0, 0, 0]
    assert small.slots(prompt(1, 10)) == {1}


def test_a_holder_that_is_not_ready_sends_the_request_to_the_first_replica() -> None:
    small = peer()
    small.place(2, prompt(1, 10))
    small.fleet.in_flight[:] = [5, 0, 0]
    small.fleet.allow([0, 1])
    assert small.slots(prompt(1, 10)) == {0}


def test_a_replica_that_left_takes_its_tree_along() -> None:
    small = peer()
    small.place(2, prompt(1, 10))
    small.follow([replica(0), replica(1), replica(2, id="http://10.0.0.9:8000")])
    assert small.slots(prompt(1, 10)) == {0}


def test_the_choice_expects_what_the_tree_knows_less_the_block_that_is_always_computed() -> None:
    small = peer()
    small.place(2, prompt(1, 10))
    (choice,) = small.ask(prompt(1, 10))
    assert choice.cached_tokens == 144  # 9 of 10 blocks
    (choice,) = small.ask(prompt(1, 6) + prompt(2, 4))
    assert choice.cached_tokens == 96


def test_the_tree_is_bounded_by_characters_for_each_replica() -> None:
    tokens = TREE_CHARACTERS_MAX // 4
    small = Peer("sglang_cache_aware", 3, block_size=tokens // 4)  # room for four blocks
    small.place(2, prompt(1, 3))
    small.place(2, prompt(2, 3))
    assert small.ask(prompt(1, 3))[0].slot == 2  # one of three blocks is left: a third is above the threshold
    small.place(2, prompt(3, 1))
    assert small.ask(prompt(1, 3))[0].slot == 0
