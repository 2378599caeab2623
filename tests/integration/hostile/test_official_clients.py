"""The official clients see through the router what they see of an engine: values, errors, retries, cancelling."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, cast

import anthropic
import openai
import pytest
from support.raw_engine import MODEL, SSE_HEAD, RawEngine, Reply, answer, chunk, stream
from support.service import wait_for

from integration.conftest import Serve

from .raw import USER

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
TIMEOUT_S = 20.0
PROMPT: dict[str, Any] = {"model": MODEL, "messages": [USER]}
BRIEF: dict[str, Any] = {**PROMPT, "max_tokens": 8}


@pytest.fixture(scope="module")
def client(router: Serve) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key="k", timeout=TIMEOUT_S, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(router: Serve) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=router.url, api_key="k", timeout=TIMEOUT_S, max_retries=0) as client:
        yield client


def chat_chunk(delta: dict[str, Any], reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    content = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": MODEL, "choices": [choice]}
    return f"data: {json.dumps(content)}\n\n".encode()


CALLS = [
    chat_chunk({"role": "assistant", "content": ""}),
    chat_chunk({"tool_calls": [{"index": 0, "id": "t", "type": "function", "function": {"name": "now"}}]}),
    chat_chunk({"tool_calls": [{"index": 0, "function": {"arguments": '{"zone"'}}]}),
    chat_chunk({"tool_calls": [{"index": 0, "function": {"arguments": ': "é"}'}}]}),
    chat_chunk({}, "tool_calls"),
    b"data: [DONE]\n\n",
]


@pytest.mark.bug(69)
def test_openai_streams_a_tool_call(client: openai.OpenAI, engine: RawEngine) -> None:
    engine.script = lambda _: stream(*CALLS)
    chunks: list[Any] = list(client.chat.completions.create(**PROMPT, tools=cast(Any, [TOOL]), stream=True))
    deltas = [call.function for each in chunks for call in each.choices[0].delta.tool_calls or ()]
    assert "".join(delta.arguments or "" for delta in deltas if delta) == '{"zone": "é"}'
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert json.loads(engine.heard[0].body)["tools"] == [TOOL]


def event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


MESSAGE: dict[str, Any] = {
    "id": "m",
    "type": "message",
    "role": "assistant",
    "model": MODEL,
    "content": [],
    "stop_reason": None,
    "stop_sequence": None,
    "usage": {"input_tokens": 9, "output_tokens": 0},
}


def test_anthropic_streams_a_tool_call(claude: anthropic.Anthropic, engine: RawEngine) -> None:
    block = {"type": "tool_use", "id": "t", "name": "now", "input": {}}
    engine.script = lambda _: stream(
        event("message_start", message=MESSAGE),
        event("ping"),
        event("content_block_start", index=0, content_block=block),
        event("content_block_delta", index=0, delta={"type": "input_json_delta", "partial_json": '{"zone": '}),
        event("content_block_delta", index=0, delta={"type": "input_json_delta", "partial_json": '"é"}'}),
        event("content_block_stop", index=0),
        event("message_delta", delta={"stop_reason": "tool_use"}, usage={"output_tokens": 5}),
        event("message_stop"),
    )
    with claude.messages.stream(**BRIEF, tools=[{"name": "now", "input_schema": {"type": "object"}}]) as streamed:
        made = streamed.get_final_message()
    assert made.stop_reason == "tool_use"
    assert getattr(made.content[0], "input", None) == {"zone": "é"}


def refuse(engine: RawEngine, status: bytes, *headers: bytes) -> None:
    body = b'{"type":"error","error":{"type":"engine_error","message":"from the engine","code":"x1"}}'
    engine.script = lambda _: answer(body, *headers, status=status)


ERRORS = [
    (b"400 Bad Request", "BadRequestError"),
    (b"404 Not Found", "NotFoundError"),
    (b"429 Too Many Requests", "RateLimitError"),
    (b"500 Internal Server Error", "InternalServerError"),
]


@pytest.mark.parametrize(("status", "name"), ERRORS, ids=[name for _, name in ERRORS])
def test_each_client_raises_its_own_error_with_the_engines_words(
    client: openai.OpenAI, claude: anthropic.Anthropic, engine: RawEngine, status: bytes, name: str
) -> None:
    refuse(engine, status, b"retry-after: 7")
    with pytest.raises(getattr(openai, name), match="from the engine") as of_openai:
        client.chat.completions.create(**PROMPT)
    with pytest.raises(getattr(anthropic, name), match="from the engine") as of_anthropic:
        claude.messages.create(**BRIEF)
    for raised in (of_openai, of_anthropic):
        assert raised.value.response.headers["retry-after"] == "7"
    assert len(engine.heard) == 2


def test_each_client_reads_our_own_errors(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    with pytest.raises(openai.NotFoundError, match="nobody") as raised:
        client.chat.completions.create(model="nobody", messages=[{"role": "user", "content": "a"}])
    assert raised.value.code == "model_not_found"
    with pytest.raises(anthropic.NotFoundError, match="nobody"):
        claude.messages.create(model="nobody", max_tokens=1, messages=[{"role": "user", "content": "a"}])


@pytest.mark.bug(54, 55)
def test_each_client_raises_when_the_engine_dies_amid_a_stream(
    client: openai.OpenAI, claude: anthropic.Anthropic, engine: RawEngine
) -> None:
    engine.script = lambda _: Reply([SSE_HEAD, chunk(CALLS[0])], "close")
    with pytest.raises(openai.APIError, match="stopped answering"):
        list(client.chat.completions.create(**PROMPT, stream=True))
    engine.script = lambda _: Reply([SSE_HEAD, chunk(event("message_start", message=MESSAGE))], "close")
    with pytest.raises(anthropic.APIStatusError, match="stopped answering"), claude.messages.stream(**BRIEF) as made:
        made.get_final_message()


@pytest.mark.parametrize("status", [b"429 Too Many Requests", b"503 Service Unavailable", b"500 Oops"])
def test_a_clients_retry_is_exactly_one_more_request(
    client: openai.OpenAI, claude: anthropic.Anthropic, engine: RawEngine, status: bytes
) -> None:
    refuse(engine, status, b"retry-after-ms: 1")
    with pytest.raises(openai.APIStatusError):
        client.with_options(max_retries=1).chat.completions.create(**PROMPT)
    assert len(engine.heard) == 2
    with pytest.raises(anthropic.APIStatusError):
        claude.with_options(max_retries=1).messages.create(**BRIEF)
    assert len(engine.heard) == 4


@pytest.mark.bug(99, 113)
def test_a_request_that_an_engine_took_and_dropped_is_sent_again_by_the_client_alone(
    client: openai.OpenAI, engine: RawEngine
) -> None:
    engine.script = lambda _: Reply([], "close")
    with pytest.raises(openai.APIStatusError) as raised:
        client.chat.completions.create(**PROMPT)
    assert (raised.value.status_code, len(engine.heard)) == (502, 1)


@pytest.mark.bug(101)
@pytest.mark.parametrize("is_stream", [True, False], ids=["streaming", "waiting"])
def test_a_clients_timeout_frees_the_engine(client: openai.OpenAI, engine: RawEngine, *, is_stream: bool) -> None:
    engine.script = lambda _: Reply([], "hang")
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).chat.completions.create(**PROMPT, stream=is_stream)
    wait_for(lambda: engine.closed == 1, "the engine's connection closed", timeout_s=5)
    assert len(engine.heard) == 1


@pytest.mark.bug(10, 101)
def test_closing_a_stream_frees_the_engine(
    client: openai.OpenAI, claude: anthropic.Anthropic, engine: RawEngine
) -> None:
    engine.script = lambda _: Reply([SSE_HEAD, chunk(CALLS[0])], "hang")
    with client.chat.completions.create(**PROMPT, stream=True) as streamed:
        next(iter(streamed))
    wait_for(lambda: engine.closed == 1, "the engine's connection closed", timeout_s=5)
    engine.script = lambda _: Reply([SSE_HEAD, chunk(event("message_start", message=MESSAGE))], "hang")
    with claude.messages.stream(**BRIEF) as events:
        next(iter(events))
    wait_for(lambda: engine.closed == 2, "the engine's connection closed", timeout_s=5)


@pytest.mark.bug(10, 105)
async def test_a_cancelled_task_frees_the_engine(router: Serve, engine: RawEngine) -> None:
    engine.script = lambda _: Reply([], "hang")
    async with openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key="k", max_retries=0) as client:
        task = asyncio.create_task(client.chat.completions.create(**PROMPT))
        await asyncio.to_thread(wait_for, lambda: len(engine.heard) == 1, "the request there", timeout_s=5)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await asyncio.to_thread(wait_for, lambda: engine.closed == 1, "the connection closed", timeout_s=5)
