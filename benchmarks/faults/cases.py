"""The faults: how each is made, and how it ends.

A fault begins at second 0 and, where it heals, heals at second `HEALS_S`. Signals go to whole processes; what a process
does while it lives is made by the [doors](doors.py). The first engine is the victim of whatever befalls one of them.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from faults.world import Source, World

HEALS_S = 8.0
Act = Callable[[World], Awaitable[None]]


async def _nothing(_: World) -> None:
    """Do not heal."""


@dataclass(frozen=True)
class Case:
    """One fault."""

    name: str
    group: str
    what: str
    begin: Act
    heal: Act = _nothing
    peers: bool = False
    """Can be done to other routers as well."""
    settings: dict[str, Any] = field(default_factory=dict)
    heals_s: float = HEALS_S
    source: Source = "config"
    doors: bool = False
    """The router reaches the engines' HTTP ports through doors. Without them a dead engine refuses connections."""


def _signal_engine(number: signal.Signals) -> Act:
    async def act(world: World) -> None:
        world.engines[0].signal(number)

    return act


async def _restart_engine(world: World) -> None:
    await world.engines[0].end()
    world.engines[0].start()


def _posts(mode: str, *, all_engines: bool = False) -> Act:
    async def act(world: World) -> None:
        for door in world.doors if all_engines else world.doors[:1]:
            door.posts = mode

    return act


def _metrics(mode: str) -> Act:
    async def act(world: World) -> None:
        world.doors[0].metrics = mode

    return act


def _events(live: str = "pass", replay: str = "pass") -> Act:
    async def act(world: World) -> None:
        for door in world.events:
            door.live, door.replay = live, replay

    return act


def _signal_control(number: signal.Signals) -> Act:
    async def act(world: World) -> None:
        for pid in world.router.children("warmfront.control"):
            os.kill(pid, number)

    return act


def _signal_router(number: signal.Signals) -> Act:
    async def act(world: World) -> None:
        world.router.signal(number)

    return act


async def _restart_router(world: World) -> None:
    await world.router.end()
    world.router.start()


async def _kill_router(world: World) -> None:
    world.router.signal(signal.SIGKILL)


async def _kill_and_restart_router(world: World) -> None:
    await _kill_router(world)
    await _restart_router(world)


def _servers_file(text: str | None) -> Act:
    """Replace the list of servers, or take it away; the true one is kept beside it."""

    async def act(world: World) -> None:
        kept = world.servers_file.with_suffix(".kept")
        world.servers_file.replace(kept)
        if text is not None:
            world.servers_file.write_text(text, encoding="utf-8")

    return act


async def _restore_servers_file(world: World) -> None:
    world.servers_file.with_suffix(".kept").replace(world.servers_file)


async def _take_snapshot_folder(world: World) -> None:
    (world.folder / "memory").rename(world.folder / "memory.away")


async def _return_snapshot_folder(world: World) -> None:
    (world.folder / "memory.away").rename(world.folder / "memory")


def _names(*, is_silent: bool) -> Act:
    async def act(world: World) -> None:
        assert world.names is not None
        world.names.is_silent = is_silent

    return act


def _disk(bytes_max: int) -> Act:
    """Bound the size of the files that the router writes: what a write beyond it sees is what a full disk gives."""

    async def act(world: World) -> None:
        assert world.router.child is not None
        resource.prlimit(world.router.child.pid, resource.RLIMIT_FSIZE, (bytes_max, resource.RLIM_INFINITY))

    return act


SNAPSHOT = {"snapshot": {"path": "FOLDER/memory/snapshot", "interval_s": 2.0}}

CASES = (
    Case("engine-killed", "engine", "SIGKILL of an engine; it stays away", _signal_engine(signal.SIGKILL), peers=True),
    Case(
        "engine-restarted",
        "engine",
        "SIGKILL of an engine; after a while it comes back, empty",
        _signal_engine(signal.SIGKILL),
        _restart_engine,
        peers=True,
    ),
    Case(
        "engine-frozen",
        "engine",
        "SIGSTOP of an engine, SIGCONT after a while",
        _signal_engine(signal.SIGSTOP),
        _signal_engine(signal.SIGCONT),
        peers=True,
    ),
    Case("engine-stopped", "engine", "SIGTERM of an engine", _signal_engine(signal.SIGTERM), peers=True),
    Case(
        "errors-500",
        "engine",
        "an engine answers 500 to everything",
        _posts("error_500"),
        _posts("pass"),
        peers=True,
        doors=True,
    ),
    Case(
        "all-errors-500",
        "engine",
        "every engine answers 500 to everything",
        _posts("error_500", all_engines=True),
        _posts("pass", all_engines=True),
        peers=True,
        doors=True,
    ),
    Case(
        "busy-503",
        "engine",
        "an engine answers 503 with Retry-After",
        _posts("busy_503"),
        _posts("pass"),
        peers=True,
        doors=True,
    ),
    Case(
        "busy-429",
        "engine",
        "an engine answers 429 with Retry-After",
        _posts("busy_429"),
        _posts("pass"),
        peers=True,
        doors=True,
    ),
    Case(
        "error-chunk",
        "engine",
        "an engine answers 200 and an error as the first event of the stream",
        _posts("error_chunk"),
        _posts("pass"),
        peers=True,
        doors=True,
    ),
    Case(
        "reset",
        "engine",
        "an engine takes requests and closes the connection",
        _posts("reset"),
        _posts("pass"),
        peers=True,
        doors=True,
    ),
    Case(
        "silent",
        "engine",
        "an engine takes requests and never answers; its health check does",
        _posts("silent"),
        _posts("pass"),
        peers=True,
        doors=True,
    ),
    Case(
        "cut",
        "engine",
        "an engine cuts every stream after three chunks",
        _posts("cut"),
        _posts("pass"),
        peers=True,
        doors=True,
    ),
    Case("events-lost", "events", "one batch of events in five is lost", _events("lose"), _events()),
    Case("events-delayed", "events", "events come three seconds late", _events("delay"), _events()),
    Case("events-reordered", "events", "neighbouring batches swap places", _events("reorder"), _events()),
    Case("events-duplicated", "events", "every batch comes twice", _events("duplicate"), _events()),
    Case("events-stopped", "events", "no events come; the sockets stay open", _events("stop"), _events()),
    Case("events-garbage", "events", "one message in five is noise", _events("garbage"), _events()),
    Case("events-clock", "events", "the engines' clocks jump back by an hour", _events("clock"), _events()),
    Case(
        "replay-refused",
        "events",
        "one batch in five is lost and replay is never answered",
        _events("lose", "refuse"),
        _events(),
    ),
    Case(
        "replay-truncated",
        "events",
        "one batch in five is lost and replay gives half of what is asked for",
        _events("lose", "truncate"),
        _events(),
    ),
    Case(
        "metrics-stale", "metrics", "an engine's metrics stand still", _metrics("stale"), _metrics("pass"), doors=True
    ),
    Case(
        "metrics-idle",
        "metrics",
        "an engine says that it is idle, always",
        _metrics("idle"),
        _metrics("pass"),
        doors=True,
    ),
    Case(
        "metrics-full",
        "metrics",
        "an engine says that it is full, always",
        _metrics("full"),
        _metrics("pass"),
        doors=True,
    ),
    Case("metrics-gone", "metrics", "an engine's metrics answer 500", _metrics("error"), _metrics("pass"), doors=True),
    Case(
        "metrics-slow",
        "metrics",
        "an engine's metrics take half a minute",
        _metrics("slow"),
        _metrics("pass"),
        doors=True,
    ),
    Case(
        "list-gone",
        "sources",
        "the file with the list of servers disappears",
        _servers_file(None),
        _restore_servers_file,
        source="file",
    ),
    Case(
        "list-garbage",
        "sources",
        "the file with the list of servers holds garbage",
        _servers_file("{half a lis"),
        _restore_servers_file,
        source="file",
    ),
    Case(
        "dns-gone",
        "sources",
        "the name server that tells the servers falls silent",
        _names(is_silent=True),
        _names(is_silent=False),
        source="dns",
    ),
    Case(
        "disk-full",
        "sources",
        "the disk of the snapshot is full",
        _disk(4096),
        _disk(resource.RLIM_INFINITY),
        settings=SNAPSHOT,
    ),
    Case(
        "snapshot-folder-gone",
        "sources",
        "the folder of the snapshot disappears",
        _take_snapshot_folder,
        _return_snapshot_folder,
        settings=SNAPSHOT,
    ),
    Case("control-killed", "router", "SIGKILL of the control process", _signal_control(signal.SIGKILL)),
    Case(
        "control-frozen",
        "router",
        "SIGSTOP of the control process, SIGCONT after a while",
        _signal_control(signal.SIGSTOP),
        _signal_control(signal.SIGCONT),
    ),
    Case(
        "router-frozen",
        "router",
        "SIGSTOP of the router, SIGCONT after three seconds: its clock jumps",
        _signal_router(signal.SIGSTOP),
        _signal_router(signal.SIGCONT),
        peers=True,
        heals_s=3.0,
    ),
    Case(
        "router-killed", "router", "SIGKILL of the router; started again at once", _kill_and_restart_router, peers=True
    ),
    Case(
        "router-restarted",
        "router",
        "SIGTERM of the router; started again when it has ended",
        _restart_router,
        peers=True,
    ),
    Case(
        "router-killed-snapshot",
        "router",
        "SIGKILL of the router, which keeps a snapshot; started again at once",
        _kill_and_restart_router,
        settings=SNAPSHOT,
    ),
    Case(
        "router-restarted-snapshot",
        "router",
        "SIGTERM of the router, which keeps a snapshot; started again when it has ended",
        _restart_router,
        settings=SNAPSHOT,
    ),
)
