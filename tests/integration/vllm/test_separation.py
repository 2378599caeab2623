"""Adapters and salts never share a cache, in the engine or in the prediction."""

from __future__ import annotations

from typing import Any

from support import wire

from .engine import ADAPTERS, MODEL, Engine
from .mirror import Mirror
from .router import Router
from .shapes import CHAT, prose, user


def visit(router: Router, mirrors: tuple[Mirror, Mirror], body: dict[str, Any]) -> int:
    """Send a chat, check the prediction against the report, and return the cached tokens."""
    router.catch_up(*mirrors)
    answer = wire.post(router.url + CHAT, {"max_tokens": 4, **body})
    assert answer.status == 200, answer.body
    cached = wire.cached_tokens(answer.json())
    assert int(answer.headers["x-warmfront-predicted-cached-tokens"]) == cached
    return cached


def test_the_same_prompt_is_cold_for_every_other_adapter(router: Router, mirrors: tuple[Mirror, Mirror]) -> None:
    messages = [user(prose("shared between adapters"))]
    for model in (MODEL, *ADAPTERS):
        assert visit(router, mirrors, {"model": model, "messages": messages}) == 0
        assert visit(router, mirrors, {"model": model, "messages": messages}) > 0


def test_the_same_prompt_is_cold_under_every_other_salt(router: Router, mirrors: tuple[Mirror, Mirror]) -> None:
    messages = [user(prose("shared between salts"))]
    for salt in ({}, {"cache_salt": "pepper"}, {"cache_salt": "cumin"}):
        assert visit(router, mirrors, {"model": MODEL, "messages": messages, **salt}) == 0
        assert visit(router, mirrors, {"model": MODEL, "messages": messages, **salt}) > 0


def test_an_adapter_and_a_salt_together_are_a_cache_of_their_own(
    router: Router, mirrors: tuple[Mirror, Mirror], engines: tuple[Engine, Engine]
) -> None:
    messages = [user(prose("adapter and salt"))]
    variants: list[dict[str, Any]] = [
        {"model": model, **salt} for model in (MODEL, "north") for salt in ({}, {"cache_salt": "pepper"})
    ]
    assert [visit(router, mirrors, {**variant, "messages": messages}) for variant in variants] == [0, 0, 0, 0]
    assert all(visit(router, mirrors, {**variant, "messages": messages}) > 0 for variant in variants)
