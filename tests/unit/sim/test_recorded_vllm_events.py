"""The model against a recording of vLLM 0.32: same requests, same events in the same order."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from support.appearance import Appearance
from warmfront.reference import engine as reference
from warmfront.reference.request import CacheEvent, Cleared, EngineRequest, Removed, Stored
from warmfront.sim.engine import Engine, EngineConfig
from warmfront.sim.hashing import chain_hashes
from warmfront.sim.latency import preset

RECORDING = Path(__file__).parents[2] / "fixtures" / "vllm" / "events_main_int_bs128.jsonl"
CONCURRENT_SCENARIO = "concurrent_preempt"
"""Eight requests at once, more than fit, and a reset while they run; all before come one by one."""
STEPS_BEFORE_RESET = 2
"""Steps after the first one until that reset. Not recorded; any small number gives these events."""
BLOCK_SIZE = 128

AnyEngine = Engine | reference.Engine
Make = Callable[[EngineConfig], AnyEngine]
Plain = tuple[Any, ...]


@pytest.fixture(params=[Engine, reference.Engine], ids=["core", "reference"])
def make(request: pytest.FixtureRequest) -> Make:
    return request.param  # type: ignore[no-any-return]


def test_requests_one_by_one_give_the_events_that_vllm_gave(make: Make) -> None:
    lines = _lines_before_concurrency()
    engine = _engine(make)
    ours = _Renamed()
    for line in lines:
        if line["kind"] == "http":
            ours.extend(_events_of(engine, line["request"], line))
    theirs = _recorded(lines)
    assert len(theirs) == 109
    assert ours.events == theirs


def test_concurrent_requests_with_preemption_and_reset_give_the_events_that_vllm_gave(make: Make) -> None:
    engine = _engine(make)
    ours = _Renamed(with_tokens=False)  # What vLLM answered is only partly in the recording.
    for line in _lines_before_concurrency():
        if line["kind"] == "http":
            ours.extend(_events_of(engine, line["request"], line))
    for number, body in enumerate(_concurrent_bodies()):
        answer = [1_000_000 * (number + 1) + position for position in range(body["max_tokens"])]
        engine.submit(_request(body, body["prompt"], answer))
        if number == 0:
            ours.extend(_plain_of_ours(event) for event in engine.step().events)
    for _ in range(STEPS_BEFORE_RESET):
        ours.extend(_plain_of_ours(event) for event in engine.step().events)
    assert engine.reset(preempt_running=True)
    while engine.has_work:
        ours.extend(_plain_of_ours(event) for event in engine.step().events)
    theirs = _recorded(_lines(), with_tokens=False)
    assert len(theirs) == 213
    assert ours.events == theirs
    assert engine.counters.preemptions > 7


def test_reported_cached_tokens_are_those_of_vllm(make: Make) -> None:
    engine = _engine(make)
    for line in _lines_before_concurrency():
        if line["kind"] != "http" or _reset_if_asked(engine, line):
            continue
        sequences = _submit(engine, line["request"]["body"], _sampled(line))
        while engine.has_work:
            engine.step()
        assert sequences[-1].cached_tokens == line["usage"]["prompt_tokens_details"]["cached_tokens"], line["scenario"]


def _engine(make: Make) -> AnyEngine:
    return make(
        EngineConfig(
            latency=preset("demo").latency,
            blocks=40,
            block_size=BLOCK_SIZE,
            max_model_tokens=4096,
            max_batched_tokens=2048,
            max_sequences=128,
        )
    )


class _Renamed:
    """Events with hashes replaced by the number of their first appearance."""

    def __init__(self, *, with_tokens: bool = True) -> None:
        self.events: list[Plain] = []
        self._hashes = Appearance()
        self._with_tokens = with_tokens

    def extend(self, events: Iterable[Plain]) -> None:
        for kind, hashes, parent, tokens in events:
            blocks = tuple(self._hashes.number(hash_) for hash_ in hashes)
            self.events.append(
                (kind, blocks, self._hashes.number(parent), tokens if self._with_tokens else len(tokens))
            )


def _recorded(lines: Iterable[dict[str, Any]], *, with_tokens: bool = True) -> list[Plain]:
    theirs = _Renamed(with_tokens=with_tokens)
    for line in lines:
        if line["kind"] == "frame":
            theirs.extend(_plain(event) for event in line["decoded"][1] if not _is_report(line, event))
    return theirs.events


@cache
def _lines() -> list[dict[str, Any]]:
    with RECORDING.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _lines_before_concurrency() -> list[dict[str, Any]]:
    return list(takewhile(lambda line: line.get("scenario") != CONCURRENT_SCENARIO, _lines()))


def _concurrent_bodies() -> list[dict[str, Any]]:
    """Bodies in the order in which their first blocks were stored, which is the order of their answers."""
    lines = [line for line in _lines() if line["kind"] == "http" and line["scenario"] == CONCURRENT_SCENARIO]
    return [line["request"]["body"] for line in lines if line["request"].get("body")]


def _is_report(line: dict[str, Any], event: dict[str, Any]) -> bool:
    """Whether an event is a hit report of the full report mode: it looks like a store and changes nothing."""
    sequence = int(line["seq_hex"], 16)
    return sequence in {1, 3} and event["type"] == "BlockStored" and event["parent_block_hash"] is None


def _plain(event: dict[str, Any]) -> Plain:
    if event["type"] == "BlockStored":
        return "stored", event["block_hashes"], event["parent_block_hash"], tuple(event["token_ids"])
    if event["type"] == "BlockRemoved":
        return "removed", event["block_hashes"], None, ()
    return "cleared", (), None, ()


def _plain_of_ours(event: CacheEvent) -> Plain:
    if isinstance(event, Stored):
        assert event.request.tokens is not None
        start = event.first * BLOCK_SIZE
        tokens = event.request.tokens[start : start + event.count * BLOCK_SIZE]
        return "stored", event.hashes, event.parent, tuple(tokens)
    if isinstance(event, Removed):
        return "removed", (event.hash,), None, ()
    assert isinstance(event, Cleared)
    return "cleared", (), None, ()


def _events_of(engine: AnyEngine, request: dict[str, Any], line: dict[str, Any]) -> list[Plain]:
    if _reset_if_asked(engine, line):
        return []
    _submit(engine, request["body"], _sampled(line))
    events: list[CacheEvent] = []
    while engine.has_work:
        events += engine.step().events
    return [_plain_of_ours(event) for event in events]


def _reset_if_asked(engine: AnyEngine, line: dict[str, Any]) -> bool:
    if line["request"]["path"] != "/reset_prefix_cache":
        return False
    assert engine.reset()
    return True


def _sampled(line: dict[str, Any]) -> list[int]:
    """Tokens that vLLM sampled where they completed a block; elsewhere no event holds them."""
    if line["scenario"] != "decode_fills_block":
        return []
    prompt = line["request"]["body"]["prompt"]
    for other in _lines_before_concurrency():
        if other["kind"] == "frame":
            for event in other["decoded"][1]:
                if event.get("token_ids", [])[: len(prompt)] == prompt:
                    return list(event["token_ids"][len(prompt) :])
    raise AssertionError("the recording has no such block")


def _submit(engine: AnyEngine, body: dict[str, Any], sampled: list[int]) -> list[Any]:
    prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
    answer = (sampled + [0] * body["max_tokens"])[: body["max_tokens"]]
    return [engine.submit(_request(body, prompt, answer)) for prompt in prompts for _ in range(body.get("n", 1))]


def _request(body: dict[str, Any], prompt: list[int], answer: list[int]) -> EngineRequest:
    tokens = prompt + answer
    adapter = body["model"] if body["model"].startswith("adapter") else None
    salt = body.get("cache_salt")
    return EngineRequest(
        id="r",
        prompt_tokens=len(prompt),
        output_tokens=len(answer),
        hashes=chain_hashes(tokens, block_size=BLOCK_SIZE, adapter=adapter, cache_salt=salt),
        tokens=tokens,
        adapter=adapter,
        cache_salt=salt,
        reads_cache=body.get("prompt_logprobs") is None,
    )
