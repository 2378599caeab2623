from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conftest import FakeCore, until
from warmfront.control import link as link_module
from warmfront.control.link import Link, LinkClosedError, UnansweredError
from warmfront.types import FleetState, FleetUpdate, PoolUpdate


@pytest.fixture
async def link(core: FakeCore) -> AsyncIterator[Link]:
    made = await Link.connect(core.path)
    await until(lambda: core.is_connected)
    yield made
    await made.close()


@pytest.fixture
async def reading(link: Link) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(link.read())
    yield task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


STATE: dict[str, Any] = {
    "version": 3,
    "pools": [
        {
            "name": "m",
            "models": {"m": None},
            "tokens": "exact",
            "tokens_reason": None,
            "replicas": [
                {
                    "slot": 0,
                    "replica": {"id": "http://a:1", "url": "http://a:1", "rank": None, "engine": "vllm", "ready": True},
                    "events": {"state": "live", "lag_s": 0.01, "a_field_of_the_future": 1},
                }
            ],
        }
    ],
}


async def test_hello_and_states_are_kept(core: FakeCore, link: Link, reading: asyncio.Task[None]) -> None:
    core.send({"type": "state", "state": STATE})
    await until(lambda: link.state)
    assert link.hello is not None
    assert (link.hello.serving, link.hello.pid) == ("127.0.0.1:8080", 42)
    assert isinstance(link.state, FleetState)
    assert link.state.pools[0].replicas[0].events.state == "live"


async def test_a_frame_of_the_future_is_ignored(core: FakeCore, link: Link, reading: asyncio.Task[None]) -> None:
    core.send({"type": "gossip", "peers": 3})
    core.send({"type": "state", "state": STATE})
    await until(lambda: link.state)


async def test_a_fleet_arrives_as_a_map_with_every_field(core: FakeCore, link: Link) -> None:
    update = FleetUpdate(version=1, pools=[PoolUpdate("m", models={"m": None}, tokenizer=None, replicas=[])])
    await link.send_fleet(update)
    await until(lambda: core.updates)
    assert core.frames == [{"type": "fleet", "update": msgspec.to_builtins(update)}]


async def test_answers_find_their_questions(core: FakeCore, link: Link, reading: asyncio.Task[None]) -> None:
    first = asyncio.create_task(link.ask("explain", payload=b"{}", path="/v1/completions", timeout_s=5.0))
    second = asyncio.create_task(link.ask("fleet", timeout_s=5.0))
    await until(lambda: len(core.frames) == 2)
    asked = {frame["question"]: frame for frame in core.frames}
    assert (asked["explain"]["payload"], asked["explain"]["path"]) == (b"{}", "/v1/completions")
    core.send({"type": "answer", "id": asked["fleet"]["id"], "status": 200, "body": b"two"})
    core.send({"type": "answer", "id": asked["explain"]["id"], "status": 404, "body": b"one"})
    assert ((await first).status, (await first).body) == (404, b"one")
    assert (await second).body == b"two"


async def test_a_question_without_answer_ends_in_time(core: FakeCore, link: Link, reading: asyncio.Task[None]) -> None:
    with pytest.raises(UnansweredError, match=r"did not answer within 0\.01 s"):
        await link.ask("fleet", timeout_s=0.01)
    core.send({"type": "answer", "id": core.frames[0]["id"] if core.frames else 1, "status": 200, "body": b"late"})
    core.answers["policy"] = (200, b"{}")
    assert (await link.ask("policy", timeout_s=5.0)).body == b"{}", "a late answer disturbs nobody"


async def test_too_many_questions_are_refused(
    link: Link, reading: asyncio.Task[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "QUESTIONS_MAX", 1)
    waiting = asyncio.create_task(link.ask("fleet", timeout_s=5.0))
    await asyncio.sleep(0)
    with pytest.raises(UnansweredError, match="wait for the data process already"):
        await link.ask("fleet", timeout_s=5.0)
    waiting.cancel()


async def test_stop_ends_the_reading(core: FakeCore, reading: asyncio.Task[None]) -> None:
    core.send({"type": "stop"})
    await asyncio.wait_for(reading, 5.0)


async def test_a_gone_core_ends_the_reading_with_an_error(core: FakeCore, reading: asyncio.Task[None]) -> None:
    core.hang_up()
    with pytest.raises(LinkClosedError, match="has gone"):
        await asyncio.wait_for(reading, 5.0)


@pytest.mark.parametrize(
    ("payload", "length", "reason"),
    [(b"\xc1", None, "cannot be read"), (b"", 2**31, "a frame of 2147483648 bytes")],
    ids=["no MessagePack", "too long"],
)
async def test_a_core_of_another_language_ends_the_reading(
    payload: bytes, length: int | None, reason: str, core: FakeCore, reading: asyncio.Task[None]
) -> None:
    core.send_bytes(payload, length=length)
    with pytest.raises(LinkClosedError, match=reason):
        await asyncio.wait_for(reading, 5.0)


async def test_a_missing_socket_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(LinkClosedError, match="cannot connect to"):
        await Link.connect(tmp_path / "none.sock")
