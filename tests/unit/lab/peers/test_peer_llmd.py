"""llm-d: the weighted sum worked out by hand, the LRU's quirks, the affinity filter on both sides of its thresholds."""

from __future__ import annotations

import pytest
from support.peers import Peer, prompt
from support.routing import replica
from warmfront.lab.peers.llmd import weighted
from warmfront.types import EngineLoad


def loads(*rows: tuple[float, float]) -> list[EngineLoad]:
    """Waiting requests and KV use, by slot."""
    return [EngineLoad(running=1.0, waiting=waiting, kv_usage=usage) for waiting, usage in rows]


def test_scores_are_two_queue_two_memory_three_prefix() -> None:
    small = Peer("llmd_default", 3)
    small.view.loads = loads((0, 0.5), (5, 0.0), (10, 1.0))
    request = small._request(prompt(1, 8), {})
    scores = weighted(small.view, [32, 128, 0], request, small.fleet)
    assert scores == pytest.approx(
        [
            2 * 1.0 + 2 * 0.5 + 3 * 2 / 8,  # shortest queue, half its memory, 2 of 8 blocks
            2 * 0.5 + 2 * 1.0 + 3 * 1.0,
            2 * 0.0 + 2 * 0.0 + 3 * 0.0,
        ]
    )


def test_equal_queues_all_score_one() -> None:
    small = Peer("llmd_default", 2)
    small.view.loads = loads((7, 0.0), (7, 0.0))
    assert weighted(small.view, [0, 0], small._request([], {}), small.fleet) == [4.0, 4.0]


def test_a_known_prompt_beats_the_whole_queue_score_but_not_queue_and_memory_together() -> None:
    small = Peer("llmd_default", 2)
    small.place(0, prompt(1, 8))
    small.view.loads = loads((9, 0.4), (0, 0.0))
    assert small.slots(prompt(1, 8)) == {0}  # 0 + 1.2 + 3 against 2 + 2
    small.view.loads = loads((9, 0.6), (0, 0.0))
    assert small.slots(prompt(1, 8)) == {1}  # 0 + 0.8 + 3 against 2 + 2


def test_ties_are_drawn() -> None:
    small = Peer("llmd_default", 3)
    assert small.slots(prompt(1, 8)) == {0, 1, 2}


def test_metrics_are_asked_for_with_the_scrape_interval_of_the_system() -> None:
    small = Peer("llmd_default", 2)
    small.send(prompt(1, 8))
    assert small.view.intervals == {0.05}


def test_the_history_is_as_large_as_the_engine_in_its_own_blocks_of_at_least_64_tokens() -> None:
    small = Peer("llmd_default", 2)  # engines of 200,000 tokens: 12,500 blocks of 16, taken for blocks of 64
    small.place(0, prompt(1, 8))
    for name in range(2, 27):
        small.place(0, prompt(name, 2000))  # 50,000 blocks of 16 tokens are 12,500 of 64
    assert small.ask(prompt(1, 8))[0].cached_tokens == 0
    small = Peer("llmd_default", 2)
    small.place(0, prompt(1, 8))
    for name in range(2, 26):
        small.place(0, prompt(name, 2000))
    assert small.slots(prompt(1, 8)) == {0}


def test_an_engine_that_tells_no_size_has_31250_blocks() -> None:
    small = Peer("llmd_default", 1, block_size=64)
    small.follow([replica(0, capacity_tokens=None, block_size=64)])
    small.place(0, prompt(1, 2))
    small.place(0, prompt(2, 2048))
    assert small.policy._prefix._history._blocks_max == 31_250


def test_the_head_of_a_prompt_is_forgotten_first_and_the_rest_still_counts() -> None:
    small = Peer("llmd_default", 2, block_size=64)
    small.follow([replica(slot, capacity_tokens=64 * 10, block_size=64) for slot in range(2)])
    small.place(0, prompt(1, 8))
    small.place(1, prompt(1, 1))  # somebody holds the head, so the walk goes on
    small.place(0, prompt(2, 4))  # 12 blocks: two fall out
    depths = small.policy._prefix.depths(small._request(prompt(1, 8), {}), small.fleet)
    assert depths == [0, 64]  # but nobody holds the second block, so the walk ends there
    small.place(1, prompt(1, 2))
    depths = small.policy._prefix.depths(small._request(prompt(1, 8), {}), small.fleet)
    assert depths == [6 * 64, 2 * 64]


def test_no_more_than_2048_blocks_of_a_prompt_are_looked_up() -> None:
    small = Peer("llmd_default", 1, block_size=64)
    small.follow([replica(0, capacity_tokens=None, block_size=64)])
    small.place(0, prompt(1, 3000))
    assert small.ask(prompt(1, 3000))[0].cached_tokens == 131_072


def test_precise_believes_events_and_not_dispatches() -> None:
    small = Peer("llmd_precise", 2)
    small.view.loads = loads((0, 0.0), (0, 0.0))
    small.holds(device=[128, 128], confirmed=[0, 64])
    assert small.slots(prompt(1, 8)) == {1}


def test_precise_spreads_cold_prompts_by_the_longest_unused_replica() -> None:
    small = Peer("llmd_precise", 3)
    small.view.loads = loads((0, 0.0), (0, 0.0), (0, 0.0))
    first = [small.send(prompt(name, 8)) for name in range(3)]
    assert sorted(first) == [0, 1, 2]
    assert [small.send(prompt(name, 8)) for name in range(3, 6)] == first


def affinity() -> Peer:
    small = Peer("llmd_affinity_filter", 3)
    small.place(2, prompt(1, 8))
    return small


def test_four_fifths_of_a_prompt_stick() -> None:
    small = affinity()
    small.fleet.pending_tokens[:] = [0, 0, 100_000]
    assert small.slots(prompt(1, 8) + prompt(2, 2)) == {2}


def test_less_than_four_fifths_do_not() -> None:
    small = affinity()
    small.fleet.pending_tokens[:] = [5, 0, 100_000]
    assert small.slots(prompt(1, 7) + prompt(2, 2)) == {1}


def test_stickiness_ends_beyond_18_seconds_of_backlog() -> None:
    small = affinity()
    limit = 18 * 15_928
    small.fleet.pending_tokens[:] = [500, 0, limit]
    assert small.slots(prompt(1, 8)) == {2}
    small.fleet.pending_tokens[:] = [500, 0, limit + 1]
    assert small.slots(prompt(1, 8)) == {1}
    small.fleet.pending_tokens[:] = [501, 500, limit + 500]  # the difference to the best other counts
    assert small.slots(prompt(1, 8)) == {2}


def test_the_token_score_knows_nothing_of_the_request_itself() -> None:
    small = affinity()
    small.place(1, prompt(1, 8))
    small.place(0, prompt(1, 8) + prompt(2, 2))  # all three are sticky, this one knows the most
    small.fleet.pending_tokens[:] = [1, 0, 0]
    assert small.slots(prompt(1, 8) + prompt(2, 2)) == {1, 2}


def test_token_queues_beyond_four_million_are_equal() -> None:
    small = Peer("llmd_affinity_filter", 2)
    small.fleet.pending_tokens[:] = [4_194_304, 5_000_000]
    assert small.slots(prompt(1, 8)) == {0, 1}
    small.fleet.pending_tokens[:] = [4_194_303, 5_000_000]
    assert small.slots(prompt(1, 8)) == {0}
