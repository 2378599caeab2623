from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import pytest
from conftest import FakeCore, RecordedEngine, until
from warmfront.control.link import Link
from warmfront.control.verify import CHAT, CHATS, RENDER, TOKENIZE, NotLoadedError, TokenCheck, compare, of_data_process
from warmfront.types import TemplateOptions


def ids_of(request: dict[str, Any]) -> list[int]:
    """Stands for a tokenizer: one id per character of the messages."""
    return [ord(character) for message in request["messages"] for character in str(message["content"])]


async def ours(path: str, body: bytes) -> list[list[int]]:
    return [ids_of(msgspec.json.decode(body))]


async def ours_with_one_wrong(path: str, body: bytes) -> list[list[int]]:
    ids = ids_of(msgspec.json.decode(body))
    return [[*ids[:2], 0, *ids[3:]]]


async def ours_cut_short(path: str, body: bytes) -> list[list[int]]:
    return [ids_of(msgspec.json.decode(body))[:-1]]


def rendered(request: dict[str, Any]) -> tuple[int, Any]:
    return 200, {"request_id": "chatcmpl-1", "token_ids": ids_of(request), "features": None}


def tokenized(request: dict[str, Any]) -> tuple[int, Any]:
    ids = ids_of(request)
    return 200, {"count": len(ids), "max_model_len": 4096, "tokens": ids, "token_strs": None}


async def check(engine: RecordedEngine, http: aiohttp.ClientSession, prompt: Any = ours) -> TokenCheck:
    return await compare(prompt, http=http, url=engine.url, headers={}, model="tiny")


async def test_equal_ids_from_the_render_endpoint_are_verified(
    engine: RecordedEngine, http: aiohttp.ClientSession
) -> None:
    engine.posts[RENDER] = rendered
    found = await check(engine, http)
    assert (found.state, found.note) == ("verified", None)
    assert engine.asked == [RENDER] * len(CHATS)


async def test_a_refused_render_falls_back_to_tokenize(engine: RecordedEngine, http: aiohttp.ClientSession) -> None:
    engine.posts[RENDER] = lambda _: (403, {"detail": "Forbidden"})
    engine.posts[TOKENIZE] = tokenized
    found = await check(engine, http)
    assert found.state == "verified"
    assert found.reason.endswith(TOKENIZE)
    assert engine.asked.count(RENDER) == 1, "asked once, not for each request"


async def test_other_ids_are_a_mismatch_that_says_where(engine: RecordedEngine, http: aiohttp.ClientSession) -> None:
    engine.posts[RENDER] = rendered
    found = await check(engine, http, ours_with_one_wrong)
    assert found.state == "mismatch"
    assert "at token 2 of" in found.reason
    assert found.note is not None


async def test_a_shorter_prompt_is_a_mismatch_too(engine: RecordedEngine, http: aiohttp.ClientSession) -> None:
    engine.posts[RENDER] = rendered
    found = await check(engine, http, ours_cut_short)
    assert found.state == "mismatch"


async def test_a_template_that_refuses_one_request_is_compared_by_the_others(
    engine: RecordedEngine, http: aiohttp.ClientSession
) -> None:
    def render(request: dict[str, Any]) -> tuple[int, Any]:
        has_system = request["messages"][0]["role"] == "system"
        return (400, {"error": {"message": "System role not supported"}}) if has_system else rendered(request)

    engine.posts[RENDER] = render
    found = await check(engine, http)
    assert (found.state, found.reason.partition(" ")[0]) == ("verified", str(len(CHATS) - 1))


async def test_an_engine_that_tells_no_ids_leaves_the_tokens_unverified(
    engine: RecordedEngine, http: aiohttp.ClientSession
) -> None:
    found = await check(engine, http)
    assert (found.state, found.is_passing) == ("unverified", False)
    assert "/tokenize answers 404" in found.reason


async def test_an_engine_that_does_not_answer_is_asked_again_later(
    engine: RecordedEngine, http: aiohttp.ClientSession
) -> None:
    await engine.stop()
    found = await check(engine, http)
    assert (found.state, found.is_passing) == ("unverified", True)


async def test_an_answer_that_is_no_json_leaves_the_tokens_unverified(
    engine: RecordedEngine, http: aiohttp.ClientSession
) -> None:
    engine.raw[RENDER] = b"<html>"
    assert (await check(engine, http)).state == "unverified"


async def test_a_tokenizer_of_ours_that_fails_leaves_the_tokens_unverified(
    engine: RecordedEngine, http: aiohttp.ClientSession
) -> None:
    async def failing(path: str, body: bytes) -> list[list[int]]:
        raise ValueError("template error")

    engine.posts[RENDER] = rendered
    found = await check(engine, http, failing)
    assert (found.state, found.reason) == ("unverified", "our tokenizer cannot render a plain chat: template error")


@pytest.fixture
async def link(core: FakeCore) -> AsyncIterator[Link]:
    made = await Link.connect(core.path)
    reading = asyncio.create_task(made.read())
    await until(lambda: core.is_connected)
    yield made
    await made.close()
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)


async def test_the_data_process_gives_the_ids_of_the_tokenizer_that_is_named(core: FakeCore, link: Link) -> None:
    core.answers["tokens"] = (200, b"[[1,2,3]]")
    template = TemplateOptions(engine_version="0.32.0")
    prompt = await of_data_process(link, timeout_s=5.0)("/models/tiny", template)
    assert await prompt(CHAT, b'{"messages":[]}') == [[1, 2, 3]]
    assert core.frames[-1]["path"] == CHAT
    assert msgspec.json.decode(core.frames[-1]["payload"]) == {
        "tokenizer": "/models/tiny",
        "template": msgspec.to_builtins(template),
        "body": '{"messages":[]}',
    }


async def test_a_tokenizer_that_is_not_loaded_is_no_result(
    core: FakeCore, link: Link, engine: RecordedEngine, http: aiohttp.ClientSession
) -> None:
    engine.posts[RENDER] = rendered
    open_tokenizer = of_data_process(link, timeout_s=5.0)
    core.answers["tokens"] = (409, b"{}")
    with pytest.raises(NotLoadedError):
        await open_tokenizer("/models/tiny", TemplateOptions())
    core.answers["tokens"] = (200, b"[[1]]")
    prompt = await open_tokenizer("/models/tiny", TemplateOptions())
    core.answers["tokens"] = (409, b"{}")
    with pytest.raises(NotLoadedError):
        await check(engine, http, prompt)


async def test_a_chat_that_our_tokenizer_refuses_leaves_the_engine_unverified(
    core: FakeCore, link: Link, engine: RecordedEngine, http: aiohttp.ClientSession
) -> None:
    engine.posts[RENDER] = rendered
    core.answers["tokens"] = (422, b"no_template")
    found = await check(engine, http, await of_data_process(link, timeout_s=5.0)("/models/tiny", TemplateOptions()))
    assert (found.state, found.is_passing) == ("unverified", False)
    assert "no_template" in found.reason
