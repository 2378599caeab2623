"""One request at a time, on real processes and on virtual time: the caches hold the same tokens after each."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import wire
from warmfront.demo.workload import MIX, Conversation, plan
from warmfront.lab.model import EngineSpec, FleetSpec, Regime, Slo
from warmfront.lab.run import run_source

from .conftest import EmbeddedEngine, Serve, Start

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ENGINES = 2
SPEED = 4.0
SPACING_S = 1000.0
"""Between conversations on virtual time: each ends long before the next begins."""


@pytest.fixture
def checks() -> Iterator[Any]:
    sys.path.insert(0, str(BENCHMARKS))
    from lab_checks import processes

    yield processes
    sys.path.remove(str(BENCHMARKS))


def conversations() -> list[Conversation]:
    """Return a few long system prompts in turn, more than two caches hold, and conversations of several turns."""
    mix = replace(MIX, assistants=20, system_words=1400, answer_tokens_min=3, answer_tokens_max=24, pause_s=0.0)
    planned = plan(mix, seconds=4.0, seed=3)
    return [replace(each, start_s=SPACING_S * number) for number, each in enumerate(planned)]


def cached_over_http(url: str, planned: list[Conversation]) -> list[tuple[int, int]]:
    """Return prompt and cached tokens of every turn, asked one after the other."""
    seen = []
    for conversation in planned:
        messages = [] if conversation.system is None else [{"role": "system", "content": conversation.system}]
        for turn, tokens in zip(conversation.turns, conversation.answer_tokens, strict=True):
            messages.append({"role": "user", "content": turn})
            answer = wire.post(
                f"{url}/v1/chat/completions", {"messages": messages, "max_tokens": tokens, "ignore_eos": True}
            )
            assert answer.status == 200, answer.body
            usage = answer.json()["usage"]
            seen.append((usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]))
            messages.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]})
    return seen


def test_every_request_finds_as_many_cached_tokens_as_on_virtual_time(
    tmp_path: Path, start: Start, checks: Any
) -> None:
    engines = [start(EmbeddedEngine(tmp_path / f"engine-{number}.log")) for number in range(ENGINES)]
    serve = start(Serve(tmp_path / "serve.log", engines, "router.policy.name=round_robin"))
    planned = conversations()

    real = cached_over_http(serve.url, planned)

    regime = Regime(
        name="sequential",
        title="",
        expects="",
        workload={},
        fleet=FleetSpec((EngineSpec("demo", count=ENGINES, speed=SPEED),), block_size=16),
        slo=Slo(ttft_s=1.0),
        loads=(1.0,),
    )
    result = run_source(regime, checks.Conversations(planned), "round_robin", 1.0, 1)
    virtual = [(outcome.prompt_tokens, outcome.cached_tokens) for outcome in result.outcomes]
    assert virtual == real
    assert sum(tokens for tokens, _ in real) > ENGINES * 24_576, "the caches had to evict"
    assert 0.1 < sum(cached for _, cached in real) / sum(tokens for tokens, _ in real) < 0.9
