"""Dynamo's costs worked out by hand: prefill and decode blocks, clamp, decay, tiers, ties."""

from __future__ import annotations

import pytest
from support.peers import Peer, prompt
from warmfront.lab.peers import PEERS


def costs(small: Peer, blocks: list[int], **changes: int) -> list[float]:
    request = small._request(blocks, changes)
    return small.policy.costs(request, small.overlap, small.overlap.confirmed, small.fleet)


def test_an_idle_worker_costs_fractional_prefill_and_full_decode_blocks() -> None:
    small = Peer("dynamo_kv", 1, block_size=64)
    assert costs(small, prompt(1, 105), prompt_tokens=6758) == pytest.approx([6758 / 64 + 105])  # logged as 210.594


def test_backlog_and_active_blocks_add_and_shared_active_blocks_do_not() -> None:
    small = Peer("dynamo_kv", 3)
    small.fleet.pending_tokens[:] = [160, 0, 0]
    small.holds(active_tokens=[0, 320, 320], active=[0, 0, 64])
    assert costs(small, prompt(1, 10)) == [(160 + 160) / 16 + 10, 10 + 20 + 10, 10 + 20 + 10 - 4]


def test_credit_cannot_make_prefill_negative() -> None:
    small = Peer("dynamo_kv_tiers", 1)
    small.holds(device=[160], host=[160], disk=[480])
    assert costs(small, prompt(1, 10)) == [10.0]


def test_only_events_are_credited() -> None:
    small = Peer("dynamo_kv", 2)
    small.holds(device=[160, 160], confirmed=[0, 32])
    assert costs(small, prompt(1, 10)) == [20.0, 18.0]
    assert small.slots(prompt(1, 10)) == {1}


def test_without_events_the_routers_own_record_is_credited() -> None:
    small = Peer("dynamo_kv", 2)
    small.fleet.exact[:] = [True, False]
    small.holds(device=[160, 32], confirmed=[0, 0])
    assert small.slots(prompt(1, 10)) == {1}


def test_a_sibling_leaves_for_an_idle_worker_although_its_prefix_is_credited() -> None:
    small = Peer("dynamo_kv", 2)  # L = 10 shared, tails of 2: the weakness that the credit only cancels its own backlog
    small.fleet.pending_tokens[:] = [12 * 16, 0]
    small.holds(device=[160, 0], active_tokens=[12 * 16, 0], active=[160, 0])
    assert costs(small, prompt(1, 12)) == [(12 + 12 - 10) + (12 + 12 - 10), 12 + 12]
    assert small.slots(prompt(1, 12)) == {1}


def test_decay_fades_the_credit_of_a_worker_with_more_backlog_than_the_least() -> None:
    small = Peer("dynamo_kv_decay", 2)
    small.fleet.pending_tokens[:] = [160, 0]
    small.holds(device=[80, 0])
    # excess of the first is one request: its 5 blocks of credit count half
    assert costs(small, prompt(1, 10)) == [(10 + 10 - 2.5) + 10, 10 + 10]
    small.fleet.pending_tokens[:] = [160, 160]  # no excess over the least
    assert costs(small, prompt(1, 10))[0] == (10 + 10 - 5) + 10


def test_tiers_are_credited_beyond_the_device() -> None:
    small = Peer("dynamo_kv_tiers", 1)
    small.holds(device=[32], host=[96], disk=[160])
    assert costs(small, prompt(1, 20)) == [20 - (2 + 0.75 * 4 + 0.25 * 4) + 20]
    plain = Peer("dynamo_kv", 1)
    plain.holds(device=[32], host=[96], disk=[160])
    assert costs(plain, prompt(1, 20)) == [18 + 20]


def test_the_oldest_prefill_fades_by_its_predicted_duration_and_no_more_than_itself() -> None:
    small = Peer("dynamo_kv_ais", 1)
    fleet = small.fleet
    fleet.pending[0], fleet.pending_tokens[0], fleet.pending_s[0], fleet.busy_since_s[0] = 2, 320, 4.0, 10.0
    fleet.now_s = 11.0
    assert costs(small, prompt(1, 10)) == [(320 * 3 / 4 + 160) / 16 + 10]
    fleet.now_s = 19.0
    assert costs(small, prompt(1, 10)) == [(160 + 160) / 16 + 10]


def test_tuned_settings_weigh_prefill_four_times_and_a_request_as_1024_tokens() -> None:
    small = Peer("dynamo_kv_tuned", 1)
    small.fleet.pending_tokens[:] = [320]
    small.fleet.in_flight[:] = [3]
    small.holds(device=[80])
    assert costs(small, prompt(1, 10)) == [4 * (20 + 10 - 2 * 5) + 10 + 3 * 64]


@pytest.mark.parametrize("name", [name for name in PEERS if name.startswith("dynamo")])
def test_exact_ties_are_drawn(name: str) -> None:
    assert Peer(name, 3).slots(prompt(1, 10)) == {0, 1, 2}
