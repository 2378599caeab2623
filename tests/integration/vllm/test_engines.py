"""The harness itself, without a router: what an engine's events promise is what the engine then reports."""

from __future__ import annotations

import pytest
from support import wire

from .engine import BLOCK_SIZE, MODEL, Engine
from .mirror import Mirror
from .shapes import SHAPES, Shape

TOKENS = [shape for shape in SHAPES if shape.reports_tokens]


@pytest.mark.parametrize("shape", TOKENS, ids=[shape.name for shape in TOKENS])
def test_an_engine_reports_the_blocks_that_its_events_announced(
    engines: tuple[Engine, Engine], mirrors: tuple[Mirror, Mirror], shape: Shape
) -> None:
    tokens = prompt_tokens(engines[0], shape)
    mirrors[0].refresh()
    held = held_tokens(mirrors[0], shape, tokens)
    again = wire.post(engines[0].url + shape.path, shape.body)
    skips_cache = "prompt_logprobs" in shape.body
    assert held == len(tokens) // BLOCK_SIZE * BLOCK_SIZE
    assert wire.cached_tokens(again.json()) == (
        0 if skips_cache else min(held, (len(tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE)
    )


def prompt_tokens(engine: Engine, shape: Shape) -> list[int]:
    """Send a shape straight to an engine, which leaves it warm, and return the ids of its first prompt."""
    answer = wire.post(engine.url + shape.path, {**shape.body, "return_token_ids": True})
    assert answer.status == 200, answer.body
    content = answer.json()
    return list(content.get("prompt_token_ids") or content["choices"][0]["prompt_token_ids"])


def held_tokens(mirror: Mirror, shape: Shape, tokens: list[int]) -> int:
    """Count the leading tokens of a shape that the mirror holds."""
    model = shape.body["model"]
    return mirror.depth(tokens, adapter=None if model == MODEL else model, salt=shape.body.get("cache_salt"))
