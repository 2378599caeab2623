"""What a restart of the router costs in cached tokens, with and without a snapshot, on the demo's workload.

Run: `python benchmarks/restart_bench.py [--seconds 20] [--engines 4] [--seed 1] [--quick] [--hide-events]`. Prints one
JSON line per case: the token hit rate (cached prompt tokens over all prompt tokens, as the engines report them) of the
conversations that start in the window before the restart and in the window after it. The last case restarts nothing:
its two windows differ by the conversations alone.

Each case has engines of its own, which stay; only the router is ended, by SIGTERM or SIGKILL, and started again.
Engines keep few event batches for replay (`--buffer`), as an engine does that has run for days: without a snapshot a
router learns what they hold by new events alone. `--hide-events`: the engines publish nothing, so all the router knows
is what it sent.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from warmfront.clock import MonotonicClock
from warmfront.demo.load import Progress, run_load
from warmfront.demo.report import summarise
from warmfront.demo.workload import MIX, Conversation, plan

START_TIMEOUT_S = 60.0
SNAPSHOT_INTERVAL_S = 2.0
MODEL = "demo"


class Child:
    """A process of this run, in a group of its own."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "warmfront", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )

    def first_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode().strip()

    def end(self, number: signal.Signals) -> None:
        """Signal the process alone, as a supervisor does; its own children must notice."""
        self.process.send_signal(number)
        self.process.wait(timeout=START_TIMEOUT_S)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def engines(options: argparse.Namespace, folder: Path) -> Iterator[list[str]]:
    anywhere = "tcp://127.0.0.1:0"
    arguments = ["engine", "--port", "0", "--preset", "demo", "--served-model-name", MODEL, "--seed", str(options.seed)]
    if options.hide_events:
        arguments += ["--no-kv-events"]
    else:
        arguments += ["--kv-events-endpoint", anywhere, "--kv-events-replay-endpoint", anywhere]
        arguments += ["--kv-events-buffer-steps", str(options.buffer)]
    children = [Child(arguments, folder / f"engine-{number}.log") for number in range(options.engines)]
    try:
        yield [child.first_line() for child in children]
    finally:
        for child in children:
            child.end(signal.SIGTERM)


class Router:
    """The router, which can be started more than once at the same ports."""

    def __init__(self, urls: list[str], folder: Path, *, snapshot: bool) -> None:
        self.url, self.admin = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        self._log = folder / "router.log"
        replicas = [argument for url in urls for argument in ("--replica", url)]
        settings = {
            "front.listen": self.url.removeprefix("http://"),
            "control.admin_listen": self.admin.removeprefix("http://"),
            "front.grace_s": "5",
        }
        if snapshot:
            settings |= {"snapshot.path": str(folder / "snapshot"), "snapshot.interval_s": str(SNAPSHOT_INTERVAL_S)}
        sets = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
        self._arguments = ["serve", *replicas, *sets]
        self._replicas = len(urls)
        self._child: Child | None = None

    def start(self) -> float:
        """Start and wait until it serves; return how long that took."""
        began_s = time.monotonic()
        self._child = Child(self._arguments, self._log)
        while not self._is_ready():
            if time.monotonic() - began_s > START_TIMEOUT_S:
                raise RuntimeError(f"the router is not ready; its log is {self._log}")
            time.sleep(0.02)
        return time.monotonic() - began_s

    def end(self, number: signal.Signals) -> None:
        assert self._child is not None
        self._child.end(number)

    def memory(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.admin}/admin/snapshot/state", timeout=10) as answer:
            state: dict[str, Any] = json.load(answer)
        return state

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=2) as answer:
                pools = json.load(answer)["pools"]
        except OSError:
            return False
        return bool(pools) and pools[0]["ready"] == self._replicas and pools[0]["tokens"] != "loading"


def window(conversations: list[Conversation], start_s: float, end_s: float) -> list[Conversation]:
    """Conversations that start in a window, as from its beginning."""
    inside = [each for each in conversations if start_s <= each.start_s < end_s]
    return [replace(each, start_s=each.start_s - start_s) for each in inside]


def measure(router: Router, conversations: list[Conversation]) -> dict[str, float]:
    progress = Progress(planned=sum(len(each.turns) for each in conversations))
    load = run_load([router.url], model=MODEL, conversations=conversations, progress=progress, clock=MonotonicClock())
    asyncio.run(load)
    summary = summarise(progress)
    return {
        "hit_rate": round(summary.hit_rate, 4),
        "errors": summary.errors,
        "ttft_p50_s": round(summary.ttft_p50_s, 4),
    }


def case(options: argparse.Namespace, *, ending: signal.Signals | None, snapshot: bool) -> dict[str, Any]:
    seconds = options.seconds
    planned = plan(replace(MIX, rate=options.rate), seconds=3 * seconds, seed=options.seed)
    with tempfile.TemporaryDirectory(prefix="warmfront-restart-") as name, engines(options, Path(name)) as urls:
        router = Router(urls, Path(name), snapshot=snapshot)
        router.start()
        try:
            measure(router, window(planned, 0, seconds))
            before = measure(router, window(planned, seconds, 2 * seconds))
            if snapshot and ending == signal.SIGKILL:
                time.sleep(SNAPSHOT_INTERVAL_S)  # the steady state: some snapshot is there, and it is not the newest
            start_s = 0.0
            if ending is not None:
                router.end(ending)
                start_s = router.start()
            after = measure(router, window(planned, 2 * seconds, 3 * seconds))
            memory = router.memory()
        finally:
            router.end(signal.SIGTERM)
    return {
        "ending": ending.name if ending is not None else "none",
        "snapshot": snapshot,
        "before": before,
        "after": after,
        "points_lost": round(100 * (before["hit_rate"] - after["hit_rate"]), 2),
        "start_s": round(start_s, 2),
        "restored": {key: memory["restored"][key] for key in ("replicas_restored", "facts", "refused")},
        "bytes": memory["bytes"],
        "write_s": memory["write_s"],
        "hold_s": memory["hold_s"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="length of each window")
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--rate", type=float, default=MIX.rate, help="conversations that start in a second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--buffer", type=int, default=300, help="event batches that engines keep for replay")
    parser.add_argument("--hide-events", action="store_true")
    parser.add_argument("--quick", action="store_true", help="SIGTERM with a snapshot, and no other case")
    parser.add_argument("--cases", help="0 SIGTERM, 1 SIGKILL, 2 SIGTERM without a snapshot, 3 no restart; all")
    options = parser.parse_args()
    cases: list[tuple[signal.Signals | None, bool]] = [
        (signal.SIGTERM, True),
        (signal.SIGKILL, True),
        (signal.SIGTERM, False),
        (None, True),
    ]
    if options.cases is not None:
        cases = [cases[int(number)] for number in options.cases.split(",")]
    for ending, snapshot in cases[:1] if options.quick else cases:
        print(json.dumps(case(options, ending=ending, snapshot=snapshot)), flush=True)


if __name__ == "__main__":
    main()
