"""`warmfront calibrate` against a real engine server over loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from random import Random

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web
from warmfront.clock import MonotonicClock
from warmfront.control.reading import LINE_BYTES_MAX
from warmfront.lab.calibrate.fit import fit
from warmfront.lab.calibrate.probes import ProbeError, Prober, plan
from warmfront.sim.engine import EngineConfig
from warmfront.sim.latency import preset
from warmfront.sim.server.app import ServedModel, ServerOptions
from warmfront.sim.server.service import Service, running

BLOCKS, BLOCK_SIZE = 1025, 16
PLAN = plan(tokens_max=512, sequences_max=4, output_tokens=16, repeats=2)


@pytest_asyncio.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(read_bufsize=LINE_BYTES_MAX) as made:
        yield made


async def test_every_probe_of_the_plan_is_taken_from_a_live_engine(session: aiohttp.ClientSession) -> None:
    engine = EngineConfig(preset("demo", speed=20.0).latency, blocks=BLOCKS, max_model_tokens=2048)
    service = Service(engine=engine, model=ServedModel(("sim",), {}), options=ServerOptions(), port=0)
    done: list[tuple[int, int]] = []
    async with running(service) as (url, _server):
        prober = Prober(session, url, model=None, clock=MonotonicClock(), rng=Random(1))
        measured = await prober.measure(PLAN, done=lambda taken, probes: done.append((taken, probes)))
    probes = len(measured.prefills) + len(measured.decodes)
    assert done == [(taken, probes) for taken in range(1, probes + 1)]
    assert measured.model == "sim"
    assert measured.kv_tokens == (BLOCKS - 1) * BLOCK_SIZE
    asked = [tokens for tokens in PLAN.prompt_tokens for _ in range(PLAN.repeats)]
    assert [probe.new_tokens for probe in measured.prefills] == pytest.approx(asked, rel=0.2)
    assert all(probe.context_tokens == 0 for probe in measured.prefills), "prompts never repeat"
    assert [probe.sequences for probe in measured.decodes] == [1, 1, 4, 4]
    found = fit(measured, batched_tokens=engine.max_batched_tokens)
    assert found.latency.base_s + found.request_s > 0


async def test_an_engine_that_refuses_is_quoted(session: aiohttp.ClientSession) -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "no such model"}}, status=404)

    application = web.Application()
    application.router.add_post("/v1/completions", refuse)
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = "http://{}:{}".format(*runner.addresses[0][:2])
        prober = Prober(session, url, model="x", clock=MonotonicClock(), rng=Random(1))
        with pytest.raises(ProbeError, match=r"404.*no such model"):
            await prober.measure(PLAN, done=lambda taken, probes: None)
    finally:
        await runner.cleanup()


async def test_an_engine_that_is_not_there_is_named(session: aiohttp.ClientSession) -> None:
    free = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = free.sockets[0].getsockname()[1]
    free.close()
    await free.wait_closed()
    prober = Prober(session, f"http://127.0.0.1:{port}", model="x", clock=MonotonicClock(), rng=Random(1))
    with pytest.raises(ProbeError, match=str(port)):
        await prober.measure(PLAN, done=lambda taken, probes: None)
