from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer
from conftest import FakeCore, RecordedEngine, until
from warmfront.clock import MonotonicClock
from warmfront.config import Config, ControlConfig, FleetConfig, FrontConfig, ServerConfig
from warmfront.control.admin import Admin
from warmfront.control.discovery.static import StaticDiscovery
from warmfront.control.fleet import FleetKeeper
from warmfront.control.link import Link

Client = TestClient[Any, Any]


@pytest.fixture
async def admin(core: FakeCore, engine: RecordedEngine, http: aiohttp.ClientSession) -> AsyncIterator[Client]:
    """The admin API over one probed engine and a core that answers what the test sets."""
    config = Config(
        front=FrontConfig(body_bytes_max=1000),
        control=ControlConfig(answer_timeout_s=1.0),
        fleet=FleetConfig(servers=[ServerConfig(url=engine.url, headers={"authorization": "Bearer hush-hush"})]),
    )
    link = await Link.connect(core.path)
    reading = asyncio.create_task(link.read())
    fleet = FleetKeeper(config, http=http, clock=MonotonicClock())
    await fleet.look_once(StaticDiscovery(config.fleet))
    await until(lambda: link.hello)
    async with TestClient(TestServer(Admin(config, link=link, fleet=fleet).application())) as client:
        yield client
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await link.close()


async def error(response: aiohttp.ClientResponse) -> tuple[int, str, str]:
    body = await response.json()
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return response.status, body["error"]["code"], body["error"]["message"]


def router_answer(url: str) -> bytes:
    row = {"id": url, "slot": 0, "in_flight": 2, "accuracy": {"note": "engine does not report cached tokens: start …"}}
    return msgspec.json.encode(
        {"policy": "marginal_cost", "pools": [{"name": "tiny", "waiting": 1, "replicas": [row]}]}
    )


async def test_the_fleet_joins_probe_core_and_router(admin: Client, core: FakeCore, engine: RecordedEngine) -> None:
    core.answers["fleet"] = (200, router_answer(engine.url))
    replica = {"id": engine.url, "url": engine.url, "rank": None, "engine": "vllm", "ready": True}
    events = {"state": "stale", "reason": "a gap could not be replayed", "gaps": 1}
    pool = {"name": "tiny", "models": {"tiny": None}, "tokens": "approximate", "tokens_reason": "no tokenizer"}
    state = {"version": 1, "pools": [pool | {"replicas": [{"slot": 0, "replica": replica, "events": events}]}]}
    core.send({"type": "state", "state": state})
    report = await (await admin.get("/admin/fleet")).json()
    (shown,) = report["pools"]
    assert (shown["tokens"], shown["tokens_reason"], shown["router"]) == (
        "approximate",
        "no tokenizer",
        {"name": "tiny", "waiting": 1},
    )
    (row,) = shown["replicas"]
    assert (row["ready"], row["router"]["in_flight"], row["events"]["gaps"]) == (True, 2, 1)
    assert row["load"]["running"] == 3.0
    assert row["event_source"]["origin"] == "engine"
    assert "KV events stale: a gap could not be replayed" in row["notes"]
    assert any("does not report cached tokens" in note for note in row["notes"])
    assert report["router"] == {"policy": "marginal_cost"}


async def test_before_the_core_reports_what_it_knows_is_null(
    admin: Client, core: FakeCore, engine: RecordedEngine
) -> None:
    core.answers["fleet"] = (200, b'{"pools": []}')
    (row,) = (await (await admin.get("/admin/fleet")).json())["pools"][0]["replicas"]
    assert (row["events"], row["router"], row["slot"]) == (None, None, None)


@pytest.mark.parametrize("path", ["/admin/fleet", "/admin/config"])
async def test_keys_of_engines_are_never_shown(path: str, admin: Client, core: FakeCore) -> None:
    core.answers["fleet"] = (200, b'{"pools": []}')
    response = await admin.get(path)
    assert response.status == 200
    assert "hush-hush" not in await response.text()


async def test_explain_passes_request_and_answer_on(admin: Client, core: FakeCore) -> None:
    core.answers["explain"] = (200, b'{"choice": "http://a:1"}')
    response = await admin.post("/admin/explain?path=/v1/completions", data=b'{"prompt": "x"}')
    assert await response.json() == {"choice": "http://a:1"}
    (asked,) = [frame for frame in core.frames if frame["type"] == "ask"]
    assert (asked["path"], asked["payload"]) == ("/v1/completions", b'{"prompt": "x"}')


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ((404, b'{"error": "no pool serves x"}'), (404, "model_not_found", "no pool serves x")),
        ((400, b'{"error": {"message": "not JSON", "code": "invalid_body"}}'), (400, "invalid_body", "not JSON")),
        ((503, b'{"error": "no pool yet"}'), (503, "no_ready_replica", "no pool yet")),
        ((500, b"oops"), (500, "internal_error", "the data process answers 500")),
    ],
)
async def test_refusals_of_the_data_process_keep_their_words(
    answer: tuple[int, bytes], expected: tuple[int, str, str], admin: Client, core: FakeCore
) -> None:
    core.answers["explain"] = answer
    assert await error(await admin.post("/admin/explain", data=b"{}")) == expected


async def test_explain_refuses_what_it_cannot_explain(admin: Client) -> None:
    assert (await error(await admin.post("/admin/explain?path=/v1/embeddings", data=b"{}")))[:2] == (
        400,
        "invalid_body",
    )
    assert (await error(await admin.post("/admin/explain")))[:2] == (400, "invalid_body")


async def test_a_body_over_the_limit_is_refused(admin: Client) -> None:
    assert (await error(await admin.post("/admin/explain", data=b"x" * 1001)))[:2] == (413, "body_too_large")


async def test_a_silent_data_process_is_a_clear_503(admin: Client) -> None:
    status, code, message = await error(await admin.get("/admin/policy"))
    assert (status, code) == (503, "router_overloaded")
    assert message == "the data process did not answer within 1 s"


async def test_the_policy_is_the_routers_answer(admin: Client, core: FakeCore) -> None:
    core.answers["policy"] = (200, b'{"name": "round_robin"}')
    assert await (await admin.get("/admin/policy")).json() == {"name": "round_robin"}


async def test_health_names_the_data_process(admin: Client) -> None:
    assert await (await admin.get("/health")).json() == {"status": "ok", "serving": "127.0.0.1:8080", "pid": 42}


async def test_unknown_paths_and_methods_have_openai_errors(admin: Client) -> None:
    assert (await error(await admin.get("/admin/nothing")))[:2] == (404, "path_not_found")
    assert (await error(await admin.delete("/admin/fleet")))[:2] == (405, "method_not_allowed")
