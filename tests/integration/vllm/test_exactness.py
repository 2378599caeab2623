"""Predictions equal what the engines report, for prompts of many shapes, on both replicas, block by block."""

from __future__ import annotations

import json

import pytest
from support import wire

from .engine import MODEL, Engine
from .mirror import Mirror
from .router import Router
from .shapes import SHAPES, Shape, chat, prose, user
from .test_engines import held_tokens, prompt_tokens

VISITS = 2
"""How often each replica sees each shape."""


@pytest.mark.parametrize("shape", SHAPES, ids=[shape.name for shape in SHAPES])
def test_predicted_cached_tokens_equal_the_reported_ones_on_both_replicas(
    engines: tuple[Engine, Engine], mirrors: tuple[Mirror, Mirror], spreading_router: Router, shape: Shape
) -> None:
    # One engine learns the prompt by another path, which only its events can tell the router.
    warm = wire.post(engines[0].url + shape.path, shape.body)
    assert warm.status == 200, warm.body
    seen: dict[str, int] = {}
    for _ in range(VISITS * len(engines)):
        spreading_router.catch_up(*mirrors)
        answer = wire.post(spreading_router.url + shape.path, shape.body)
        assert answer.status == 200, answer.body
        replica = answer.headers["x-warmfront-replica"]
        seen[replica] = seen.get(replica, 0) + 1
        if shape.has_siblings and seen[replica] == 1:
            continue
        predicted = int(answer.headers["x-warmfront-predicted-cached-tokens"])
        assert (replica, predicted) == (replica, wire.cached_tokens(answer.json()))
    assert sorted(seen.values()) == [VISITS, VISITS]


@pytest.mark.parametrize("shape", [s for s in SHAPES if s.reports_tokens], ids=lambda shape: shape.name)
def test_the_index_holds_the_blocks_that_each_engine_announced(
    engines: tuple[Engine, Engine], mirrors: tuple[Mirror, Mirror], router: Router, shape: Shape
) -> None:
    tokens = prompt_tokens(engines[0], shape)
    router.catch_up(*mirrors)
    explained = router.explain(shape.path, shape.body)
    held = {mirror.url: held_tokens(mirror, shape, tokens) for mirror in mirrors}
    assert {url: wire.at(explained, url, -1) for url in held} == held


def test_a_warm_prompt_goes_to_the_replica_that_holds_it(
    engines: tuple[Engine, Engine], mirrors: tuple[Mirror, Mirror], router: Router
) -> None:
    for number, engine in enumerate([*engines, *engines]):
        shape = chat("warm", [user(prose(f"warm {number}", 2000))])
        prompt_tokens(engine, shape)
        router.catch_up(*mirrors)
        answer = wire.post(router.url + shape.path, shape.body)
        assert wire.at({answer.headers["x-warmfront-replica"]: 1}, engine.url, 0) == 1
        assert wire.cached_tokens(answer.json()) > 2000


def test_the_router_says_itself_that_its_predictions_are_exact(router: Router) -> None:
    for accuracy in router.accuracy():
        assert accuracy["answers"] == accuracy["exact_matches"] > 0
        assert not accuracy["mismatch"]


def test_models_of_the_fleet_are_listed_once(router: Router) -> None:
    listed = [model["id"] for model in json.loads(wire.get(f"{router.url}/v1/models").body)["data"]]
    assert sorted(listed) == sorted([MODEL, "north", "south"])
