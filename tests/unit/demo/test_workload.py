from __future__ import annotations

from dataclasses import replace

from warmfront.demo.workload import MIX, plan
from warmfront.sim.latency import PRESETS
from warmfront.sim.tokens import BuiltinTokenizer


def test_the_same_seed_plans_the_same_conversations() -> None:
    assert plan(MIX, seconds=5, seed=4) == plan(MIX, seconds=5, seed=4)
    assert plan(MIX, seconds=5, seed=4) != plan(MIX, seconds=5, seed=5)


def test_conversations_start_in_order_and_within_the_phase() -> None:
    starts = [conversation.start_s for conversation in plan(MIX, seconds=20, seed=1)]
    assert starts == sorted(starts)
    assert starts[0] > 0
    assert starts[-1] < 20
    assert 0.7 < len(starts) / (20 * MIX.rate) < 1.3


def test_the_mix_has_every_kind() -> None:
    planned = plan(replace(MIX, rate=50), seconds=20, seed=1)
    shares = {kind: sum(c.kind == kind for c in planned) / len(planned) for kind in ("question", "chat", "one-off")}
    assert abs(shares["chat"] - MIX.chat_share) < 0.05
    assert abs(shares["one-off"] - MIX.one_off_share) < 0.05
    assert all((c.system is None) == (c.kind == "one-off") for c in planned)
    assert all(len(c.turns) == (MIX.chat_turns if c.kind == "chat" else 1) for c in planned)


def test_one_engine_cannot_hold_every_system_prompt_but_the_fleet_can() -> None:
    tokenizer = BuiltinTokenizer()
    systems = {c.system for c in plan(replace(MIX, rate=100), seconds=20, seed=1) if c.system is not None}
    assert len(systems) == MIX.assistants
    tokens = sum(len(tokenizer.encode(system)) for system in systems)
    assert 1.5 * PRESETS["demo"].kv_tokens < tokens < 2.5 * PRESETS["demo"].kv_tokens
