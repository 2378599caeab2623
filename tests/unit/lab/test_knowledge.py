"""What the router knows of caches: late, lost or no events, tiers, adapters, engines that reuse nothing."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from msgspec.structs import replace
from support.lab import Chats, Given, regime
from warmfront.clock import MonotonicClock
from warmfront.config import CostConfig, PolicyConfig, RouterConfig
from warmfront.lab.fleet import open_fleet
from warmfront.lab.measures import measure
from warmfront.lab.model import EngineSpec, EventSpec, RunResult, Segment, SimRequest
from warmfront.lab.regime import load
from warmfront.lab.run import run, run_source
from warmfront.ports.agenda import Agenda
from warmfront.ports.sim import SimIndex, SimPort, Stages
from warmfront.ports.sim_view import SimView
from warmfront.router import Router
from warmfront.types import Command, Event, Finished

H100 = "llama-3.1-8b-h100"


def chats(*engines: EngineSpec, events: EventSpec | None = None) -> RunResult:
    source = Chats(seed=5, sessions=150, rate=15.0)
    return run_source(regime(*engines, events=events), source, "marginal_cost", 1.0, 5)


def given(*requests: SimRequest, engine: EngineSpec, policy: str = "round_robin") -> RunResult:
    return run_source(regime(engine), Given(*requests), policy, 1.0, 0)


def ask(key: int, at_s: float, *prompt: Segment, output: int = 8, adapter: str | None = None) -> SimRequest:
    return SimRequest(key, at_s, prompt, output, adapter=adapter)


def hits(result: RunResult) -> int:
    return sum(each.cached_tokens for each in result.outcomes)


def errors(result: RunResult) -> int:
    return sum(abs(each.cached_tokens - each.predicted_tokens) for each in result.outcomes)


def test_late_events_make_predictions_worse() -> None:
    assert errors(chats(events=EventSpec(delay_s=0.0))) < errors(chats(events=EventSpec(delay_s=5.0)))


@pytest.mark.parametrize("loss", [0.1, 0.2, 0.5])
def test_a_stream_that_loses_much_is_worth_nearly_as_much_as_none(loss: float) -> None:
    lossy = chats(events=EventSpec(loss=loss))
    silent = chats(events=EventSpec(publish=False))
    assert hits(lossy) >= 0.95 * hits(silent)
    assert errors(lossy) <= 1.5 * errors(silent)


def lost_batches(loss: float) -> int:
    """Run some sessions, and count the batches of events that did not arrive."""
    spec, agenda = regime(events=EventSpec(loss=loss)).fleet, Agenda()
    fleet = open_fleet(spec, agenda, seed=5)
    stages = Stages(MonotonicClock())
    router = Router(RouterConfig(policy=PolicyConfig(name="round_robin")), SimIndex(fleet, stages))
    view = SimView(fleet, agenda, block_size=spec.block_size)
    source = Chats(seed=5, sessions=150, rate=15.0)
    SimPort(fleet, router, source, agenda=agenda, view=view, stages=stages).run()
    return fleet.lost_batches


def test_as_many_batches_are_lost_as_the_regime_says() -> None:
    published = lost_batches(1.0)
    assert lost_batches(0.0) == 0
    assert published > 500, "too few to tell a share"
    assert abs(lost_batches(0.2) / published - 0.2) < 0.04


def test_without_events_the_router_predicts_from_its_own_dispatches() -> None:
    result = chats(events=EventSpec(publish=False))
    assert sum(each.predicted_tokens for each in result.outcomes) > 0.8 * hits(result) > 0


def test_an_engine_without_caching_reuses_nothing_though_its_events_say_so() -> None:
    result = chats(EngineSpec(H100, count=4, caching=False))
    assert hits(result) == 0
    assert sum(each.predicted_tokens for each in result.outcomes) > 0


def small(**tiers: int) -> EngineSpec:
    """A device that holds two prompts of 6,400 tokens at most."""
    return EngineSpec(H100, kv_tokens=16_000, **tiers)


PROMPTS = [ask(number, 10.0 * number, (1 + number % 4, 6400)) for number in range(8)]
"""Four prompts one after the other, and once more."""


def test_a_prediction_is_exact_unless_its_prefix_is_evicted_while_the_request_waits() -> None:
    kept = ask(0, 0.0, (1, 6400))
    alone = given(kept, ask(1, 10.0, (1, 6400)), engine=small())
    assert [(each.predicted_tokens, each.cached_tokens) for each in alone.outcomes] == [(0, 0), (6336, 6336)]
    # Of the longer prompt before it, the last parts take the place of the prefix.
    behind = given(kept, ask(1, 10.0, (2, 12_800)), ask(2, 10.01, (1, 6400)), engine=small())
    waited = behind.outcomes[2]
    assert waited.predicted_tokens == 6336
    assert 0 < waited.cached_tokens < 6336


def test_evicted_blocks_are_found_in_host_memory_and_loaded_for_their_price() -> None:
    without, host = given(*PROMPTS, engine=small()), given(*PROMPTS, engine=small(host_tokens=64_000))
    assert hits(without) == 0
    assert [each.cached_tokens for each in host.outcomes[4:]] == [6336] * 4
    cold, loaded = host.outcomes[0], host.outcomes[4]
    assert cold.first_token_s is not None
    assert loaded.first_token_s is not None
    cold_s, loaded_s = cold.first_token_s - cold.arrived_s, loaded.first_token_s - loaded.arrived_s
    assert 6336 * 5.5e-6 < loaded_s < 0.5 * cold_s


def test_what_falls_out_of_host_memory_is_found_on_disk() -> None:
    disk = given(*PROMPTS, engine=small(host_tokens=6400, disk_tokens=64_000))
    host = given(*PROMPTS, engine=small(host_tokens=64_000))
    assert [each.cached_tokens for each in disk.outcomes[4:]] == [6336] * 4
    assert disk.busy_s[0] > host.busy_s[0]


def test_the_router_knows_what_lies_in_host_memory() -> None:
    result = given(*PROMPTS, engine=small(host_tokens=64_000), policy="marginal_cost")
    assert [each.predicted_tokens for each in result.outcomes[4:]] == [6336] * 4


def test_an_adapter_that_is_not_resident_is_loaded_first() -> None:
    engine = EngineSpec(H100, adapters=("north", "south"), adapter_slots=1)
    result = given(
        ask(0, 0.0, (1, 100), adapter="north"),
        ask(1, 10.0, (2, 100), adapter="north"),
        ask(2, 20.0, (3, 100), adapter="south"),
        engine=engine,
    )
    first, again, other = (
        each.first_token_s - each.arrived_s for each in result.outcomes if each.first_token_s is not None
    )
    assert first - again > 0.019
    assert other - again > 0.019


def test_one_prompt_under_two_adapters_shares_nothing() -> None:
    engine = EngineSpec(H100, adapters=("north", "south"))
    result = given(
        *(
            ask(number, 10.0 * number, (1, 640), adapter=name)
            for number, name in enumerate(["north", "south", "north"])
        ),
        engine=engine,
    )
    assert [each.cached_tokens for each in result.outcomes] == [0, 0, 576]


def test_a_request_goes_only_where_its_adapter_is() -> None:
    requests = [ask(number, 1.0 * number, (number, 100), adapter="north") for number in range(6)]
    fleet = regime(EngineSpec(H100, count=2), EngineSpec(H100, adapters=("north",)))
    result = run_source(fleet, Given(*requests), "round_robin", 1.0, 0)
    assert {each.slot for each in result.outcomes} == {2}


def test_a_request_longer_than_the_engine_takes_is_refused_by_it() -> None:
    result = given(ask(0, 0.0, (1, 20_000)), ask(1, 1.0, (1, 100)), engine=small())
    assert [each.error for each in result.outcomes] == ["status_400", None]


def test_engines_that_reuse_nothing_for_a_while_do_so_for_the_given_share_of_the_requests() -> None:
    engine = EngineSpec(H100, count=1, uncached=(0.25, 0.75))
    spec = msgspec.structs.replace(regime(engine), requests=40)
    asked = Given(*(ask(key, 2.0 * key, (1, 640), (100 + key, 64)) for key in range(40)))
    result = run_source(spec, asked, "round_robin", 1.0, 0)
    assert [each.key for each in result.outcomes if each.cached_tokens == 0] == [0, *range(10, 30)]
    assert all(each.predicted_tokens == 640 for each in result.outcomes[1:])


def test_where_answers_do_not_say_what_was_cached_the_lab_knows_and_the_router_does_not() -> None:
    spec = regime(EngineSpec(H100, count=1))
    silent = msgspec.structs.replace(spec, fleet=msgspec.structs.replace(spec.fleet, reports_cached=False))
    seen: list[int | None] = []

    class Listening(Router):
        def step(self, events: Sequence[Event]) -> list[Command]:
            seen.extend(each.usage.cached_tokens for each in events if isinstance(each, Finished) and each.usage)
            return super().step(events)

    for told in (spec, silent):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("warmfront.lab.run.Router", Listening)
            result = run_source(told, Given(ask(0, 0.0, (1, 640)), ask(1, 5.0, (1, 640), (2, 64))), "session", 1.0, 0)
        assert [each.cached_tokens for each in result.outcomes] == [0, 640]
    assert seen == [0, 640, None, None]


def learned_host_load_s(prior_s: float, *, host_token_s: float) -> float:
    """Ask about more documents than the device holds, and tell what the pool learned of its host tier."""
    engine = EngineSpec(H100, count=1, kv_tokens=40_000, host_tokens=400_000, host_token_s=host_token_s)
    spec, agenda = regime(engine).fleet, Agenda()
    fleet, stages = open_fleet(spec, agenda, seed=5), Stages(MonotonicClock())
    router = Router(RouterConfig(policy=PolicyConfig(cost=CostConfig(host_load_s=prior_s))), SimIndex(fleet, stages))
    view = SimView(fleet, agenda, block_size=spec.block_size)
    asked = [ask(key, 2.0 * key, (1 + key % 12, 8000), (100 + key, 200)) for key in range(120)]
    SimPort(fleet, router, Given(*asked), agenda=agenda, view=view, stages=stages).run()
    return router._pools["lab"].fleet.learned.loads.host_s


@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_what_the_host_tier_costs_is_learned_from_first_tokens(factor: float) -> None:
    assert learned_host_load_s(2e-5 * factor, host_token_s=2e-5) == pytest.approx(2e-5, rel=0.25)


@pytest.mark.parametrize("reports_cached", [False, True])
def test_engines_that_cease_to_reuse_are_found_out_before_a_queue_has_formed(reports_cached: bool) -> None:
    """Unnoticed it makes p99 of the first token 2 s meanwhile."""
    fickle = load("fickle-caches")
    fickle = replace(fickle, requests=3000, fleet=replace(fickle.fleet, reports_cached=reports_cached))
    groups = measure(run(fickle, "marginal_cost", 14.0, 1), fickle).groups
    late_s = {name: figures.ttft_p99_s for name, figures in groups.items()}
    assert late_s["while they do not"] is not None
    assert late_s["while they do not"] < 1.2
    assert late_s["once they work again"] is not None
    assert late_s["once they work again"] < 0.5
