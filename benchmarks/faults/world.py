"""Three engines behind their doors and one router in front: what a fault happens to.

Engines and router are the real processes, each the leader of a group of its own, so that a signal reaches all of it
and nothing survives the run. Peers run with their defaults.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import aiohttp
import contenders
import yaml
from places import ROOT
from ports import free_ports

from faults.doors import EventDoor, HttpDoor

sys.path.insert(0, str(ROOT / "tests"))  # for the one name server that does what it is told
from support.dns_server import NameServer
from warmfront.config import merged_with

MODEL = contenders.MODEL
Source = Literal["config", "file", "dns"]
"""Where the router finds its servers."""
SERVICE = "_http._tcp.engines.test"
ENGINES = 3
FOLDER = "FOLDER"
"""Stands for the folder of the run in settings."""
START_TIMEOUT_S = 120.0
END_TIMEOUT_S = 10.0
POLL_S = 0.1
ENGINE_FLAGS = ("--preset", "demo", "--served-model-name", MODEL, "--max-num-seqs", "64")


@dataclass
class Process:
    """A child and everything it starts."""

    name: str
    command: list[str]
    log: Path
    variables: dict[str, str] = field(default_factory=dict)
    child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; returns at once."""
        with open(self.log, "ab") as log:
            self.child = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **self.variables},
                cwd=self.log.parent,
            )

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all of it."""
        if self.child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.child.pid, number)

    def log_tail(self) -> str:
        """Return the end of its log."""
        return self.log.read_bytes()[-2000:].decode(errors="replace") if self.log.exists() else "no log"

    async def end(self) -> None:
        """Ask it to end, then make it."""
        for number in (signal.SIGCONT, signal.SIGTERM, signal.SIGKILL):
            self.signal(number)
            if number is not signal.SIGCONT and self.child is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    await asyncio.to_thread(self.child.wait, END_TIMEOUT_S)
        self.child = None

    def children(self, part: str) -> list[int]:
        """Return the ids of the processes in its session whose command line holds `part`."""
        assert self.child is not None
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = path.read_text().rpartition(")")[2].split()
                words = (path.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if int(fields[3]) == self.child.pid and part in words:
                    found.append(int(path.parent.name))
        return found


@dataclass
class World:
    """Everything that runs."""

    folder: Path
    url: str
    admin: str
    """Empty for peers."""
    engines: list[Process]
    doors: list[HttpDoor]
    events: list[EventDoor]
    router: Process
    names: NameServer | None = None
    """Tells where the engines are, if anybody asks."""

    @property
    def servers_file(self) -> Path:
        """The list of servers, where the router reads it from a file."""
        return self.folder / "servers.yaml"

    async def until(self, holds: Callable[[], Any], what: str, *, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait for a condition, which may be a coroutine function.

        Raises:
            TimeoutError: It did not hold in time; the message holds the end of the router's log.
        """
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while True:
            result = holds()
            if await result if asyncio.iscoroutine(result) else result:
                return
            if asyncio.get_running_loop().time() > deadline_s:
                raise TimeoutError(f"not within {timeout_s:g} s: {what}\n{self.router.log_tail()}")
            await asyncio.sleep(POLL_S)

    async def answers(self) -> bool:
        """Whether the router answers a small request."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 1}
        return await _status("POST", self.url + "/v1/chat/completions", body) == 200

    async def ready(self) -> bool:
        """Whether the router is ready: for warmfront with all engines and their events, for peers when it answers."""
        if not self.admin:
            return await self.answers()
        seen = await self.get("/ready")
        return bool(seen.get("ready")) and all(
            pool["ready"] == ENGINES and pool["events"]["live"] == ENGINES and pool["tokens"] != "loading"
            for pool in seen.get("pools", [])
        )

    async def get(self, path: str) -> dict[str, Any]:
        """Return the JSON of a path of the router; nothing when it does not answer."""
        base = self.admin if path.startswith("/admin") else self.url
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, json.JSONDecodeError):
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2.0)) as session,
                session.get(base + path) as answer,
            ):
                return dict(await answer.json(content_type=None))
        return {}


async def _status(method: str, url: str, body: Any = None) -> int:
    with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5.0)) as session,
            session.request(method, url, json=body) as answer,
        ):
            await answer.read()
            return answer.status
    return 0


@asynccontextmanager
async def running(
    router: str, folder: Path, settings: dict[str, Any], *, through_doors: bool, source: Source
) -> AsyncIterator[World]:
    """Start engines, doors and one router; end all of it with the block.

    Args:
        router: `warmfront`, or the name of a contender.
        folder: For logs and state.
        settings: More configuration of warmfront, as a tree.
        through_doors: Engines are reached through their HTTP doors, otherwise directly.
        source: Where the router finds its servers.

    Raises:
        TimeoutError: Something did not become ready.
    """
    ports = free_ports(ENGINES * 6 + 2)
    own, side, *rest = ports
    engines, doors, events = _engines(folder, rest)
    (folder / "memory").mkdir(exist_ok=True)
    urls = [f"http://127.0.0.1:{door.port}" if through_doors else door.engine for door in doors]
    names = NameServer()
    await names.start()
    ports_told = [f"0 0 {url.rpartition(':')[2]} localhost." for url in urls]
    names.records[(f"{SERVICE}.", "SRV")] = ports_told
    found = {"discovery": [_discovery(source, folder, names)]} if source != "config" else None
    process = _router(router, folder, (own, side), urls, events, settings, found=found)
    admin = f"http://127.0.0.1:{side}" if router == "warmfront" else ""
    world = World(folder, f"http://127.0.0.1:{own}", admin, engines, doors, events, process, names)
    async with AsyncExitStack() as stack:
        stack.callback(names.stop)
        for each in (*doors, *events):
            await each.open()
            stack.push_async_callback(each.close)
        for engine in engines:
            engine.start()
            stack.push_async_callback(engine.end)
        for door in doors:
            url = door.engine + "/health"
            await world.until(lambda url=url: healthy(url), "an engine answers")  # type: ignore[misc]
        process.start()
        stack.push_async_callback(process.end)
        await world.until(world.ready, f"{router} is ready")
        yield world


async def healthy(url: str) -> bool:
    return await _status("GET", url) == 200


def _engines(folder: Path, ports: list[int]) -> tuple[list[Process], list[HttpDoor], list[EventDoor]]:
    engines, doors, events = [], [], []
    for number in range(ENGINES):
        http, live, replay, door, live_door, replay_door = ports[number * 6 : number * 6 + 6]
        command = [
            *(sys.executable, "-m", "warmfront", "engine", "--port", str(http), *ENGINE_FLAGS, "--seed", str(number)),
            *("--kv-events-endpoint", f"tcp://127.0.0.1:{live}"),
            *("--kv-events-replay-endpoint", f"tcp://127.0.0.1:{replay}"),
        ]
        engines.append(Process(f"engine {number}", command, folder / f"engine-{number}.log"))
        doors.append(HttpDoor(f"http://127.0.0.1:{http}", door))
        inside = (f"tcp://127.0.0.1:{live}", f"tcp://127.0.0.1:{replay}")
        events.append(EventDoor(inside, (live_door, replay_door), seed=number))
    return engines, doors, events


def _router(
    name: str,
    folder: Path,
    ports: tuple[int, int],
    urls: list[str],
    events: list[EventDoor],
    settings: dict[str, Any],
    *,
    found: dict[str, Any] | None,
) -> Process:
    log = folder / "router.log"
    own, side = ports
    if name != "warmfront":
        contender = next(each for each in contenders.CONTENDERS if each.name == name)
        place = contenders.Place(own, side, [int(url.rpartition(":")[2]) for url in urls], folder, folder)
        return Process(name, contender.command(place), log, contender.variables(place))
    servers = [
        {
            "url": url,
            "events": {
                "endpoint": f"tcp://127.0.0.1:{event.ports[0]}",
                "replay": f"tcp://127.0.0.1:{event.ports[1]}",
            },
        }
        for url, event in zip(urls, events, strict=True)
    ]
    (folder / "servers.yaml").write_text(yaml.safe_dump(servers), encoding="utf-8")
    tree = {
        "front": {"listen": f"127.0.0.1:{own}"},
        "control": {"admin_listen": f"127.0.0.1:{side}"},
        "fleet": found or {"servers": servers},
    }
    path = folder / "warmfront.yaml"
    text = yaml.safe_dump(merged_with(tree, settings)).replace(FOLDER, str(folder))
    path.write_text(text, encoding="utf-8")
    return Process(name, [sys.executable, "-m", "warmfront", "serve", "--config", str(path)], log)


def _discovery(source: Source, folder: Path, names: NameServer) -> dict[str, Any]:
    if source == "file":
        return {"type": "file", "path": str(folder / "servers.yaml")}
    return {"type": "srv", "name": SERVICE, "nameservers": [names.address], "interval_s": 1.0, "timeout_s": 1.0}
