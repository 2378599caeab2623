"""The demo's load client against an engine server: what it measures is what the engine says."""

from __future__ import annotations

from dataclasses import replace

from warmfront.clock import MonotonicClock
from warmfront.demo.load import Progress, run_load
from warmfront.demo.report import summarise
from warmfront.demo.workload import MIX, plan
from warmfront.sim.engine import EngineConfig
from warmfront.sim.latency import preset
from warmfront.sim.server.app import ServedModel, ServerOptions
from warmfront.sim.server.service import Service, running

SERVICE = Service(
    engine=EngineConfig(latency=preset("demo", speed=20.0).latency, blocks=3000, max_batched_tokens=1024),
    model=ServedModel(("demo",), {}),
    options=ServerOptions(),
    port=0,
)
MIX_SHORT = replace(MIX, rate=20.0, assistants=3, system_words=200, one_off_words=100, pause_s=0.01)


async def test_every_turn_is_answered_and_later_turns_hit() -> None:
    conversations = plan(MIX_SHORT, seconds=1.0, seed=2)
    turns = sum(len(conversation.turns) for conversation in conversations)
    progress = Progress(planned=turns)
    async with running(SERVICE) as (url, server):
        await run_load([url], model="demo", conversations=conversations, progress=progress, clock=MonotonicClock())
        reported = server.runner.engine.counters
    assert progress.errors == []
    assert len(progress.outcomes) == turns
    assert progress.in_flight == 0
    assert sum(outcome.prompt_tokens for outcome in progress.outcomes) == reported.prompt_tokens
    assert sum(outcome.cached_tokens for outcome in progress.outcomes) == reported.hit_tokens
    assert summarise(progress).hit_rate > 0.5


async def test_a_failure_ends_its_conversation_and_is_listed() -> None:
    conversations = plan(MIX_SHORT, seconds=0.3, seed=2)
    progress = Progress(planned=1)
    async with running(SERVICE) as (url, _server):
        await run_load([url], model="nope", conversations=conversations, progress=progress, clock=MonotonicClock())
    assert len(progress.errors) == len(conversations)
    assert all("status 404" in error for error in progress.errors)
