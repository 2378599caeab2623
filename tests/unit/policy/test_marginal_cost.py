from __future__ import annotations

import math
from collections import Counter

import pytest
from msgspec.structs import replace
from support.routing import World, busy, replica
from warmfront.config import CostConfig, PolicyConfig
from warmfront.policy.marginal_cost import MarginalCost
from warmfront.policy.prices import chance_of_full
from warmfront.types import Finished, FirstToken, Slot

PREFIX = 77


def warm(world: World, slot: int, *, key: int = PREFIX, tokens: int = 1600) -> None:
    world.index.held[(slot, key)] = tokens


def test_a_warm_replica_is_chosen_over_a_cold_one() -> None:
    world = World(3)
    warm(world, 1)
    dispatch = world.send(prefix_key=PREFIX)
    assert dispatch.choices[0].slot == 1
    assert dispatch.reason == "warm"


def test_the_last_block_of_a_fully_cached_prompt_is_not_predicted() -> None:
    world = World(1)
    warm(world, 0)
    assert world.send(prefix_key=PREFIX).choices[0].cached_tokens == 1600 - 16
    assert world.send(prefix_key=PREFIX, prompt_tokens=1605).choices[0].cached_tokens == 1600


@pytest.mark.bug(23)
def test_a_busy_warm_replica_is_left_when_waiting_there_costs_more_than_computing_again() -> None:
    world = World(2)
    warm(world, 0)
    world.load(0, 4, prompt_tokens=16_000)
    dispatch = world.send(prefix_key=PREFIX)
    assert dispatch.choices[0].slot == 1
    assert dispatch.reason == "spill"


@pytest.mark.bug(5)
def test_a_little_work_does_not_drive_a_request_from_its_warm_replica() -> None:
    world = World(2)
    warm(world, 0, tokens=16_000)
    world.load(0, 1, prompt_tokens=800)
    assert world.slot(prefix_key=PREFIX, prompt_tokens=16_000) == 0


def test_siblings_of_a_burst_stay_together_on_a_fleet_that_decodes() -> None:
    world = World(2)
    for slot in (0, 1):
        world.load(slot, 16, prompt_tokens=160)
    slots = {world.slot(prefix_key=PREFIX, prompt_tokens=3200) for _ in range(8)}
    assert len(slots) == 1


@pytest.mark.bug(3)
def test_a_long_burst_of_siblings_spills_to_other_replicas_in_the_end() -> None:
    world = World(2)
    counts = Counter(world.slot(prefix_key=PREFIX, prompt_tokens=3200) for _ in range(200))
    assert min(counts.values()) >= 20
    assert len(counts) == 2


def test_a_hot_prefix_replicates_and_an_ordinary_one_does_not() -> None:
    world = World(4)
    warm(world, 0)
    ordinary = world.costs(world.new(prefix_key=PREFIX))[1]
    for _ in range(400):
        world.now_s += 0.02
        dispatch = world.send(prefix_key=PREFIX)
        world.first_token(dispatch)
        world.finish(dispatch, cached_tokens=dispatch.choices[0].cached_tokens)
    hot = world.costs(world.new(prefix_key=PREFIX))
    assert factor(ordinary, "N") < 0.2
    used = {slot for slot, _ in world.index.held}
    assert len(used) == 4 or factor(hot[max(set(range(4)) - used)], "N") > 1.0


def test_a_cold_replica_gets_new_prefixes_while_full_ones_must_evict() -> None:
    world = World(3)
    world.index.resident = {0: 200_000, 1: 200_000, 2: 0}
    assert {world.serve().choices[0].slot for _ in range(6)} == {2}


@pytest.mark.bug(2)
def test_unrelated_prompts_spread_over_idle_replicas() -> None:
    world = World(2)
    counts = Counter(world.serve().choices[0].slot for _ in range(60))
    assert min(counts.values()) >= 15


@pytest.mark.bug(1)
def test_unrelated_prompts_in_flight_are_balanced_like_least_loaded() -> None:
    world = World(4)
    counts = Counter(world.slot() for _ in range(80))
    assert max(counts.values()) - min(counts.values()) <= 2


def test_a_slow_replica_gets_less() -> None:
    world = World(2)
    learned = world.router._pools["m"].fleet.learned
    learned.prefill.scale[0] = 3.0
    counts = Counter(world.slot() for _ in range(60))
    assert counts[0] < counts[1] / 2


@pytest.mark.bug(189)
def test_memory_pressure_repels() -> None:
    world = World(2)
    warm(world, 0, tokens=320)
    world.index.in_use = {-1: (0, 5, 199_000)}  # type: ignore[dict-item]  # nobody's request
    assert world.slot(prefix_key=PREFIX) == 1
    row = world.costs(world.new(prefix_key=PREFIX))[0]
    assert term(row, "memory") > 0
    assert factor(row, "u") > 0.97


def test_replicas_without_known_capacity_have_no_memory_terms_and_still_serve() -> None:
    world = World(0)
    world.set_fleet([replica(slot, capacity_tokens=None, block_size=None, events="none") for slot in range(3)])
    row = world.costs(world.new())[0]
    assert term(row, "memory") == term(row, "eviction") == 0.0
    assert {world.serve().choices[0].slot for _ in range(30)} == {0, 1, 2}


def test_overlaps_that_engines_never_confirm_lose_their_credit() -> None:
    world = World(2)
    for _ in range(60):
        dispatch = world.send(prefix_key=PREFIX)
        world.now_s += 0.2
        world.first_token(dispatch)
        world.finish(dispatch, cached_tokens=0)
    row = world.costs(world.new(prefix_key=PREFIX))
    held = next(slot for slot, _ in world.index.held)
    assert factor(row[held], "η") < 0.1
    assert factor(row[held], "n") > 1400


def test_one_replica_without_events_does_not_discredit_the_others() -> None:
    world = World(0)
    world.set_fleet([replica(0, events="stale"), replica(1)])
    credit = world.router._pools["m"].fleet.learned.credit
    for _ in range(50):
        credit.learn(3, exact=False, predicted_tokens=1000, reported_tokens=0)
    assert credit.factor[False][3] < 0.1
    assert credit.factor[True][3] == 1.0


def test_slower_tiers_count_when_loading_beats_computing() -> None:
    world = World(2)
    world.index.host[(1, PREFIX)] = 1600
    dispatch = world.send(prefix_key=PREFIX)
    assert dispatch.choices[0].slot == 1
    assert dispatch.choices[0].cached_tokens == 1584


@pytest.mark.bug(25)
def test_requests_without_prompt_blocks_rotate_over_idle_replicas() -> None:
    world = World(3)
    slots = [world.serve(route="load", basis="none", prompt_tokens=0, prefix_key=0).choices[0].slot for _ in range(6)]
    assert sorted(slots[:3]) == sorted(slots[3:]) == [0, 1, 2]


def test_prompts_that_cannot_be_hashed_are_placed_by_load() -> None:
    world = World(2)
    world.load(0, 6)
    assert world.slot(basis="none", prefix_key=0) == 1


def test_a_replica_that_serves_others_too_is_seen_as_busy() -> None:
    world = World(2)
    first, second = world.states()
    world.set_fleet([busy(first, running=40.0, waiting=10.0), second])
    assert {world.slot() for _ in range(3)} == {1}


def test_terms_add_up_to_the_cost_that_decides() -> None:
    world = World(4)
    warm(world, 2)
    for _ in range(20):
        world.slot(prompt_tokens=3000)
    asked = world.new(prefix_key=PREFIX)
    explained = world.ask("explain", asked)
    totals = {row["slot"]: row["total"] for row in explained["replicas"]}
    for row in explained["replicas"]:
        assert math.isclose(sum(each["value"] for each in row["terms"]), row["total"], rel_tol=1e-12)
    assert totals[2] == min(totals.values())
    assert explained["choice"] == "http://10.0.0.2:8000"


def test_explaining_changes_nothing() -> None:
    plain, asked = World(3), World(3)
    for world in (plain, asked):
        for number in range(40):
            if world is asked:
                world.costs(world.new(prefix_key=5))
                world.number -= 1
            world.now_s += 0.05
            world.send(prefix_key=number % 4)
    assert plain.index.held == asked.index.held
    assert plain.ask("fleet") == asked.ask("fleet")


def test_later_turns_weigh_in_only_where_conversations_go_on() -> None:
    world = World(2)
    for _ in range(40):
        for turn in range(6):
            world.now_s += 0.1
            dispatch = world.send(turn=turn)
            world.first_token(dispatch)
            world.finish(dispatch, cached_tokens=dispatch.choices[0].cached_tokens)
    row = world.costs(world.new(turn=0))[0]
    last = world.costs(world.new(turn=6))[0]
    assert factor(row, "N_T") > 3
    assert factor(last, "N_T") < factor(row, "N_T")


def test_a_new_replica_attracts_new_prefixes() -> None:
    world = World(2)
    for slot in (0, 1):
        world.load(slot, 3, prompt_tokens=6000)
    world.set_fleet([*world.states(), replica(2)])
    assert world.slot() == 2


def test_a_replica_that_left_is_forgotten_at_once() -> None:
    world = World(2)
    warm(world, 0)
    assert world.slot(prefix_key=PREFIX) == 0
    world.set_fleet([replica(1)])
    assert world.slot(prefix_key=PREFIX) == 1


def test_only_ready_replicas_are_chosen() -> None:
    world = World(3)
    first, second, third = world.states()
    world.set_fleet([first, replace(second, replica=replace(second.replica, ready=False)), third])
    assert 1 not in {world.slot() for _ in range(30)}


@pytest.mark.parametrize("replicas", [1, 2, 7, 33])
def test_choices_are_in_the_order_of_their_costs(replicas: int) -> None:
    world = World(replicas)
    for number in range(3 * replicas):
        dispatch = world.send(prompt_tokens=400 + 700 * (number % 9), prefix_key=number % 5)
        if number % 3 == 0:
            world.step(FirstToken(dispatch.id, world.now_s, dispatch.choices[0].slot))
    asked = world.new(prefix_key=3)
    totals = sorted(row["total"] for row in world.ask("explain", asked)["replicas"])
    chosen = {row["id"]: row["total"] for row in world.ask("explain", asked)["replicas"]}
    ranked = [chosen[name] for name in world.ask("explain", asked)["choices"]]
    assert len(ranked) == min(3, replicas)
    for mine, best in zip(ranked, totals, strict=False):
        assert mine <= best + 1.1e-3


def factor(row: dict[str, object], symbol: str) -> float:
    factors = row["factors"]
    assert isinstance(factors, list)
    return float(next(each["value"] for each in factors if each["symbol"] == symbol))


def term(row: dict[str, object], name: str) -> float:
    terms = row["terms"]
    assert isinstance(terms, list)
    return float(next(each["value"] for each in terms if each["name"] == name))


def test_a_request_for_one_word_does_not_mind_slow_decoding() -> None:
    world = World(2)
    warm(world, 0)
    world.router._pools["m"].fleet.next_step_s[0] = 0.2
    assert world.slot(prefix_key=PREFIX) == 1
    world = World(2)
    warm(world, 0)
    world.router._pools["m"].fleet.next_step_s[0] = 0.2
    assert world.slot(prefix_key=PREFIX, output_tokens_max=1) == 0


def test_a_request_for_one_word_does_not_think_that_others_decode_one_word_too() -> None:
    world = World(2)
    for slot in (0, 1):
        world.load(slot, 8, prompt_tokens=160)
    short = world.costs(world.new(output_tokens_max=1))[0]
    usual = world.costs(world.new(output_tokens_max=None))[0]
    assert factor(short, "X") == pytest.approx(factor(usual, "X"))


def test_what_decodes_now_slows_half_of_an_answer() -> None:
    """It has ended by then, if answers are alike, and what comes after it comes to every replica."""
    world = World(2)
    learned = world.router._pools["m"].fleet.learned
    learned.decode.per_request[:], learned.decode.per_token[:] = [1e-3, 1e-3], [0.0, 0.0]
    world.load(0, 8, prompt_tokens=160)
    world.load(1, 0, prompt_tokens=160)
    costs = world.costs(world.new(output_tokens_max=None))
    loaded, empty = (term(costs[slot], "decode") for slot in (0, 1))
    worth = 2.0 / 0.1  # of a second between tokens, by the targets
    assert loaded - empty == pytest.approx(worth * 0.5 * 8 * 1e-3)


def test_the_guard_expects_of_the_tokens_what_the_engine_will_take_for_them() -> None:
    """Not the half of it that a choice is answerable for."""
    world = World(1)
    learned = world.router._pools["m"].fleet.learned
    learned.decode.per_request[:] = [1e-3]
    world.load(0, 8, prompt_tokens=160)
    fleet = world.router._pools["m"].fleet
    expected_s = learned.decode.seconds(Slot(0), 8 + 1, fleet.context_tokens[0] + 1000)
    dispatch = world.send(prompt_tokens=1000)
    policy = world.router._decider._policies["m"].policy
    assert isinstance(policy, MarginalCost)
    assert policy.watch._bets[dispatch.id].token_s == pytest.approx(expected_s)


def test_memory_holds_half_of_the_answers_that_are_being_given() -> None:
    world = World(1)
    world.load(0, 8, prompt_tokens=160)
    world.index.in_use = {-1: (0, 0, 100_000)}  # type: ignore[dict-item]  # nobody's request
    fleet = world.router._pools["m"].fleet
    capacity = fleet.capacity_tokens[0]
    assert capacity is not None
    used = factor(world.costs(world.new(prompt_tokens=1000, output_tokens_max=100))[0], "u")
    assert used == pytest.approx((100_000 + 0.5 * fleet.output_tokens[0] + 1000 + 100) / capacity, rel=0.02)


def test_memory_is_likely_to_fill_where_few_large_requests_share_it() -> None:
    assert chance_of_full(0.92, 0.9, 1000.0) == pytest.approx(0.039, abs=0.001)
    assert chance_of_full(0.92, 0.9, 9.0) == pytest.approx(0.434, abs=0.001)
    assert chance_of_full(0.97, 0.9, 9.0) == 0.5
    assert [chance_of_full(used, 0.0, 1.0) for used in (0.9, 0.99)] == [0.0, 1.0]


def test_prefill_is_charged_for_the_answers_that_it_stalls_and_little_for_those_of_other_replicas() -> None:
    world = World(2, policy=PolicyConfig(cost=CostConfig(arrival_weight=0.0)))
    world.load(0, 8, prompt_tokens=160)
    stalled, other = (factor(world.costs(world.new())[slot], "X") for slot in (0, 1))
    stall = 2.0 / (200.0 * 0.1)  # κ by the targets and the presumed length of an answer
    assert stalled - other == pytest.approx(stall * 0.75 * 8)
    assert other == pytest.approx(1.0 + stall * 0.25 * 4)


def test_a_first_token_later_than_the_limit_is_not_waited_for_while_the_fleet_has_room() -> None:
    chosen = {}
    for limit_s in (None, 0.5):
        world = World(2, policy=PolicyConfig(cost=CostConfig(ttft_limit_s=limit_s, arrival_weight=40.0)))
        for _ in range(40):
            world.serve(prompt_tokens=160)
        warm(world, 0, tokens=2000)
        world.load(0, 1, prompt_tokens=5500)
        chosen[limit_s] = world.slot(prefix_key=PREFIX, prompt_tokens=2000)
    assert chosen == {None: 0, 0.5: 1}


def test_prefill_is_learned_where_many_requests_share_memory() -> None:
    world = World(1)
    world.index.held[(0, PREFIX)] = 6000
    for _ in range(40):
        world.send(prefix_key=PREFIX, prompt_tokens=6800)
    pool = world.router._pools["m"]
    assert pool.fleet.context_tokens[0] > 200_000
    assert not pool._crowded(pool.fleet.slot[0])


def test_answers_without_usage_tell_their_length_by_their_chunks() -> None:
    world = World(1)
    for _ in range(200):
        dispatch = world.send(output_tokens_max=None)
        world.first_token(dispatch)
        world.step(Finished(dispatch.id, world.now_s, dispatch.choices[0].slot, 200, None, 699))
    assert world.router._pools["m"].fleet.learned.output_tokens > 600


def test_a_warm_replica_is_left_when_its_engine_runs_no_more_requests_at_once() -> None:
    world = World(2)
    world.set_fleet([replica(0), replica(1, ready=False)])
    for dispatch in [world.send() for _ in range(12)]:
        world.first_token(dispatch)
    warm(world, 0)
    ready = [replica(0), replica(1)]
    world.set_fleet(ready)
    assert world.slot(prefix_key=PREFIX) == 0
    full = busy(ready[0], running=8, waiting=4, kv_usage=0.2)
    for _ in range(4):
        world.set_fleet([full, ready[1]])
    assert world.slot(prefix_key=PREFIX) == 1
