"""The demo's processes: engines and router as children that cannot outlive it.

Every child is the leader of its own process group, so a Ctrl-C in the terminal reaches only the demo, which then
stops them in order; and stopping a child stops what it started itself. Engines take ports of the kernel's choice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from warmfront.clock import Clock
from warmfront.errors import WarmfrontError

log = logging.getLogger(__name__)

START_TIMEOUT_S = 30.0
"""How long engines and router may take until they are ready; two busy cores start six interpreters."""
STOP_TIMEOUT_S = 5.0
"""How long a child may take to end before it is killed."""
POLL_INTERVAL_S = 0.1
LOG_TAIL_LINES = 15
MODEL_NAME = "demo"
ANY_PORTS = (0, 0)
DEFAULT_PORTS = (8080, 8081)
"""Where `warmfront serve` listens and other commands look for the admin API unless told otherwise."""


class DemoError(WarmfrontError):
    """The demo cannot go on; the message says where to look."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """What runs: base URLs."""

    router: str
    admin: str
    engines: tuple[str, ...]


@contextlib.asynccontextmanager
async def running_fleet(
    *, engines: int, policy: str, seed: int, logs: Path, clock: Clock, ports: tuple[int, int] = ANY_PORTS
) -> AsyncIterator[Fleet]:
    """Start cold engines and a router that uses `policy`; stop them when the block ends, however it ends.

    Args:
        engines: How many.
        policy: Name of the router's policy.
        seed: Seed of the engines' answers.
        logs: Directory of the children's logs.
        clock: For time-outs.
        ports: Wanted for clients and for the admin API; one that is taken is replaced by a free one, 0 is any.

    Raises:
        DemoError: A child ended or did not become ready.
    """
    async with contextlib.AsyncExitStack() as stack:
        started = [
            await stack.enter_async_context(_child(_engine_arguments(seed), logs / f"{policy}-engine-{number}.log"))
            for number in range(engines)
        ]
        urls = [await child.first_line() for child in started]
        router, admin = (f"127.0.0.1:{port}" for port in _free_ports(ports))
        arguments = _router_arguments(urls, policy, router, admin)
        child = await stack.enter_async_context(_child(arguments, logs / f"{policy}-router.log"))
        fleet = Fleet(f"http://{router}", f"http://{admin}", tuple(urls))
        await _until_ready(fleet, child, clock)
        yield fleet


def _engine_arguments(seed: int) -> list[str]:
    anywhere = "tcp://127.0.0.1:0"
    return [
        *("engine", "--port", "0", "--preset", "demo", "--served-model-name", MODEL_NAME, "--seed", str(seed)),
        *("--kv-events-endpoint", anywhere, "--kv-events-replay-endpoint", anywhere),
    ]


def _router_arguments(urls: Sequence[str], policy: str, router: str, admin: str) -> list[str]:
    replicas = [argument for url in urls for argument in ("--replica", url)]
    settings = {"front.listen": router, "control.admin_listen": admin, "router.policy.name": policy}
    return ["serve", *replicas, *(part for name, value in settings.items() for part in ("--set", f"{name}={value}"))]


@dataclass(slots=True)
class _Child:
    process: asyncio.subprocess.Process
    log: Path

    async def first_line(self) -> str:
        """Return the first line the child prints: an engine tells its URL."""
        assert self.process.stdout is not None
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                line = (await self.process.stdout.readline()).decode().strip()
        except TimeoutError as error:
            raise DemoError(f"not ready after {START_TIMEOUT_S:.0f} s; {self.tail()}") from error
        if not line:
            raise DemoError(f"a process ended at once; {self.tail()}")
        return line

    def tail(self) -> str:
        """Return where the log is and how it ends."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n".join([f"its log is {self.log} and ends with", *lines])

    async def stop(self) -> None:
        """End the child and its group: politely, then by force. A second Ctrl-C only shortens the wait."""
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self.process.wait()
        except TimeoutError:
            log.warning("process %d did not end within %g s and is killed", self.process.pid, STOP_TIMEOUT_S)
        finally:
            self._signal(signal.SIGKILL)  # Also for what the child may have left in its group.
        await self.process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


@contextlib.asynccontextmanager
async def _child(arguments: Sequence[str], log: Path) -> AsyncIterator[_Child]:
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "warmfront", *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
    child = _Child(process, log)
    try:
        yield child
    finally:
        await child.stop()


async def _until_ready(fleet: Fleet, router: _Child, clock: Clock) -> None:
    """Wait until the router sees every engine ready with live events and exact tokens."""
    deadline_s = clock.now_s() + START_TIMEOUT_S
    seen: Any = "nothing"
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2.0)) as session:
        while clock.now_s() < deadline_s:
            if router.process.returncode is not None:
                raise DemoError(f"the router ended with status {router.process.returncode}; {router.tail()}")
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(fleet.router + "/ready") as response:
                    seen = await response.json()
                if _all_live(seen, len(fleet.engines)):
                    return
            await asyncio.sleep(POLL_INTERVAL_S)
    raise DemoError(f"the router is not ready after {START_TIMEOUT_S:.0f} s, /ready says {seen}; {router.tail()}")


def _all_live(ready: dict[str, Any], engines: int) -> bool:
    pools = ready.get("pools", [])
    return bool(ready.get("ready")) and any(
        pool["ready"] == engines and pool["events"]["live"] == engines and pool["tokens"] != "loading" for pool in pools
    )


def _free_ports(wanted: Sequence[int]) -> list[int]:
    """Return each wanted port that is free, and one of the kernel's choice for the others; held together to differ."""
    with contextlib.ExitStack() as stack:
        return [stack.enter_context(_listener(port)).getsockname()[1] for port in wanted]


def _listener(port: int) -> socket.socket:
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError:
        return socket.create_server(("127.0.0.1", 0))
