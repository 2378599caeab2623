"""What passes through: streams and errors byte for byte, and the client's leaving."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from support import wire
from support.service import wait_for

from .engine import MODEL, Engine
from .recorder import Recorder, recording
from .router import Router
from .shapes import CHAT, COMPLETIONS, MESSAGES, RESPONSES, prose, user

ABORT_TIMEOUT_S = 1.0
LONG_TOKENS = 8000
"""Output long enough that an engine is at work on it for the whole test."""

STREAMS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [user(prose("stream"))], "max_tokens": 24, "stream_options": {"include_usage": True}},
    COMPLETIONS: {"prompt": prose("text stream"), "max_tokens": 24},
    RESPONSES: {"input": prose("response stream"), "max_output_tokens": 24},
    MESSAGES: {"messages": [user(prose("message stream"))], "max_tokens": 24},
}


@pytest.fixture(scope="module")
def recorder(engines: tuple[Engine, Engine]) -> Iterator[Recorder]:
    with recording(engines[0].port) as running:
        yield running


@pytest.fixture(scope="module")
def recorded_router(recorder: Recorder, start_router: Callable[..., Router]) -> Router:
    """A router whose only engine is seen through the recorder."""
    return start_router([recorder.url])


@pytest.mark.parametrize("path", STREAMS)
def test_a_stream_arrives_as_the_engine_sent_it(recorder: Recorder, recorded_router: Router, path: str) -> None:
    answer = wire.post(recorded_router.url + path, {"model": MODEL, "stream": True, **STREAMS[path]})
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.body.split(b"\n\n")
    assert events.pop() == b""
    assert len(events) > 3
    wire_events = [event + b"\n\n" for event in events]
    assert recorder.holds(wire_events[0])
    assert unchunked(recorder, answer.body), "the body differs from what the engine sent"


def test_usage_at_the_end_of_a_stream_is_compared_with_the_prediction(recorded_router: Router) -> None:
    body = {"model": MODEL, "stream": True, **STREAMS[CHAT]}
    for _ in range(2):
        answer = wire.post(recorded_router.url + CHAT, body)
    usage = next(json.loads(line[6:]) for line in answer.body.splitlines()[::-1] if b'"usage":{' in line)
    assert wire.cached_tokens(usage) == int(answer.headers["x-warmfront-predicted-cached-tokens"]) > 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"model": MODEL, "messages": []}),
        (CHAT, {"model": MODEL, "messages": [user("Hello.")], "temperature": "warm"}),
        (CHAT, {"model": MODEL, "messages": [user(prose("too long", 20000))]}),
        (COMPLETIONS, {"model": MODEL, "prompt": [[10**9]]}),
        (COMPLETIONS, {"model": MODEL, "prompt": "a", "max_tokens": -1}),
        (MESSAGES, {"model": MODEL, "messages": [user("Hello.")]}),
        ("/v1/embeddings", {"model": MODEL, "input": "a"}),
        ("/score", {"model": MODEL, "text_1": "a", "text_2": "b"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_engines_error_passes_unchanged(
    engines: tuple[Engine, Engine], router: Router, path: str, body: dict[str, Any]
) -> None:
    direct = wire.post(engines[0].url + path, body)
    routed = wire.post(router.url + path, body)
    assert direct.status in {400, 404}
    assert (routed.status, routed.body) == (direct.status, direct.body)
    assert routed.headers["content-type"] == direct.headers["content-type"]


def test_an_unknown_model_is_answered_as_openai_does(router: Router) -> None:
    answer = wire.post(router.url + CHAT, {"model": "nobody", "messages": [user("Hello.")]})
    assert answer.status == 404
    assert answer.json()["error"]["code"] == "model_not_found"


def test_tokenize_and_detokenize_pass(router: Router) -> None:
    tokens = wire.post(f"{router.url}/tokenize", {"model": MODEL, "prompt": "Hello."}).json()["tokens"]
    assert wire.post(f"{router.url}/detokenize", {"model": MODEL, "tokens": tokens}).json()["prompt"].endswith("Hello.")


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "waiting"])
def test_an_engine_stops_working_when_the_client_leaves(
    engines: tuple[Engine, Engine], router: Router, *, stream: bool
) -> None:
    wait_for(lambda: is_idle(engines), "idle engines", timeout_s=30)
    body = {"model": MODEL, "messages": [user(prose("leave"))], "max_tokens": LONG_TOKENS, "ignore_eos": True}
    with closing(wire.connect(router.url)) as connection:
        send(connection, CHAT, {**body, "stream": stream})
        if stream:
            response = connection.getresponse()
            assert response.read(64)
        wait_for(lambda: not is_idle(engines), "an engine at work", timeout_s=10)
    wait_for(lambda: is_idle(engines), "idle engines after the client left", timeout_s=ABORT_TIMEOUT_S)


def send(connection: http.client.HTTPConnection, path: str, body: dict[str, Any]) -> None:
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})


def is_idle(engines: tuple[Engine, ...]) -> bool:
    return sum(engine.running() for engine in engines) == 0


def unchunked(recorder: Recorder, body: bytes) -> bool:
    """Tell whether some recorded answer has exactly this body once its chunk framing is taken away."""
    for record in recorder.sent:
        for head_and_rest in bytes(record).split(b"HTTP/1.1 200 OK\r\n")[1:]:
            chunks = head_and_rest.partition(b"\r\n\r\n")[2]
            if _joined(chunks) == body:
                return True
    return False


def _joined(chunks: bytes) -> bytes:
    content = b""
    while chunks:
        size, _, rest = chunks.partition(b"\r\n")
        length = int(size, 16) if size and all(digit in b"0123456789abcdefABCDEF" for digit in size) else 0
        if length == 0:
            break
        content, chunks = content + rest[:length], rest[length + 2 :]
    return content
