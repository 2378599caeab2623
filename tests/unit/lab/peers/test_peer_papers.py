"""The policies from papers, one rule at a time."""

from __future__ import annotations

import pytest
from support.peers import Peer, prompt
from warmfront.lab.peers.dualmap import TTFT_SLO_S, candidates
from warmfront.lab.peers.lmetric import TTFT_BUDGET_S
from warmfront.lab.peers.preble import Window


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
    small.holds(device=[80, 0])
    small.fleet.in_flight[:] = [50, 0]
    small.fleet.pending_tokens[:] = [79, 0]
    assert small.slots(prompt(1, 10)) == {0}  # 79 + 80 against 160
    small.fleet.pending_tokens[:] = [80, 0]
    assert small.slots(prompt(1, 10)) == {1}  # 160 both: fewer requests
    small.fleet.pending_tokens[:] = [81, 0]
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


def dualmap(replicas: int = 4) -> tuple[Peer, int, int]:
    """Return a peer with blocks of 512 tokens and the candidates of `prompt(1, ...)`."""
    small = Peer("dualmap", replicas, block_size=512)
    return small, *candidates(prompt(1, 2)[-1], small.fleet)


def test_dualmap_maps_1024_tokens_to_two_different_replicas() -> None:
    small, first, second = dualmap()
    assert first != second
    assert small.slots(prompt(1, 8)) == {first}
    small.fleet.pending_tokens[first] = 1
    assert small.slots(prompt(1, 8)) == {second}
    assert small.slots(prompt(1, 2) + prompt(2, 6)) == {second}  # what follows does not matter


def test_dualmap_prefers_the_warmer_candidate_until_it_is_later_than_the_slo_and_the_other() -> None:
    small, first, second = dualmap()
    held = [0] * 4
    held[second] = 1024
    small.holds(device=held)
    assert small.slots(prompt(1, 8)) == {second}
    own_s = small.fleet.learned.prefill.seconds(second, 3072, 4096)
    small.fleet.pending_s[second] = TTFT_SLO_S - own_s - 1e-6
    assert small.slots(prompt(1, 8)) == {second}
    small.fleet.pending_s[second] = TTFT_SLO_S - own_s + 1e-6
    assert small.slots(prompt(1, 8)) == {first}
    small.fleet.pending_s[first] = TTFT_SLO_S
    assert small.slots(prompt(1, 8)) == {second}


def test_dualmap_hashes_512_tokens_more_where_a_prefix_is_hot() -> None:
    small, _, _ = dualmap(8)
    for number in range(200):
        small.send(prompt(1, 2) + prompt(100 + number, 2) if number % 2 else prompt(1000 + number, 4))
    request = small._request(prompt(1, 2) + prompt(7, 2), {})
    key, tried = small.policy._key(request, small.fleet)
    assert tried == [prompt(1, 2)[-1], prompt(7, 1)[-1]]  # half of all requests is above 2 of 8
    assert key == prompt(7, 1)[-1]


def test_dualmap_forgets_prefixes_that_are_rare() -> None:
    small, _, _ = dualmap()
    for number in range(9000):
        small.send(prompt(number, 2))
    assert len(small.policy._counts) < 5000


def test_dualmap_moves_only_the_keys_of_a_replica_that_left() -> None:
    small, _, _ = dualmap(5)
    before = {key: candidates(key, small.fleet) for key in range(200)}
    small.fleet.allow([0, 1, 2, 3])
    for key, (first, second) in before.items():
        if 4 not in (first, second):
            assert candidates(key, small.fleet) == (first, second)


def preble(replicas: int = 2) -> Peer:
    return Peer("preble", replicas)


def test_preble_exploits_when_more_than_half_of_a_prompt_is_cached() -> None:
    small = preble()
    small.policy._window.add(1, 0.5, 0.0)
    small.holds(device=[0, 96])
    assert small.slots(prompt(1, 11)) == {1}  # 96 of 176 tokens
    assert small.slots(prompt(1, 12)) == {0}  # exactly half: explore, and the other one has less load


def test_preble_explores_when_the_holder_has_more_than_half_again_the_least_load() -> None:
    small = preble()
    small.holds(device=[0, 160])
    small.policy._window.add(0, 10.0, 0.0)
    small.policy._window.add(1, 16.0, 0.0)  # 1.5·10 + 1
    assert small.slots(prompt(1, 10)) == {1}
    small.policy._window.add(1, 0.01, 0.0)
    assert small.slots(prompt(1, 10)) == {0}


def test_preble_explores_by_load_and_missing_prefill() -> None:
    small = preble()
    small.holds(device=[0, 64])
    saved = small.fleet.learned.prefill.seconds(1, 160, 160) - small.fleet.learned.prefill.seconds(1, 96, 160)
    small.policy._window.add(1, saved * 0.9, 0.0)
    assert small.slots(prompt(1, 10)) == {1}
    small.policy._window.add(1, saved * 0.2, 0.0)
    assert small.slots(prompt(1, 10)) == {0}


def test_preble_charges_what_a_prompt_pushes_out_by_how_often_it_is_asked_for() -> None:
    small = preble()
    small.holds(resident_tokens=[200_000, 0])
    assert small.slots(prompt(1, 10)) == {0, 1}  # nothing was ever found there
    small.policy._hits[0] = (80.0, 160.0)
    assert small.slots(prompt(1, 10)) == {1}


def test_preble_counts_the_work_of_the_last_three_minutes() -> None:
    small = preble()
    small.send(prompt(1, 10))
    loads = small.policy._window.load_s
    assert len(loads) == 1
    small.fleet.now_s = 179.0
    small.ask(prompt(2, 10))
    assert sum(loads.values()) > 0
    small.fleet.now_s = 180.0
    small.ask(prompt(2, 10))
    assert sum(loads.values()) == 0.0


def test_prebles_window_holds_no_more_than_its_seconds() -> None:
    window = Window()
    for tick in range(10_000):
        window.advance(tick * 0.1)
        window.add(0, 0.01, tick * 0.1)
    assert len(window._buckets) <= 182
    assert window.load_s[0] == pytest.approx(18.0, abs=0.2)
