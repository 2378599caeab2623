"""The index follows an engine that evicts, dies and comes back. The restart comes last: it takes a minute."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from support import wire
from support.service import wait_for

from .engine import BLOCK_SIZE, MODEL, Engine
from .mirror import Mirror
from .router import Router
from .shapes import CHAT, COMPLETIONS, prose, token_ids, user

PROMPTS = 10
PROMPT_TOKENS = 9 * BLOCK_SIZE + 20
"""Ten such prompts need 90 blocks or more, the engine has 39."""
SHARED_TOKENS = 4 * BLOCK_SIZE
VISITS, VISITS_A_ROUND = 40, 10
RECOVERY_TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def mirror(small_engine: Engine) -> Mirror:
    return Mirror(small_engine)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Pairs of prompts begin alike."""
    return [
        token_ids(f"head {number // 2}", SHARED_TOKENS) + token_ids(f"tail {number}", PROMPT_TOKENS - SHARED_TOKENS)
        for number in range(PROMPTS)
    ]


def completion(tokens: list[int]) -> dict[str, Any]:
    return {"model": MODEL, "prompt": tokens, "max_tokens": 2}


def visit(router: Router, mirror: Mirror, tokens: list[int]) -> tuple[int, int]:
    """Send a prompt; return predicted and reported cached tokens."""
    router.catch_up(mirror)
    answer = wire.post(router.url + COMPLETIONS, completion(tokens))
    assert answer.status == 200, answer.body
    return int(answer.headers["x-warmfront-predicted-cached-tokens"]), wire.cached_tokens(answer.json())


def index_equals_engine(router: Router, mirror: Mirror, prompts: list[list[int]]) -> int:
    """Compare every prompt's depth in the index with the engine's events; return the sum."""
    router.catch_up(mirror)
    held = [mirror.depth(tokens) for tokens in prompts]
    explained = [router.explain(COMPLETIONS, completion(tokens)) for tokens in prompts]
    assert [wire.at(row, mirror.url, -1) for row in explained] == held
    return sum(held)


def test_predictions_stay_right_while_the_engine_evicts(
    small_router: Router, mirror: Mirror, prompts: list[list[int]]
) -> None:
    reported = []
    order = random.Random(7).choices(prompts, k=VISITS)
    for start in range(0, VISITS, VISITS_A_ROUND):
        for tokens in order[start : start + VISITS_A_ROUND]:
            predicted, cached = visit(small_router, mirror, tokens)
            assert predicted == cached
            reported.append(cached)
        index_equals_engine(small_router, mirror, prompts)
    depths = set(reported[VISITS // 2 :])
    assert {0, SHARED_TOKENS} < depths, f"too few kinds of hits to prove anything: {depths}"


def test_a_killed_engine_ends_its_stream_with_an_error_and_is_forgotten(
    small_engine: Engine, small_router: Router, mirror: Mirror, prompts: list[list[int]]
) -> None:
    visit(small_router, mirror, prompts[0])
    assert index_equals_engine(small_router, mirror, prompts) > 0
    events = list(events_of_a_stream_whose_engine_dies(small_engine, small_router))
    assert b"[DONE]" not in b"".join(events)
    assert "error" in json.loads(events[-1].removeprefix(b"data: "))

    wait_for(lambda: not small_router.is_healthy(), "not ready without its only engine", timeout_s=RECOVERY_TIMEOUT_S)
    small_engine.start()
    small_engine.wait()
    mirror.forget()
    wait_for(small_router.is_healthy, "ready with the engine back", timeout_s=RECOVERY_TIMEOUT_S)
    wait_for(lambda: knows_nothing(small_router, mirror, prompts), "an empty index", timeout_s=RECOVERY_TIMEOUT_S)
    for number, tokens in enumerate(prompts[:3]):
        found = SHARED_TOKENS if number % 2 else 0
        assert visit(small_router, mirror, tokens) == (found, found)
    for tokens in prompts[:3]:
        predicted, cached = visit(small_router, mirror, tokens)
        assert predicted == cached > 0
    index_equals_engine(small_router, mirror, prompts)


def knows_nothing(router: Router, mirror: Mirror, prompts: list[list[int]]) -> bool:
    return all(wire.at(router.explain(COMPLETIONS, completion(tokens)), mirror.url, -1) == 0 for tokens in prompts)


def events_of_a_stream_whose_engine_dies(engine: Engine, router: Router) -> Iterator[bytes]:
    """Kill the engine after a stream's first bytes; yield the stream's events."""
    body = {"model": MODEL, "messages": [user(prose("dying"))], "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with closing(wire.connect(router.url)) as connection:
        connection.request("POST", CHAT, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        content = response.read(64)
        engine.kill()
        content += response.read()
    yield from filter(None, content.split(b"\n\n"))
