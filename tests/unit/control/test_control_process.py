from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import msgspec
import pytest
from conftest import FakeCore, RecordedEngine, until
from warmfront.config import Config, ControlConfig, FleetConfig, ServerConfig

Launch = Callable[..., Awaitable[asyncio.subprocess.Process]]


@pytest.fixture
async def launch(core: FakeCore, tmp_path: Path) -> AsyncIterator[Launch]:
    """Start control processes as the data process does."""
    started: list[asyncio.subprocess.Process] = []

    async def start(*urls: str, socket: Path = core.path, admin: str = "127.0.0.1:0") -> asyncio.subprocess.Process:
        config = Config(
            fleet=FleetConfig(servers=[ServerConfig(url=url) for url in urls]),
            control=ControlConfig(admin_listen=admin),
        )
        path = tmp_path / "config.json"
        path.write_bytes(msgspec.json.encode(config))
        arguments = ["-m", "warmfront.control", "--config", str(path), "--socket", str(socket)]
        process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stderr=asyncio.subprocess.PIPE)
        started.append(process)
        return process

    yield start
    for process in started:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def ended(process: asyncio.subprocess.Process) -> int:
    return await asyncio.wait_for(process.wait(), 10.0)


async def test_it_reports_the_fleet_and_ends_when_the_core_hangs_up(
    core: FakeCore, engine: RecordedEngine, launch: Launch
) -> None:
    process = await launch(engine.url)
    await until(lambda: core.updates and core.updates[-1]["pools"])
    assert core.updates[-1]["pools"][0]["replicas"][0]["id"] == engine.url
    core.hang_up()
    assert await ended(process) == 0


async def test_it_ends_when_told_to_stop(core: FakeCore, launch: Launch) -> None:
    process = await launch()
    await until(lambda: core.is_connected)
    core.send({"type": "stop"})
    assert await ended(process) == 0


async def test_it_says_goodbye_on_a_termination_signal(core: FakeCore, launch: Launch) -> None:
    process = await launch()
    await until(lambda: core.updates)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    assert await ended(process) == 0
    assert core.frames[-1] == {"type": "stopping"}


async def test_without_a_core_it_ends_with_one_clear_line(launch: Launch, tmp_path: Path) -> None:
    process = await launch(socket=tmp_path / "none.sock")
    assert await ended(process) == 1
    assert process.stderr is not None
    line = msgspec.json.decode(await process.stderr.read())
    assert (line["level"], line["logger"]) == ("error", "warmfront.control")
    assert "cannot connect to" in line["message"]


async def test_an_admin_address_in_use_is_said_once_and_taken_when_it_is_free(
    core: FakeCore, engine: RecordedEngine, launch: Launch
) -> None:
    taken = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    address = "{}:{}".format(*taken.sockets[0].getsockname())
    process = await launch(engine.url, admin=address)
    await until(lambda: core.updates and core.updates[-1]["pools"], "the fleet reported without an admin API")
    taken.close()
    await taken.wait_closed()
    await until_answered(f"http://{address}/health")
    process.terminate()
    assert await ended(process) == 0
    assert process.stderr is not None
    assert (await process.stderr.read()).count(b"control.admin_listen: cannot bind") == 1


async def until_answered(url: str) -> None:
    async with aiohttp.ClientSession() as http, asyncio.timeout(10.0):
        while True:
            try:
                async with http.get(url) as answer:
                    assert answer.status == 200
                    return
            except aiohttp.ClientConnectorError:
                await asyncio.sleep(0.02)
