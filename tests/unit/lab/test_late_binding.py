"""Flow control on virtual time: what holding requests in the router does for those who wait."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from msgspec.structs import replace
from support.lab import Given, regime
from warmfront.config import FlowConfig, RouterConfig
from warmfront.lab import regime as regimes
from warmfront.lab.model import EngineSpec, Outcome, RunResult, SimRequest
from warmfront.lab.run import run, run_source

EAGER, LATE = FlowConfig(late_binding=False), FlowConfig()
SMALL = regime(EngineSpec("llama-3.1-8b-h100", count=2))


def flood(**few: Any) -> Given:
    """Make four seconds of several times what the fleet can compute; every fifth request is of a few that differ."""
    rng = Random(5)
    requests = []
    for key in range(200):
        changes = {"group": "few", **few} if key % 5 == 0 else {"group": "many", "flow": "many"}
        prompt = ((rng.getrandbits(40), rng.randint(1000, 5000)),)
        requests.append(SimRequest(key, key / 50, prompt, rng.randint(1, 40), **changes))
    return Given(*requests)


def waits_s(source: Given, flow: FlowConfig, policy: str = "marginal_cost") -> dict[str, float]:
    """Return the time to first token that nine in ten stay below, by group."""
    result = run_source(SMALL, source, policy, 1.0, 1, config=RouterConfig(flow=flow))
    return {group: _ninth(result, group) for group in ("few", "many")}


def _ninth(result: RunResult, group: str) -> float:
    rows = [outcome for outcome in result.outcomes if outcome.group == group]
    assert all(outcome.error is None for outcome in rows), "a burst that clients would wait out loses nobody"
    waits = sorted((outcome.first_token_s or 0.0) - outcome.arrived_s for outcome in rows)
    return waits[int(0.9 * len(waits))]


def test_urgent_requests_pass_those_that_would_wait_anyway() -> None:
    source = flood(priority=-1)
    eager, late = waits_s(source, EAGER), waits_s(source, LATE)
    assert late["few"] < 0.5 * eager["few"]
    assert late["many"] < 1.2 * eager["many"]


def test_a_tenant_who_asks_for_little_is_not_made_to_wait_by_one_who_floods() -> None:
    source = flood(flow="few")
    eager, late = waits_s(source, EAGER), waits_s(source, LATE)
    assert late["few"] < 0.5 * eager["few"]
    assert late["many"] < 1.2 * eager["many"]


@pytest.mark.parametrize("policy", ["least_loaded", "round_robin", "vllm_router_kv_aware"])
def test_policies_without_estimates_send_as_if_there_were_no_flow_control(policy: str) -> None:
    source = flood(priority=-1)
    eager, default = (
        run_source(SMALL, source, policy, 1.0, 1, config=RouterConfig(flow=flow)).outcomes for flow in (EAGER, LATE)
    )
    assert eager == default


def test_holding_requests_does_not_lower_goodput_where_memory_is_short() -> None:
    loaded = replace(regimes.load("llmd-shared-prefix"), requests=500)

    def good(flow: FlowConfig) -> float:
        outcomes = run(loaded, "marginal_cost", 16.0, 1, config=RouterConfig(flow=flow)).outcomes
        return sum(_is_good(each, loaded.slo.ttft_s) for each in outcomes) / len(outcomes)

    assert good(LATE) >= good(EAGER) - 0.002


def _is_good(outcome: Outcome, ttft_s: float) -> bool:
    return outcome.first_token_s is not None and outcome.first_token_s - outcome.arrived_s <= ttft_s
