"""The engine model against a live vLLM with a small cache: same requests, same events in the same order.

The server may have served others before. Two prompts that fill the whole cache, one after the other, bring any vLLM
into the state that they bring a new model into, whatever came before; events count from there.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec
import pytest
import zmq
from support import wire
from support.appearance import Appearance
from warmfront.reference.request import CacheEvent, Cleared, EngineRequest, Removed, Stored
from warmfront.sim.engine import Engine as Model
from warmfront.sim.engine import EngineConfig
from warmfront.sim.hashing import chain_hashes
from warmfront.sim.latency import preset

from .conftest import SMALL_BLOCKS
from .engine import BLOCK_SIZE, MODEL, Engine
from .mirror import END, REPLY_TIMEOUT_MS
from .shapes import COMPLETIONS, token_ids

FILLING_TOKENS = (SMALL_BLOCKS - 2) * BLOCK_SIZE - 4
"""The longest prompt that leaves room for two tokens of answer."""
SHARED_TOKENS = 4 * BLOCK_SIZE
VISITS = 40
LONG_ANSWER_TOKENS = BLOCK_SIZE + 20
"""Fills a block by decoding."""


class Visit(NamedTuple):
    """One request. Equal prompts have short answers: only whole blocks of answers are compared, and those never are."""

    prompt: list[int]
    answer_tokens: int


class Seen(NamedTuple):
    """An event, hashes renamed by order of appearance."""

    kind: str
    blocks: tuple[int | None, ...]
    parent: int | None
    tokens: int


@pytest.fixture(scope="module")
def visits() -> list[Visit]:
    rng = random.Random(11)
    lengths = [rng.randrange(5 * BLOCK_SIZE, 14 * BLOCK_SIZE) for _ in range(8)]
    lengths[0] = 8 * BLOCK_SIZE  # an exact multiple: one block less is found than is held
    prompts = [
        token_ids(f"model head {number // 3}", SHARED_TOKENS)
        + token_ids(f"model tail {number}", length - SHARED_TOKENS)
        for number, length in enumerate(lengths)
    ]
    filling = [Visit(token_ids(f"model filling {number}", FILLING_TOKENS), 2) for number in range(2)]
    mixed = [
        Visit(token_ids(f"model once {number}", 3 * BLOCK_SIZE + number), LONG_ANSWER_TOKENS)
        if rng.random() < 0.2
        else Visit(rng.choice(prompts), 2)
        for number in range(VISITS)
    ]
    return filling + mixed


def test_a_live_engine_stores_and_removes_what_the_model_does(small_engine: Engine, visits: list[Visit]) -> None:
    model = Model(
        EngineConfig(
            latency=preset("demo").latency,
            blocks=SMALL_BLOCKS,
            block_size=BLOCK_SIZE,
            max_model_tokens=(SMALL_BLOCKS - 2) * BLOCK_SIZE,
        )
    )
    theirs, ours = Renamed(), Renamed()
    sequence = len(list(replayed(small_engine, 0)))
    for number, visit in enumerate(visits):
        reported = ask(small_engine, visit)
        batches = list(replayed(small_engine, sequence))
        sequence += len(batches)
        found, events = drive(model, visit, number)
        if number < 2:
            continue
        assert reported == found, f"cached tokens of visit {number}"
        expected = [ours.seen(*plain(event)) for event in events]
        got = [theirs.seen(*decoded(event)) for batch in batches for event in batch]
        assert got == expected, f"events of visit {number}"
    kinds = {kind for kind, *_ in theirs.all}
    assert kinds == {"stored", "removed"}
    assert len(theirs.all) > 2 * VISITS, "too few events to prove anything"


class Renamed:
    """Hashes by the number of their first appearance: each side has hashes of its own."""

    def __init__(self) -> None:
        self.all: list[Seen] = []
        self._hashes = Appearance()

    def seen(self, kind: str, hashes: Iterable[Any], parent: Any, tokens: int) -> Seen:
        blocks = tuple(self._hashes.number(hash_) for hash_ in hashes)
        self.all.append(Seen(kind, blocks, self._hashes.number(parent), tokens))
        return self.all[-1]


def ask(engine: Engine, visit: Visit) -> int:
    """Send one request to the server; return the cached tokens that it reports."""
    body = {"model": MODEL, "prompt": visit.prompt, "max_tokens": visit.answer_tokens, "ignore_eos": True}
    answer = wire.post(engine.url + COMPLETIONS, body)
    assert answer.status == 200, answer.body
    return wire.cached_tokens(answer.json())


def drive(model: Model, visit: Visit, number: int) -> tuple[int, list[CacheEvent]]:
    """Run one request through the model; return its cached tokens and the events."""
    # What vLLM samples is not known; a block of an answer only has to be unlike all others.
    tokens = visit.prompt + [2_000_000_000 + number] * visit.answer_tokens
    hashes = chain_hashes(tokens, block_size=BLOCK_SIZE)
    request = EngineRequest(str(number), len(visit.prompt), visit.answer_tokens, hashes, tokens)
    sequence = model.submit(request)
    events: list[CacheEvent] = []
    while model.has_work:
        events += model.step().events
    assert sequence.cached_tokens is not None
    return sequence.cached_tokens, events


def replayed(engine: Engine, start: int) -> Iterator[list[dict[str, Any]]]:
    """Yield the batches of events that the engine published from a sequence number on."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.RCVTIMEO, REPLY_TIMEOUT_MS)
        socket.connect(f"tcp://127.0.0.1:{engine.replay_port}")
        socket.send_multipart([b"", start.to_bytes(8, "big")])
        while (frames := socket.recv_multipart())[-2] != END:
            yield msgspec.msgpack.decode(frames[-1])[1]


def decoded(event: dict[str, Any]) -> tuple[str, list[Any], Any, int]:
    if event["type"] == "BlockStored":
        return "stored", event["block_hashes"], event["parent_block_hash"], len(event["token_ids"])
    if event["type"] == "BlockRemoved":
        return "removed", event["block_hashes"], None, 0
    return "cleared", [], None, 0


def plain(event: CacheEvent) -> tuple[str, list[Any], Any, int]:
    if isinstance(event, Stored):
        return "stored", list(event.hashes), event.parent, event.count * BLOCK_SIZE
    if isinstance(event, Removed):
        return "removed", [event.hash], None, 0
    assert isinstance(event, Cleared)
    return "cleared", [], None, 0
