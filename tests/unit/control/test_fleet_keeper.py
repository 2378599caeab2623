from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from conftest import RecordedEngine, until
from warmfront.clock import MonotonicClock
from warmfront.config import Config, ControlConfig, FleetConfig, ServerConfig
from warmfront.control.discovery.static import StaticDiscovery
from warmfront.control.fleet import FleetKeeper, is_tokenizer
from warmfront.control.verify import RENDER, NotLoadedError, OpenTokenizer, Prompt
from warmfront.types import FleetUpdate, SourceState, TemplateOptions

Start = Callable[[], Awaitable[RecordedEngine]]
CONTROL = ControlConfig(probe_interval_s=0.02, probe_timeout_s=1.0, unready_after=2)


class Running:
    """A keeper at work, and the updates it has sent."""

    def __init__(self, keeper: FleetKeeper, updates: list[FleetUpdate]) -> None:
        self.keeper = keeper
        self.updates = updates

    @property
    def last(self) -> FleetUpdate:
        return self.updates[-1]

    def ready(self) -> list[str]:
        return [replica.id for pool in self.last.pools for replica in pool.replicas if replica.ready]


Run = Callable[..., Running]


@pytest.fixture
async def run(http: aiohttp.ClientSession) -> AsyncIterator[Run]:
    tasks: list[asyncio.Task[None]] = []

    def start(*engines: RecordedEngine, discovery: Any = None, **options: Any) -> Running:
        fleet = options.pop("fleet", FleetConfig())
        servers = [ServerConfig(url=engine.url) for engine in engines]
        config = Config(control=CONTROL, fleet=msgspec.structs.replace(fleet, servers=servers))
        updates: list[FleetUpdate] = []

        async def send(update: FleetUpdate) -> None:
            updates.append(update)

        core_has_fleet = options.pop("core_has_fleet", False)
        keeper = FleetKeeper(config, http=http, clock=MonotonicClock(), send=send, seed=1, **options)
        work = keeper.run(discovery or StaticDiscovery(config.fleet), core_has_fleet=core_has_fleet)
        tasks.append(asyncio.create_task(work))
        return Running(keeper, updates)

    yield start
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_servers_become_ready_and_the_core_is_told(engine_server: Start, run: Run) -> None:
    first, second = await engine_server(), await engine_server()
    running = run(first, second)
    await until(lambda: running.updates and running.ready() == [first.url, second.url])
    assert running.last.pools[0].name == "tiny"


@pytest.mark.bug(183)
async def test_a_slow_server_delays_no_other(engine_server: Start, run: Run) -> None:
    slow, fast = await engine_server(), await engine_server()
    slow.hold = asyncio.Event()
    running = run(slow, fast)
    await until(lambda: running.updates and running.ready() == [fast.url])
    assert f"{slow.url}: not yet probed" in running.last.degraded
    assert running.last.is_partial
    slow.hold.set()
    await until(lambda: sorted(running.ready()) == sorted([slow.url, fast.url]))
    assert not running.last.is_partial


async def test_servers_that_were_asked_in_vain_make_no_fleet_partial(run: Run) -> None:
    source = Changing([ServerConfig(url="http://127.0.0.1:9")])
    running = run(discovery=source)
    await until(lambda: running.updates and running.updates[-1].degraded == ["http://127.0.0.1:9: connection refused"])
    assert [update.is_partial for update in running.updates] == [True, False]


async def test_a_fleet_that_the_core_has_is_not_replaced_before_all_were_asked(engine_server: Start, run: Run) -> None:
    slow, fast = await engine_server(), await engine_server()
    slow.hold = asyncio.Event()
    running = run(slow, fast, core_has_fleet=True)
    await until(lambda: any(facts.ready for facts in running.keeper.facts))
    assert running.updates == []
    slow.hold.set()
    await until(lambda: running.updates)
    assert sorted(running.ready()) == sorted([slow.url, fast.url])


async def test_a_lost_server_is_told_and_so_is_its_return(engine_server: Start, run: Run) -> None:
    engine = await engine_server()
    running = run(engine)
    await until(lambda: running.updates and running.ready())
    await engine.stop()
    await until(lambda: not running.ready())
    assert running.last.pools[0].replicas[0].notes[0] == "connection refused"
    await engine.start()
    await until(lambda: running.ready())


async def test_load_is_told_without_any_other_change(engine_server: Start, run: Run) -> None:
    engine = await engine_server()
    running = run(engine)
    await until(lambda: running.updates and running.ready())
    assert engine.metrics is not None
    engine.metrics = engine.metrics.replace('running{engine="0",model_name="tiny"} 3.0', 'running{engine="0"} 9.0')
    await until(lambda: running.last.pools[0].replicas[0].load.running == 9.0)


async def test_versions_grow_from_update_to_update(engine_server: Start, run: Run) -> None:
    running = run(await engine_server())
    await until(lambda: len(running.updates) > 3)
    versions = [update.version for update in running.updates]
    assert versions == sorted(set(versions))


class Changing:
    """A discovery source whose list the test changes."""

    def __init__(self, servers: list[ServerConfig]) -> None:
        self.queue: asyncio.Queue[list[ServerConfig]] = asyncio.Queue()
        self.queue.put_nowait(servers)

    async def servers(self) -> AsyncGenerator[list[ServerConfig]]:
        while True:
            yield await self.queue.get()

    def states(self) -> list[SourceState]:
        return []


async def test_the_pool_of_a_replaced_server_is_never_missing(engine_server: Start, run: Run) -> None:
    first, second = await engine_server(), await engine_server()
    source = Changing([ServerConfig(url=first.url)])
    running = run(discovery=source)
    await until(lambda: running.updates and running.ready() == [first.url])
    second.hold = asyncio.Event()
    source.queue.put_nowait([ServerConfig(url=second.url)])
    await until(lambda: running.last.pools[0].replicas == [])
    second.hold.set()
    await until(lambda: running.ready() == [second.url])
    since = next(number for number, update in enumerate(running.updates) if update.pools)
    assert all(update.pools for update in running.updates[since:])
    source.queue.put_nowait([])
    await until(lambda: running.last.pools == [])


async def test_servers_come_and_go_with_discovery(engine_server: Start, run: Run) -> None:
    first, second = await engine_server(), await engine_server()
    source = Changing([ServerConfig(url=first.url)])
    running = run(discovery=source)
    await until(lambda: running.updates and running.ready() == [first.url])
    source.queue.put_nowait([ServerConfig(url=second.url)])
    await until(lambda: running.ready() == [second.url])
    asked = len(first.asked)
    await until(lambda: len(second.asked) > 20)
    assert len(first.asked) <= asked + 5, "a server that is gone is not asked any more"


@pytest.mark.bug(183)
async def test_a_server_that_leaves_is_gone_while_others_take_their_time_to_answer(
    engine_server: Start, run: Run
) -> None:
    leaving, slow = await engine_server(), await engine_server()
    source = Changing([ServerConfig(url=leaving.url), ServerConfig(url=slow.url)])
    running = run(discovery=source)
    await until(lambda: running.updates and sorted(running.ready()) == sorted([leaving.url, slow.url]))
    slow.hold = asyncio.Event()
    asked = len(slow.asked)
    await until(lambda: len(slow.asked) > asked, "a question that is not answered")
    source.queue.put_nowait([ServerConfig(url=slow.url)])
    await until(lambda: [pool.replicas[0].id for pool in running.last.pools] == [slow.url])
    assert slow.hold.is_set() is False


@pytest.mark.bug(130)
async def test_another_server_behind_the_same_address_is_another_server(engine_server: Start, run: Run) -> None:
    engine = await engine_server()
    source = Changing([ServerConfig(url=engine.url, id="pod-1")])
    running = run(discovery=source)
    await until(lambda: running.updates and running.ready() == [engine.url])
    before = running.last.pools[0].replicas[0].incarnation
    source.queue.put_nowait([ServerConfig(url=engine.url, id="pod-2")])
    await until(lambda: running.ready() and running.last.pools[0].replicas[0].incarnation != before)
    source.queue.put_nowait([ServerConfig(url=engine.url, id="pod-1")])
    await until(lambda: running.ready() and running.last.pools[0].replicas[0].incarnation == before)


async def test_a_drained_server_that_left_and_came_back_takes_requests(engine_server: Start, run: Run) -> None:
    engine, other = await engine_server(), await engine_server()
    both = [ServerConfig(url=engine.url), ServerConfig(url=other.url)]
    source = Changing(both)
    running = run(discovery=source)
    await until(lambda: running.updates and len(running.ready()) == 2)
    running.keeper.drain([engine.url], is_draining=True)
    await until(lambda: running.ready() == [other.url])
    source.queue.put_nowait(both[1:])
    await until(lambda: len(running.last.pools[0].replicas) == 1)
    source.queue.put_nowait(both)
    await until(lambda: len(running.ready()) == 2)


def opener(prompt: Prompt, refusals: int = 0) -> OpenTokenizer:
    """Give `prompt`, once it was refused so many times."""
    left = itertools.repeat(None, refusals)

    async def open_tokenizer(path: str, template: TemplateOptions) -> Prompt:
        for _ in left:
            raise NotLoadedError("not yet")
        return prompt

    return open_tokenizer


async def ours(path: str, body: bytes) -> list[list[int]]:
    return [[1, 2, 3]]


async def test_tokens_are_compared_once_for_each_engine_process(
    engine_server: Start, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    engine = await engine_server()
    engine.posts[RENDER] = lambda _: (200, {"token_ids": [1, 2, 4]})
    fleet = FleetConfig(tokenizer="/models/tiny")
    running = run(engine, fleet=fleet, open_tokenizer=opener(ours))
    await until(lambda: running.keeper.checks.get(engine.url))
    await until(lambda: any("tokens mismatch" in note for note in running.last.pools[0].replicas[0].notes))
    assert [record.levelno for record in caplog.records if "tokens mismatch" in record.message] == [logging.WARNING]
    compared = engine.asked.count(RENDER)
    assert engine.metrics is not None
    engine.posts[RENDER] = lambda _: (200, {"token_ids": [1, 2, 3]})
    engine.metrics = engine.metrics.replace("1.79602178543e+09", "1.79602199999e+09")
    await until(lambda: running.keeper.checks[engine.url].state == "verified")
    assert engine.asked.count(RENDER) > compared
    await until(lambda: not running.last.pools[0].replicas[0].notes)


async def test_a_tokenizer_that_cannot_be_loaded_is_said_and_the_pool_works(engine_server: Start, run: Run) -> None:
    async def fail(path: str, template: TemplateOptions) -> Prompt:
        raise OSError("no such file")

    running = run(await engine_server(), fleet=FleetConfig(tokenizer="/nowhere"), open_tokenizer=fail)
    await until(lambda: running.updates and running.ready())
    await until(lambda: "cannot be loaded" in " ".join(running.last.pools[0].replicas[0].notes))


async def test_a_tokenizer_that_is_still_being_loaded_is_asked_again(engine_server: Start, run: Run) -> None:
    engine = await engine_server()
    engine.posts[RENDER] = lambda _: (200, {"token_ids": [1, 2, 3]})
    running = run(engine, fleet=FleetConfig(tokenizer="/models/tiny"), open_tokenizer=opener(ours, refusals=2))
    await until(lambda: running.keeper.checks.get(engine.url))
    assert running.keeper.checks[engine.url].state == "verified", "what could not be asked yet is not noted"


async def test_looking_once_gives_the_whole_fleet(engine_server: Start, http: aiohttp.ClientSession) -> None:
    engine, gone = await engine_server(), await engine_server()
    await gone.stop()
    servers = [ServerConfig(url=engine.url + "/"), ServerConfig(url=gone.url)]
    config = Config(control=CONTROL, fleet=FleetConfig(servers=servers))
    update = await FleetKeeper(config, http=http, clock=MonotonicClock()).look_once(StaticDiscovery(config.fleet))
    assert [replica.id for replica in update.pools[0].replicas] == [engine.url]
    assert update.degraded == [f"{gone.url}: connection refused"]


def test_a_tokenizer_is_a_readable_file_or_a_directory_with_one(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "other").mkdir()
    assert is_tokenizer(str(tmp_path))
    assert is_tokenizer(str(tmp_path / "tokenizer.json"))
    assert not is_tokenizer(str(tmp_path / "other"))
    assert not is_tokenizer("organisation/model")
