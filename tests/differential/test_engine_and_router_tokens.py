"""The engine server's plain Python against the router's Rust: same bodies, same tokens, for all four APIs."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from warmfront import core
from warmfront.sim.server.app import DIALECTS
from warmfront.sim.tokens import MODEL_DIRECTORY, BuiltinTokenizer
from warmfront.sim.words import WORDS

ODD = ["é", "日本", "½", "\n", "\t", "  ", "\u00a0", "<|im_end|>", "<|im_start|>", "123", '"x', "😀", "\r\n", "_"]
CASES = 100


@pytest.mark.parametrize("path", sorted(DIALECTS))
def test_both_sides_compute_the_same_tokens(path: str) -> None:
    router, engine = core.Tokenizer(str(MODEL_DIRECTORY), "{}"), BuiltinTokenizer()
    for seed in range(CASES):
        body = BODIES[path](Random(seed))
        ours = DIALECTS[path].prompts(body, engine)
        assert router.prompt(path, json.dumps(body).encode()) == ours, f"seed {seed}: {body}"


def _text(random: Random) -> str:
    parts = [random.choice([random.choice(WORDS), " " + random.choice(WORDS), random.choice(ODD)]) for _ in range(30)]
    return "".join(parts)


def _content(random: Random) -> object:
    if random.random() < 0.7:
        return _text(random)
    return [{"type": "text", "text": _text(random)} for _ in range(random.randint(1, 3))]


def _turns(random: Random) -> list[dict[str, Any]]:
    roles = ["user", "assistant"] * random.randint(0, 2) + ["user"]
    return [{"role": role, "content": _content(random)} for role in roles]


def _chat(random: Random) -> dict[str, Any]:
    turns = _turns(random)
    for role in ("system", "developer"):
        if random.random() < 0.4:
            turns.insert(random.randint(0, len(turns)), {"role": role, "content": _content(random)})
    body: dict[str, Any] = {"messages": turns}
    if random.random() < 0.2:
        body["add_generation_prompt"] = False
    return body


def _completion(random: Random) -> dict[str, Any]:
    tokens = [random.randrange(3000) for _ in range(20)]
    return {"prompt": random.choice([_text(random), [_text(random), _text(random)], tokens, [tokens, tokens[:5]]])}


def _response(random: Random) -> dict[str, Any]:
    body: dict[str, Any] = {"input": _text(random) if random.random() < 0.5 else [{"role": "user", "content": "a"}]}
    if random.random() < 0.5:
        body["instructions"] = _text(random)
    return body


def _message(random: Random) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": _turns(random), "max_tokens": 8}
    if random.random() < 0.7:
        body["system"] = _content(random)
    return body


BODIES = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
    "/v1/responses": _response,
    "/v1/messages": _message,
}
