"""`warmfront serve` as a process, and what its admin API tells."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support import wire
from support.service import Service, free_port, wait_for

from .mirror import Mirror

CATCH_UP_TIMEOUT_S = 10.0


class Router(Service):
    """One router over the given replicas, with nothing configured but what the test is about."""

    name = "warmfront"
    health_path = "/ready"
    start_timeout_s = 90.0  # it loads a tokenizer and proves it against the engine first

    def __init__(self, log: Path, replicas: list[str], *, policy: str | None = None) -> None:
        super().__init__(log)
        self.replicas = replicas
        self.policy = policy
        self.admin_port = free_port()

    def command(self) -> list[str]:
        command = [str(Path(sys.executable).parent / "warmfront"), "serve", "--listen", f"127.0.0.1:{self.port}"]
        for url in self.replicas:
            command += ["--replica", url]
        command += ["--set", f"control.admin_listen=127.0.0.1:{self.admin_port}"]
        if self.policy is not None:
            command += ["--set", f"router.policy.name={self.policy}"]
        return command

    def explain(self, path: str, body: dict[str, Any]) -> dict[str, int]:
        """Return for each replica how many leading prompt tokens of the request it holds by events alone."""
        answer = wire.post(f"http://127.0.0.1:{self.admin_port}/admin/explain?path={path}", body)
        assert answer.status == 200, answer.body
        rows = json.loads(answer.body)["replicas"]
        return {row["id"]: row["overlap"]["confirmed"] for row in rows}

    def fleet(self) -> Any:
        """Return what `GET /admin/fleet` answers."""
        answer = wire.get(f"http://127.0.0.1:{self.admin_port}/admin/fleet")
        assert answer.status == 200, answer.body
        return json.loads(answer.body)

    def accuracy(self) -> list[dict[str, Any]]:
        """Return each replica's comparison of predicted and reported tokens."""
        return [row["router"]["accuracy"] for pool in self.fleet()["pools"] for row in pool["replicas"]]

    def catch_up(self, *mirrors: Mirror) -> None:
        """Block until the router has applied every event that the engines have published since they started."""
        published = {mirror.url: mirror.refresh() for mirror in mirrors}
        wanted = {url: sequence for url, sequence in published.items() if sequence >= 0}

        def is_there() -> bool:
            applied = dict(_sequences(self.fleet()))
            return all(wire.at(applied, url, -1) == sequence for url, sequence in wanted.items())

        wait_for(is_there, f"events applied up to {wanted}", timeout_s=CATCH_UP_TIMEOUT_S)


def _sequences(node: Any) -> Iterator[tuple[str, int]]:
    """Find each replica's URL and last applied sequence number, wherever the answer nests them."""
    if isinstance(node, list):
        for item in node:
            yield from _sequences(item)
    elif isinstance(node, dict):
        events = node.get("events")
        if isinstance(events, dict) and "url" in node and events.get("last_sequence") is not None:
            yield node["url"], events["last_sequence"]
        for value in node.values():
            yield from _sequences(value)
