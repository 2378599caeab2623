"""The engine server over loopback, as a router and the official clients see it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import anthropic
import msgspec
import openai
import pytest
import zmq
import zmq.asyncio
from warmfront.sim.engine import EngineConfig
from warmfront.sim.latency import preset
from warmfront.sim.server.app import EngineServer, ServedModel, ServerOptions
from warmfront.sim.server.publisher import END_OF_REPLAY, PublisherConfig
from warmfront.sim.server.service import Service, running

DEADLINE_S = 10.0
SERVICE = Service(
    engine=EngineConfig(
        latency=preset("demo", speed=20.0).latency,
        blocks=257,
        max_model_tokens=2048,
        max_batched_tokens=512,
        max_sequences=64,
    ),
    model=ServedModel(("sim", "alias"), {"adapter": "adapters/a"}),
    options=ServerOptions(),
    port=0,
    events=PublisherConfig("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", topic="kv", buffer_steps=100),
)
LONG = "the careful cat reads every word of a long story about a harbor in winter. " * 10


class World:
    """A running server and a session to talk to it."""

    def __init__(self, url: str, server: EngineServer, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.server = server
        self._session = session

    async def post(self, path: str, body: object, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        async with self._session.post(self.url + path, json=body, headers=headers) as response:
            return response.status, await response.json(content_type=None)

    async def get(self, path: str) -> str:
        async with self._session.get(self.url + path) as response:
            assert response.status == 200
            return await response.text()

    async def stream(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> list[str]:
        async with self._session.post(self.url + path, json=body | {"stream": True}, headers=headers) as response:
            assert response.status == 200
            text = (await response.read()).decode()
        assert text.endswith("\n\n")
        return text[:-2].split("\n\n")

    async def metric(self, name: str) -> float:
        lines = [line for line in (await self.get("/metrics")).splitlines() if line.startswith(name + "{")]
        return float(lines[0].rsplit(" ", 1)[1])


@asynccontextmanager
async def world_of(service: Service) -> AsyncIterator[World]:
    async with running(service) as (url, server), aiohttp.ClientSession() as session:
        yield World(url, server, session)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with world_of(SERVICE) as made:
        yield made


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 5, "ignore_eos": True} | fields


def chunks(frames: list[str]) -> list[dict[str, Any]]:
    return [json.loads(frame.removeprefix("data: ")) for frame in frames if frame != "data: [DONE]"]


async def test_a_chat_stream_has_role_tokens_reason_usage_and_end_mark(world: World) -> None:
    frames = await world.stream("/v1/chat/completions", chat("hello", stream_options={"include_usage": True}))
    assert frames[-1] == "data: [DONE]"
    role, *tokens, usage = chunks(frames)
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len(tokens) == 5
    assert [token["choices"][0]["finish_reason"] for token in tokens] == [None] * 4 + ["length"]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 5


async def test_a_request_id_from_the_client_is_part_of_the_id_whatever_it_holds(world: World) -> None:
    odd = 'a"b\\c'
    frames = await world.stream("/v1/chat/completions", chat("x"), {"X-Request-Id": odd})
    assert {chunk["id"] for chunk in chunks(frames)} == {"chatcmpl-" + odd}


async def test_streaming_and_plain_answers_hold_the_same_text(world: World) -> None:
    _status, plain = await world.post("/v1/chat/completions", chat(LONG))
    streamed = chunks(await world.stream("/v1/chat/completions", chat(LONG)))
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in streamed)
    assert text == plain["choices"][0]["message"]["content"] != ""


async def test_a_second_turn_hits_the_blocks_of_the_first_answer(world: World) -> None:
    messages = chat(LONG)["messages"]
    _status, first = await world.post("/v1/chat/completions", chat(LONG, max_tokens=64))
    messages += [first["choices"][0]["message"], {"role": "user", "content": "go on"}]
    _status, second = await world.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
    known = first["usage"]["prompt_tokens"] + 63  # The last token of an answer has no KV.
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == known // 16 * 16


async def test_every_form_of_completion_prompt_is_answered(world: World) -> None:
    for prompt, answers in (("one", 1), (["one", "two"], 2), ([1, 2, 3], 1), ([[1, 2], [3, 4], [5]], 3)):
        status, answer = await world.post("/v1/completions", {"prompt": prompt, "max_tokens": 2, "n": 2})
        assert status == 200
        assert [choice["index"] for choice in answer["choices"]] == list(range(2 * answers))


async def test_usage_counts_each_prompt_once_and_the_last_sequence_cached(world: World) -> None:
    tokens = list(range(40))
    _status, answer = await world.post(
        "/v1/completions", {"prompt": [tokens, tokens], "n": 2, "max_tokens": 3, "ignore_eos": True}
    )
    assert answer["usage"]["prompt_tokens"] == 80
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 32


async def test_official_clients_read_all_four_apis(world: World) -> None:
    client = openai.AsyncOpenAI(base_url=world.url + "/v1", api_key="none")
    claude = anthropic.AsyncAnthropic(base_url=world.url, api_key="none")
    async with client, claude:
        response = await client.responses.create(model="sim", input="hello", max_output_tokens=4, stream=True)
        assert [event.type async for event in response][-1] == "response.completed"
        whole = await client.responses.create(model="sim", instructions="short", input="hello")
        assert whole.output_text
        assert whole.usage is not None
        assert whole.usage.input_tokens_details.cached_tokens == 0
        async with claude.messages.stream(
            model="sim", max_tokens=4, system="be kind", messages=[{"role": "user", "content": LONG}]
        ) as stream:
            message = await stream.get_final_message()
        assert message.usage.output_tokens == 4
        again = await claude.messages.create(
            model="sim", max_tokens=4, system="be kind", messages=[{"role": "user", "content": LONG}]
        )
        assert again.usage.cache_read_input_tokens
        assert [block.to_dict()["text"] for block in again.content] == [message.content[0].to_dict()["text"]]
        vectors = await client.embeddings.create(model="sim", input=["a", "b"], encoding_format="float")
        assert vectors.data[0].embedding != vectors.data[1].embedding


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/completions", {"model": "nope", "prompt": "x"}, 404, "The model `nope` does not exist."),
        ("/v1/completions", {"prompt": list(range(2048))}, 400, "This model's maximum context length is 2048 tokens"),
        ("/v1/completions", {"prompt": ""}, 400, "Either prompt or prompt_embeds"),
        ("/v1/completions", {"prompt": [500_000]}, 400, "Token id 500000 is out of vocabulary"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens must be at least 1, got 0."),
        ("/v1/completions", {"prompt": "x", "cache_salt": ""}, 400, "Parameter 'cache_salt'"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages"),
        ("/v1/chat/completions", chat("x", stream_options={"include_usage": True}), 400, "Stream options"),
        ("/v1/chat/completions", [1], 400, "the body must be a JSON object"),
    ],
)
async def test_errors_have_the_shape_of_vllm(world: World, path: str, body: object, status: int, message: str) -> None:
    code, answer = await world.post(path, body)
    assert code == status == answer["error"]["code"]
    assert answer["error"]["message"].startswith(message)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b'{"prompt": "\\ud800", "max_tokens": 1}',
        b'{"prompt": "\xed\xa0\x80", "max_tokens": 1}',
        b'{"prompt": "x", "unused": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=["empty", "escaped half pair", "raw half pair", "deep"],
)
async def test_a_body_that_is_no_text_or_too_deep_is_the_clients_mistake(world: World, body: bytes) -> None:
    async with aiohttp.ClientSession() as session, session.post(f"{world.url}/v1/completions", data=body) as response:
        assert response.status == 400
        assert (await response.json())["error"]["message"].startswith("the body is not JSON: ")


async def test_unknown_paths_answer_as_fastapi_does(world: World) -> None:
    assert await world.post("/v1/nothing", {}) == (404, {"detail": "Not Found"})


async def test_models_tell_directory_and_adapters(world: World) -> None:
    cards = json.loads(await world.get("/v1/models"))["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [("sim", None), ("alias", None), ("adapter", "sim")]
    assert cards[0]["root"].endswith("model")
    assert cards[2]["root"] == "adapters/a"


async def test_tokenize_and_detokenize_are_inverse(world: World) -> None:
    _status, tokens = await world.post("/tokenize", {"prompt": LONG})
    assert await world.post("/detokenize", {"tokens": tokens["tokens"]}) == (200, {"prompt": LONG})


async def test_a_client_that_leaves_frees_its_blocks(world: World) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.post(world.url + "/v1/chat/completions", json=chat(LONG, max_tokens=1800, stream=True)) as response,
    ):
        await response.content.readany()
        assert await world.metric("vllm:num_requests_running") == 1.0
    await until(lambda: world.metric("vllm:num_requests_running"), 0.0)
    assert await world.metric("vllm:kv_cache_usage_perc") == 0.0


async def test_requests_beyond_the_queue_limit_are_refused() -> None:
    slow = replace(SERVICE.engine, max_sequences=1)
    service = replace(SERVICE, engine=slow, options=ServerOptions(queued_requests_max=1))
    async with world_of(service) as world:
        asked = [asyncio.create_task(world.post("/v1/chat/completions", chat(LONG, max_tokens=500))) for _ in range(6)]
        statuses = sorted([(await answer)[0] for answer in asked])
        assert set(statuses) == {200, 503}
        assert 'vllm:admission_rejections_total{reason="max_num_queued_reqs"}' in await world.get("/metrics")


async def test_metrics_count_hits_in_tokens(world: World) -> None:
    for _ in range(2):
        await world.post("/v1/completions", {"prompt": list(range(100)), "max_tokens": 1})
    assert await world.metric("vllm:prefix_cache_queries_total") == 200.0
    assert await world.metric("vllm:prefix_cache_hits_total") == 96.0
    assert await world.metric("vllm:time_to_first_token_seconds_count") == 2.0
    assert 'num_gpu_blocks="257"' in await world.get("/metrics")


async def test_live_events_come_in_three_frames_numbered_from_zero(world: World) -> None:
    source = json.loads(await world.get("/kv_event_sources"))["0"]
    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as live:
        live.connect(source["endpoint"])
        live.subscribe(b"kv")
        await subscribed(world, live)
        await world.post("/reset_prefix_cache", {})
        tokens = list(range(200, 240))
        await world.post(
            "/v1/completions",
            {"model": "adapter", "prompt": tokens, "max_tokens": 1, "cache_salt": "s", "session_id": "me"},
        )
        topic, _number, payload = await received(live)
    _time, events, rank = msgspec.msgpack.decode(payload)
    assert (topic, rank) == (b"kv", 0)
    assert [event["type"] for event in events] == ["AllBlocksCleared", "BlockStored"]
    stored = events[1]
    assert stored["token_ids"] == tokens[:32]
    assert len(stored["block_hashes"]) == 2
    assert stored["extra_keys"] == [["adapter", "s"], ["adapter"]]
    assert (stored["lora_id"], stored["lora_name"], stored["session_id"]) == (1, "adapter", "me")


async def test_replay_gives_every_batch_from_the_one_asked_and_the_end_mark(world: World) -> None:
    for start in range(3):
        await world.post("/v1/completions", {"prompt": [start] * 40, "max_tokens": 1})
    source = json.loads(await world.get("/kv_event_sources"))["0"]
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(source["replay_endpoint"])
        await dealer.send_multipart([b"", (1).to_bytes(8, "big")])
        replies = [await received(dealer) for _ in range(3)]
    assert [reply[2] for reply in replies] == [(1).to_bytes(8, "big"), (2).to_bytes(8, "big"), END_OF_REPLAY]
    assert [reply[1] for reply in replies] == [b"kv", b"kv", b""]
    assert replies[-1][3] == b""


async def received(socket: zmq.asyncio.Socket) -> list[bytes]:
    async with asyncio.timeout(DEADLINE_S):
        return await socket.recv_multipart()


async def subscribed(world: World, live: zmq.asyncio.Socket) -> None:
    """Store new blocks until one arrives: only then has the subscription reached the publisher."""
    async with asyncio.timeout(DEADLINE_S):
        for start in range(1000):
            await world.post("/v1/completions", {"prompt": [start + 300] * 16, "max_tokens": 1})
            if await live.poll(20):
                await live.recv_multipart()
                return
    raise AssertionError("no event came")


async def until(read: Any, wanted: float) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while await read() != wanted:  # noqa: ASYNC110 - the server is asked, it cannot tell by itself
            await asyncio.sleep(0.01)
