"""vllm-router, Ray and AIBrix: thresholds on both sides, ties and bounds."""

from __future__ import annotations

from support.peers import Peer, prompt
from support.routing import replica
from warmfront.lab.peers.aibrix import LIFETIME_S
from warmfront.lab.peers.ray import PrefixAffinity


def test_vllm_router_adds_uncredited_tokens_and_both_loads_and_ties_go_to_the_first() -> None:
    small = Peer("vllm_router_kv_aware", 3)
    assert small.slots(prompt(1, 10)) == {0}
    small.holds(device=[32, 0, 0])
    small.fleet.pending_tokens[:] = [20, 0, 0]
    small.holds(active_tokens=[46, 1, 2], active=[32, 0, 0])
    assert small.slots(prompt(1, 10)) == {1}  # 128 + 20 + 46 - 32 against 160 + 1
    small.holds(active_tokens=[45, 1, 2])
    assert small.slots(prompt(1, 10)) == {0}  # 161 both: the first


def test_vllm_router_credits_host_memory_at_0_8_and_disk_at_0_3() -> None:
    small = Peer("vllm_router_kv_aware", 2)
    small.holds(device=[0, 0], host=[100, 0], disk=[100, 160])
    small.fleet.pending_tokens[:] = [31, 0]
    assert small.slots(prompt(1, 10)) == {0}  # 160 - 80 + 31 = 111 against 160 - 48 = 112
    small.fleet.pending_tokens[:] = [33, 0]
    assert small.slots(prompt(1, 10)) == {1}


def test_ray_follows_a_tenth_of_a_prompt_to_the_shortest_queue_that_was_sent_it() -> None:
    small = Peer("ray_prefix_affinity", 3)
    small.place(1, prompt(1, 9))
    small.place(2, prompt(1, 1))
    small.fleet.in_flight[:] = [0, 9, 5]
    assert small.slots(prompt(1, 1) + prompt(2, 9)) == {2}  # 1 of 10 blocks, held by both


def test_ray_sends_less_than_a_tenth_to_the_smallest_tree_whatever_its_load() -> None:
    small = Peer("ray_prefix_affinity", 3)
    small.place(0, prompt(1, 3))
    small.place(1, prompt(2, 2))
    small.place(2, prompt(3, 3))
    small.fleet.in_flight[:] = [0, 99, 0]
    assert small.slots(prompt(1, 1) + prompt(4, 10)) == {1}  # 1 of 11


def test_ray_knows_no_imbalance_unless_it_is_told_a_threshold() -> None:
    small = Peer("ray_prefix_affinity", 3)
    small.place(1, prompt(1, 9))
    small.fleet.in_flight[:] = [0, 1000, 0]
    assert small.slots(prompt(1, 9)) == {1}
    small.policy = PrefixAffinity(small.view, imbalanced_threshold=10)
    small.place(1, prompt(1, 9))
    small.fleet.in_flight[:] = [0, 10, 3]
    assert small.slots(prompt(1, 9)) == {1}
    small.fleet.in_flight[:] = [0, 11, 3]
    assert small.slots(prompt(1, 9)) == {0, 2}  # power of two: the worst of three never wins


def test_ray_draws_among_equal_candidates_and_fills_a_new_replica_first() -> None:
    small = Peer("ray_prefix_affinity", 2)
    assert small.slots(prompt(1, 9)) == {0, 1}
    small.place(0, prompt(1, 9))
    small.place(1, prompt(2, 9))
    small.follow([replica(slot) for slot in range(3)])
    assert small.slots(prompt(3, 9)) == {2}


def aibrix(in_flight: list[int]) -> Peer:
    small = Peer("aibrix_prefix_cache", len(in_flight))
    small.fleet.in_flight[:] = in_flight
    return small


def test_aibrix_gives_matches_up_when_requests_differ_by_more_than_16() -> None:
    small = aibrix([0, 0, 0])
    small.place(0, prompt(1, 10))
    small.fleet.in_flight[:] = [16, 0, 16]
    assert small.slots(prompt(1, 10)) == {0}
    small.fleet.in_flight[:] = [17, 0, 17]
    assert small.slots(prompt(1, 10)) == {1}


def test_aibrix_takes_the_best_match_within_two_deviations_of_the_mean() -> None:
    small = aibrix([0] * 9)
    small.place(0, prompt(1, 10))
    small.place(1, prompt(1, 5))
    small.fleet.in_flight[:] = [9, 9, 0, 0, 0, 0, 0, 0, 0]  # mean 2, deviation 3.74: bound 9.48
    assert small.slots(prompt(1, 10)) == {0}
    small.fleet.in_flight[:] = [9, 0, 0, 0, 0, 0, 0, 0, 0]  # mean 1, deviation 2.83: bound 6.66
    assert small.slots(prompt(1, 10)) == {1}
    small.place(1, prompt(2, 10))
    small.fleet.in_flight[:] = [0, 9, 0, 0, 0, 0, 0, 0, 0]
    assert 1 not in small.slots(prompt(2, 10))  # nobody else knows it: the fewest requests


def test_aibrix_prefers_the_emptier_of_equal_matches_in_whole_percent() -> None:
    small = aibrix([0, 0, 0])
    small.place(0, prompt(1, 200))
    small.place(1, prompt(1, 199))
    small.fleet.in_flight[:] = [3, 2, 3]
    assert small.slots(prompt(1, 199) + prompt(2, 200)) == {1}
    # 200 and 199 of 400 blocks are 50 and 49 percent; of 40,000 blocks both are 0 percent, and still a match
    assert small.slots(prompt(1, 200) + prompt(2, 200)) == {0}
    assert small.slots(prompt(1, 200) + prompt(2, 39_800), times=3) == {1}


def test_aibrix_without_a_match_takes_the_fewest_requests_and_draws_among_equals() -> None:
    assert aibrix([1, 0, 0]).slots(prompt(1, 10)) == {1, 2}


def test_aibrix_forgets_20_minutes_after_the_last_use() -> None:
    small = aibrix([0, 0])
    small.place(1, prompt(1, 10))
    small.fleet.now_s = LIFETIME_S
    assert small.slots(prompt(1, 10)) == {1}
    small.fleet.now_s = LIFETIME_S + 0.1
    assert small.slots(prompt(1, 10)) == {0, 1}


def test_aibrix_holds_200000_blocks_of_32_tokens_for_all_replicas_together() -> None:
    small = Peer("aibrix_prefix_cache", 2, block_size=6_400_000 // 8)  # room for eight
    small.place(0, prompt(1, 4))
    small.place(1, prompt(2, 4))
    assert small.slots(prompt(1, 4)) == {0}
    small.place(1, prompt(3, 4))
    assert small.slots(prompt(1, 4)) == {0, 1}
