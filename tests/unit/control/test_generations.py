"""Nothing of a configuration outlives it, and nothing that was found out is lost with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import msgspec
import pytest
from conftest import FakeCore, RecordedEngine, until
from warmfront.clock import MonotonicClock
from warmfront.config import Config
from warmfront.control.generations import Generations
from warmfront.control.link import Link

Start = Callable[[], Awaitable[RecordedEngine]]


def config(*engines: RecordedEngine, **control: float) -> Config:
    settings = {"probe_interval_s": 0.02, "probe_timeout_s": 1.0, **control}
    servers = [{"url": engine.url} for engine in engines]
    return msgspec.convert({"control": settings, "fleet": {"servers": servers}}, Config)


class Running:
    def __init__(self, generations: Generations, core: FakeCore) -> None:
        self.generations, self.core = generations, core

    def ready(self) -> list[str]:
        if not self.core.updates:
            return []
        pools = self.core.updates[-1]["pools"]
        return [replica["id"] for pool in pools for replica in pool["replicas"] if replica["ready"]]


Begin = Callable[[Config], Awaitable[Running]]


@pytest.fixture
async def begin(core: FakeCore, http: aiohttp.ClientSession) -> AsyncIterator[Begin]:
    tasks: list[asyncio.Task[None]] = []
    links: list[Link] = []

    async def start(first: Config) -> Running:
        link = await Link.connect(core.path)
        generations = Generations(first, link=link, http=http, clock=MonotonicClock(), memory=None)
        tasks.extend([asyncio.create_task(link.read()), asyncio.create_task(generations.run())])
        links.append(link)
        await until(lambda: core.is_connected)
        core.send({"type": "state", "state": {"version": 0, "pools": []}})
        return Running(generations, core)

    yield start
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for link in links:
        await link.close()


@pytest.mark.bug(131)
async def test_after_a_change_only_servers_of_the_new_configuration_are_asked(
    engine_server: Start, begin: Begin
) -> None:
    first, second = await engine_server(), await engine_server()
    running = await begin(config(first))
    await until(lambda: running.ready() == [first.url])
    await running.generations.replace(config(second))
    asked = len(first.asked)
    await until(lambda: running.ready() == [second.url])
    await until(lambda: len(second.asked) > 20)
    assert len(first.asked) == asked


async def test_a_server_that_stays_is_ready_throughout(engine_server: Start, begin: Begin) -> None:
    kept, slow = await engine_server(), await engine_server()
    slow.hold = asyncio.Event()
    running = await begin(config(kept))
    await until(lambda: running.ready() == [kept.url])
    seen = len(running.core.updates)
    await running.generations.replace(config(kept, slow, probe_timeout_s=2.0))
    slow.hold.set()
    await until(lambda: running.ready() == [kept.url, slow.url])
    pools = [update["pools"] for update in running.core.updates[seen:]]
    assert all(pools and pools[0]["replicas"][0]["ready"] for pools in pools)
    versions = [update["version"] for update in running.core.updates]
    assert versions == sorted(set(versions))


async def test_what_is_drained_stays_so_under_the_next_configuration(engine_server: Start, begin: Begin) -> None:
    engine, other = await engine_server(), await engine_server()
    running = await begin(config(engine, other))
    await until(lambda: len(running.ready()) == 2)
    running.generations.fleet.drain([engine.url], is_draining=True)
    await until(lambda: running.ready() == [other.url])
    await running.generations.replace(config(engine, other, probe_timeout_s=0.5))
    seen = len(running.core.updates)
    await until(lambda: len(running.core.updates) > seen and running.ready() == [other.url])
    assert running.generations.fleet.drained == {engine.url}
