"""Replicas that join, leave, crash and come back, as the router lives through it."""

from __future__ import annotations

from support.lab import Chats, regime
from warmfront.lab.model import EngineSpec, Outcome, RunResult
from warmfront.lab.run import run_source

H100 = "llama-3.1-8b-h100"


def chats(*engines: EngineSpec, policy: str = "round_robin") -> RunResult:
    """About 50 s of traffic."""
    source = Chats(seed=3, sessions=400, rate=8.0, turns=1)
    return run_source(regime(*engines), source, policy, 1.0, 3)


def served_by(result: RunResult, slot: int, *, since_s: float = 0.0, until_s: float = 1e9) -> list[Outcome]:
    return [each for each in result.outcomes if each.slot == slot and since_s <= (each.dispatched_s or 0.0) < until_s]


def test_a_crash_fails_what_runs_there_and_nothing_else() -> None:
    result = chats(EngineSpec(H100, count=2), EngineSpec(H100, crashes_s=20.0, restart_s=15.0), policy="marginal_cost")
    failed = [each for each in result.outcomes if each.error is not None]
    assert failed
    assert {each.error for each in failed} == {"midstream"}
    assert all(each.slot == 2 and each.arrived_s <= 20.0 for each in failed)
    assert all(each.finished_s is not None for each in result.outcomes if each.error is None)


def test_a_dead_replica_costs_one_attempt_until_the_next_scrape_and_serves_again_after_its_restart() -> None:
    result = chats(EngineSpec(H100, count=2), EngineSpec(H100, crashes_s=20.5, restart_s=15.0))
    tried_dead = [each for each in result.outcomes if each.attempts > 1]
    assert tried_dead
    assert all(20.5 <= each.arrived_s <= 21.0 for each in tried_dead)
    assert not served_by(result, 2, since_s=21.0, until_s=35.5)
    assert served_by(result, 2, since_s=37.0)


def test_a_restarted_replica_has_an_empty_cache_and_the_router_knows() -> None:
    result = chats(EngineSpec(H100, count=2), EngineSpec(H100, crashes_s=20.0, restart_s=15.0))
    again = served_by(result, 2, since_s=35.0)
    assert again[0].predicted_tokens == again[0].cached_tokens == 0
    before = served_by(result, 2, until_s=19.0)[-1]
    assert before.predicted_tokens > 0


def test_a_replica_that_leaves_finishes_what_it_has() -> None:
    result = chats(EngineSpec(H100, count=2), EngineSpec(H100, leaves_s=20.0))
    assert all(each.error is None for each in result.outcomes)
    assert served_by(result, 2, until_s=20.0)
    assert not served_by(result, 2, since_s=20.0)
    assert any(each.finished_s > 20.0 for each in served_by(result, 2) if each.finished_s is not None)


def test_a_replica_that_joins_serves_once_it_has_started() -> None:
    result = chats(EngineSpec(H100, count=2), EngineSpec(H100, joins_s=10.0, startup_s=5.0))
    first_s = min(each.dispatched_s for each in served_by(result, 2) if each.dispatched_s is not None)
    assert 15.0 <= first_s <= 20.0


def test_with_every_replica_down_requests_wait_and_are_served_after_the_restart() -> None:
    result = chats(EngineSpec(H100, crashes_s=20.0, restart_s=5.0))
    late = [each for each in result.outcomes if 21.5 < each.arrived_s < 24.0]
    assert late
    assert all(each.dispatched_s is not None and each.dispatched_s >= 25.0 for each in late)
    assert all(each.finished_s is not None for each in late)


def test_an_engine_of_twice_the_speed_answers_in_half_the_time() -> None:
    slow, fast = chats(EngineSpec(H100, count=4)), chats(EngineSpec(H100, count=4, speed=2.0))
    assert 0.4 < _seconds(fast) / _seconds(slow) < 0.55


def _seconds(result: RunResult) -> float:
    return sum(each.finished_s - each.arrived_s for each in result.outcomes if each.finished_s is not None)


def shares_of_a_far_replica(rate: float, *, policy: str = "marginal_cost") -> float:
    """Share of one replica of three that is 80 ms away."""
    engines = (EngineSpec(H100, count=2), EngineSpec(H100, rtt_s=0.08))
    source = Chats(seed=3, sessions=400, rate=rate, turns=1)
    result = run_source(regime(*engines), source, policy, 1.0, 3)
    far = served_by(result, 2)
    assert all((each.first_token_s or 0.0) >= (each.dispatched_s or 0.0) + 0.08 for each in far)
    return len(far) / len(result.outcomes)


def test_a_far_replica_is_used_when_near_ones_cost_more_than_the_way() -> None:
    assert shares_of_a_far_replica(8.0) == 0.0
    assert 0.02 < shares_of_a_far_replica(60.0) < shares_of_a_far_replica(120.0) < 0.3
    assert shares_of_a_far_replica(8.0, policy="round_robin") > 0.3
