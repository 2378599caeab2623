"""The live port: the core's two queues, and the router between them on the process's main thread.

The loop waits without the GIL, decides, hands commands back, and ends when the core has drained. If the router fails,
the process ends with the error: a router that decides nothing must not look alive.
"""

from __future__ import annotations

import gc
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from warmfront import core
from warmfront.config import Config, ConfigSources, core_config
from warmfront.types import Command, Event, Overlap, Request, RequestId, Slot

if TYPE_CHECKING:
    from warmfront.router.record import Stepper

COLLECT_AFTER_OBJECTS = 100_000
"""New objects after which the collector runs; Python's own 700 make it a part of every few decisions."""

_events = msgspec.msgpack.Decoder(list[Event])
_commands = msgspec.msgpack.Encoder()


class LiveIndex:
    """The core's index, asked by request id: hashes never cross the boundary."""

    def __init__(self, port: core.Port) -> None:
        self._port = port

    def overlap(self, request: Request) -> Overlap:
        """Return the columns of the request's pool.

        Raises:
            UnknownRequestError: The client has left.
        """
        return Overlap(*self._port.overlap(request.id))

    def predict(self, request: Request, slot: Slot) -> None:
        """Note that `slot` will hold the prompt, so that the next decision of the batch sees it.

        Raises:
            UnknownRequestError: The client has left.
        """
        self._port.predict(request.id, slot)

    def release(self, request_id: RequestId) -> None:
        """Do nothing: the core's in-flight guard releases by itself."""


class LiveMeter:
    """What only the router knows, written into the core's metric registry."""

    def __init__(self, port: core.Port) -> None:
        self._port = port

    def count(self, name: str, labels: tuple[str, ...], n: float) -> None:
        """Add to a counter."""
        self._port.count(name, labels, int(n))

    def observe(self, name: str, labels: tuple[str, ...], value: float) -> None:
        """Add one observation to a histogram."""
        self._port.observe(name, labels, value)

    def set(self, name: str, labels: tuple[str, ...], value: float) -> None:
        """Set a gauge."""
        self._port.set(name, labels, value)


def drive(port: core.Port, router: Stepper) -> None:
    """Decide until the core has drained. An empty batch says that nothing happened for a while."""
    while (batch := port.receive()) is not None:
        commands: list[Command] = router.step(_events.decode(batch) if batch else [])
        if commands:
            port.send(_commands.encode(commands))


def serve(config: Config, sources: ConfigSources | None = None) -> None:
    """Serve until a termination signal, then until streams have ended or the grace time is over.

    Args:
        config: Validated.
        sources: Where it was read from, to read it again while the router runs; `None`: it cannot be.

    Raises:
        ConfigError: An address cannot be bound, a file cannot be read, or the policy is not known; `preflight.check`
            finds most of that before anything has started.
    """
    # The core handles both signals; Python's own handler would raise in the middle of a step.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    with tempfile.TemporaryDirectory(prefix="warmfront-") as folder:
        command, socket = _control(config, sources, Path(folder))
        port = core.Port(core_config(config, control_command=command, control_socket=socket))
        # Clients are accepted and the control process starts; what is slow to import comes beside that.
        from warmfront.router.record import open_router

        router = open_router(config.router, LiveIndex(port), meter=LiveMeter(port))
        # Start-up objects live as long as the process, and a step leaves no cycles: the collector has little to find
        # and looks for it rarely.
        gc.collect()
        gc.freeze()
        gc.set_threshold(COLLECT_AFTER_OBJECTS)
        drive(port, router)
        port.join()  # the last snapshot is written by a thread of the core


def _control(config: Config, sources: ConfigSources | None, folder: Path) -> tuple[list[str], str]:
    """Write what the control process needs into a private folder; return its command line and its socket."""
    socket = str(folder / "control.sock")
    command = [sys.executable, "-m", "warmfront.control", "--socket", socket]
    command += ["--config", _write(folder / "config.json", config)]
    if sources is not None:
        command += ["--sources", _write(folder / "sources.json", sources)]
    return command, socket


def _write(path: Path, content: Config | ConfigSources) -> str:
    path.touch(mode=0o600)
    path.write_bytes(msgspec.json.encode(content))
    return str(path)
