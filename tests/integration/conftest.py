"""Embedded engines and a router in front of them, as processes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import pytest
from support.service import Service, free_port

WARMFRONT = str(Path(sys.executable).parent / "warmfront")
Start = Callable[[Service], Service]


class Located(Protocol):
    """Something that serves at a URL."""

    @property
    def url(self) -> str: ...


class EmbeddedEngine(Service):
    """`warmfront engine` on ports that outlive a restart."""

    name = "warmfront engine"

    def __init__(self, log: Path) -> None:
        super().__init__(log)
        self.events_port, self.replay_port = free_port(), free_port()

    def command(self) -> list[str]:
        return [
            *(WARMFRONT, "engine", "--port", str(self.port), "--speed", "4"),
            *("--kv-events-endpoint", f"tcp://127.0.0.1:{self.events_port}"),
            *("--kv-events-replay-endpoint", f"tcp://127.0.0.1:{self.replay_port}"),
        ]


class Serve(Service):
    """`warmfront serve` over the given engines."""

    name = "warmfront serve"
    health_path = "/ready"

    def __init__(self, log: Path, engines: Sequence[Located], *settings: str) -> None:
        super().__init__(log)
        self.engines, self.settings = engines, settings
        self.admin_port = free_port()
        self.admin_url = f"http://127.0.0.1:{self.admin_port}"

    def command(self) -> list[str]:
        command = [WARMFRONT, "serve", "--listen", f"127.0.0.1:{self.port}"]
        command += ["--admin-listen", f"127.0.0.1:{self.admin_port}"]
        for engine in self.engines:
            command += ["--replica", engine.url]
        for setting in self.settings:
            command += ["--set", setting]
        return command


@pytest.fixture
def start() -> Iterator[Start]:
    """Start services and wait for each; all of them end with the test."""
    with ExitStack() as stack:

        def begin(service: Service) -> Service:
            service.start()
            stack.callback(service.kill)
            service.wait()
            return service

        yield begin
