"""Hold a router under load for long while everything around it breaks, and count: nothing lost, nothing done twice.

    python benchmarks/soak.py                               200,000 requests, about ten minutes
    python benchmarks/soak.py --requests 3000 --seed 7      a short one

Four engines, one router, clients of all kinds (streams and whole answers, some that leave early, some that send
nonsense). Faults come from the seed: engines are killed and come back, are stopped for a while, the control process is
killed. At the end four things must hold; the exit status says whether they do:

* every request had an answer: its own, an error in the documented form, or an error event in its stream;
* no engine took a request that another engine, or the same one, had taken before;
* when all is quiet, nothing is in flight in the router's ledger, and nothing waits;
* the resident memory of the data process does not grow over the second half.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
from faults.world import Process, World, healthy
from places import RESULTS
from ports import free_ports
from warmfront.sim.words import NOUNS, OTHERS, VERBS

ENGINES = 4
CLIENTS = 48
MODEL = "m"
PREFIXES = 400
PREFIX_WORDS = 120
QUESTION_WORDS = 12
DOWN_S = (1.0, 3.0)
CLIENT_TIMEOUT_S = 90.0
LEAVES, NONSENSE, STREAMS = 0.02, 0.01, 0.5
"""Shares of the requests: clients that leave early, bodies that are no JSON, streamed ones."""
GROWTH_MAX = 1.10
GROWTH_FREE_BYTES = 16 << 20
"""Noise of an allocator; more than this times `GROWTH_MAX` over the second half is a leak."""
SEGMENT_CACHE_BYTES = 8 << 20
"""Small, so that it is full in the first half: filling the default of 256 MiB takes longer than a soak."""
QUIET_S = 20.0
TAKEN = re.compile(rb"request \S*?(soak-\d+) taken")


@dataclass
class Tally:
    """What came of the requests."""

    seen: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    """Bytes, from time to time."""
    faults: Counter[str] = field(default_factory=Counter)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fault-every-s", type=float, default=4.0, help="seconds between two faults, on average")
    parser.add_argument("--folder", type=Path, default=RESULTS / "soak", help="for logs")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for log in arguments.folder.glob("*.log"):
        log.unlink()
    problems = asyncio.run(_soak(arguments.requests, arguments.seed, arguments.fault_every_s, arguments.folder))
    for problem in problems:
        print(f"FAILED: {problem}", flush=True)
    return 1 if problems else 0


async def _soak(requests: int, seed: int, fault_every_s: float, folder: Path) -> list[str]:
    async with AsyncExitStack() as stack:
        world = await _start(stack, folder, seed)
        tally = Tally()
        faults = asyncio.create_task(_break_things(world, Random(seed), fault_every_s, tally))
        await _load(world, requests, seed, tally)
        faults.cancel()
        (ended,) = await asyncio.gather(faults, return_exceptions=True)
        ledger = await _until_quiet(world)
    twice = [name for name, times in _taken(folder).items() if times > 1]
    print(json.dumps({"seen": tally.seen, "faults": tally.faults, "resident_mib": [b >> 20 for b in tally.resident]}))
    problems = list(_problems(tally, twice, ledger, requests))
    if not isinstance(ended, asyncio.CancelledError):
        problems.append(f"the faults ended by themselves: {ended!r}")
    return problems


def _problems(tally: Tally, twice: list[str], ledger: str | None, requests: int) -> Iterator[str]:
    if tally.lost:
        yield f"{len(tally.lost)} requests had no answer: {', '.join(tally.lost[:5])}"
    if sum(tally.seen.values()) + len(tally.lost) != requests:
        yield f"{requests} were sent and {sum(tally.seen.values()) + len(tally.lost)} ended"
    if twice:
        yield f"{len(twice)} requests were taken more than once: {', '.join(twice[:5])}"
    if ledger is not None:
        yield f"the ledger is not empty: {ledger}"
    half = len(tally.resident) // 2
    before, after = max(tally.resident[: half + 1]), tally.resident[-1]
    if after > before * GROWTH_MAX + GROWTH_FREE_BYTES:
        yield f"resident memory grew from {before >> 20} to {after >> 20} MiB in the second half"


async def _start(stack: AsyncExitStack, folder: Path, seed: int) -> World:
    own, side, *ports = free_ports(2 + ENGINES * 3)
    engines = []
    for number in range(ENGINES):
        http, live, replay = ports[number * 3 : number * 3 + 3]
        command = [
            *(sys.executable, "-m", "warmfront", "engine", "--port", str(http), "--served-model-name", MODEL),
            *("--speed", "40", "--seed", str(seed + number), "--enable-log-requests"),
            *("--kv-events-endpoint", f"tcp://127.0.0.1:{live}"),
            *("--kv-events-replay-endpoint", f"tcp://127.0.0.1:{replay}"),
        ]
        engines.append(Process(f"engine {number}", command, folder / f"engine-{number}.log"))
    urls = [f"http://127.0.0.1:{ports[number * 3]}" for number in range(ENGINES)]
    command = [sys.executable, "-m", "warmfront", "serve", "--listen", f"127.0.0.1:{own}"]
    command += ["--set", f"index.segment_cache_bytes={SEGMENT_CACHE_BYTES}"]
    command += ["--admin-listen", f"127.0.0.1:{side}", *(word for url in urls for word in ("--replica", url))]
    router = Process("warmfront", command, folder / "router.log")
    world = World(folder, f"http://127.0.0.1:{own}", f"http://127.0.0.1:{side}", engines, [], [], router)
    for engine, url in zip(engines, urls, strict=True):
        engine.start()
        stack.push_async_callback(engine.end)
        await world.until(lambda url=url: healthy(url + "/health"), "an engine answers")  # type: ignore[misc]
    router.start()
    stack.push_async_callback(router.end)
    await world.until(lambda: _all_ready(world), "the router is ready")
    return world


async def _all_ready(world: World) -> bool:
    seen = await world.get("/ready")
    return bool(seen.get("ready")) and all(pool["ready"] == ENGINES for pool in seen.get("pools", []))


# -- faults


async def _break_things(world: World, random: Random, every_s: float, tally: Tally) -> None:
    """Break one thing after the other, for ever; what is broken is whole again before the next."""
    acts: dict[str, Callable[[World, Random], Awaitable[None]]] = {
        "engine killed": _kill_engine,
        "engine stopped": _stop_engine,
        "control process killed": _kill_control,
    }
    while True:
        await asyncio.sleep(random.uniform(0.5, 1.5) * every_s)
        name = random.choices(list(acts), weights=[3, 3, 1])[0]
        tally.faults[name] += 1
        await acts[name](world, random)


async def _kill_engine(world: World, random: Random) -> None:
    engine = random.choice(world.engines)
    engine.signal(signal.SIGKILL)
    try:
        await asyncio.sleep(random.uniform(*DOWN_S))
    finally:
        await engine.end()
        engine.start()


async def _stop_engine(world: World, random: Random) -> None:
    engine = random.choice(world.engines)
    engine.signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(random.uniform(*DOWN_S))
    finally:
        engine.signal(signal.SIGCONT)


async def _kill_control(world: World, _: Random) -> None:
    for pid in world.router.children("warmfront.control"):
        os.kill(pid, signal.SIGKILL)


# -- clients


async def _load(world: World, requests: int, seed: int, tally: Tally) -> None:
    numbers = iter(range(requests))
    random = Random(seed)
    prefixes = [_text(random, PREFIX_WORDS) for _ in range(PREFIXES)]
    sampled = max(1, requests // 20)
    done = count(1)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=CLIENT_TIMEOUT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def client(number: int) -> None:
            own = Random(seed * 1_000_003 + number)
            for request in numbers:
                name = f"soak-{request}"
                try:
                    seen = await _one(session, world.url, name, own, prefixes)
                except (aiohttp.ClientError, TimeoutError, OSError) as error:
                    tally.lost.append(f"{name} ({type(error).__name__}: {error})")
                else:
                    tally.seen[seen] += 1
                finished = next(done)
                if finished % sampled == 0:
                    tally.resident.append(_resident(world))
                    print(f"{finished} of {requests}, {tally.resident[-1] >> 20} MiB", file=sys.stderr, flush=True)

        await asyncio.gather(*(client(number) for number in range(CLIENTS)))


async def _one(session: aiohttp.ClientSession, url: str, name: str, random: Random, prefixes: list[str]) -> str:
    """Send one request and say how it ended.

    Raises:
        ClientError, TimeoutError, OSError: It had no answer, or one that broke off without a word.
    """
    kind = random.random()
    prefix = prefixes[min(int(random.paretovariate(0.7)) - 1, len(prefixes) - 1)]
    streams = random.random() < STREAMS
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [
            {"role": "system", "content": prefix},
            {"role": "user", "content": _text(random, QUESTION_WORDS)},
        ],
        "max_tokens": random.randint(1, 8),
        "stream": streams,
    }
    content = json.dumps(body).encode() if kind > NONSENSE else b'{"model": "m", '
    headers = {"x-request-id": name, "content-type": "application/json"}
    async with session.post(url + "/v1/chat/completions", data=content, headers=headers) as response:
        if NONSENSE < kind < NONSENSE + LEAVES:
            response.close()
            return "left"
        answer = await response.read()
    if response.status != 200:
        error = json.loads(answer)["error"]
        return f"{response.status} {error.get('code') or error.get('type')}"
    if not streams:
        json.loads(answer)
        return "ok"
    if answer.rstrip().endswith(b"data: [DONE]"):
        return "ok"
    last = answer.rstrip().rpartition(b"\n\n")[2]
    if last.startswith(b"data: ") and "error" in json.loads(last[6:]):
        return "error event"
    raise aiohttp.ClientPayloadError(f"the stream broke off: {answer[-80:]!r}")


def _text(random: Random, words: int) -> str:
    return " ".join(random.choice(random.choice((NOUNS, VERBS, OTHERS))) for _ in range(words))


# -- what must hold


def _resident(world: World) -> int:
    assert world.router.child is not None
    pages = Path(f"/proc/{world.router.child.pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


async def _until_quiet(world: World) -> str | None:
    """Wait until the ledger is empty; return what is left in it if it never is."""
    left: str | None = "the admin API does not answer"
    for _ in range(int(QUIET_S / 0.25)):
        fleet = await world.get("/admin/fleet")
        rows = [replica["router"] for pool in fleet.get("pools", []) for replica in pool["replicas"]]
        waiting = [pool["router"]["waiting"] for pool in fleet.get("pools", [])]
        busy = [row for row in rows if row and (row["in_flight"] or row["pending_tokens"])]
        if rows and not busy and not any(waiting):
            return None
        left = json.dumps({"busy": busy, "waiting": waiting})
        await asyncio.sleep(0.25)
    return left


def _taken(folder: Path) -> Counter[str]:
    """How often each request was taken by an engine, from their logs."""
    taken: Counter[str] = Counter()
    for log in folder.glob("engine-*.log"):
        taken.update(name.decode() for name in TAKEN.findall(log.read_bytes()))
    return taken


if __name__ == "__main__":
    sys.exit(main())
