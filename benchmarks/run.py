"""Measure warmfront against its targets and its peers; write everything measured as JSON.

`make bench` runs this and then `report.py`. Contenders take turns in rounds, so that a slow minute of the machine hits
all of them; each figure is kept, none is averaged here.

    python benchmarks/run.py            all contenders, three rounds, about 35 minutes
    python benchmarks/run.py --quick    warmfront and the index alone, about two minutes
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from contenders import (
    CONTENDERS,
    HARNESS_CORE,
    MODEL,
    Contender,
    Place,
    Started,
    model_folder,
    running,
    upstream,
    wait_for_rest,
)
from first_bytes import LEGS
from places import RESULTS, ROOT, TARGET
from ports import free_ports

BUILD_TIMEOUT_S = 3600.0
RUN_TIMEOUT_S = 900.0
SIZES = {"1 KB": 1024, "16 KB": 16 * 1024, "400 KB": 400 * 1024}
SHARED = 0.8
CONNECTIONS = 16
PACE_MS = 20
SILENT_STREAMS = 256
"""Enough that what they hold stands out from what an allocator keeps; few enough that a router that buffers without
bound fills far more than the target within the window."""
SILENT_WINDOWS = 3
"""How many windows long it is."""
SETTLING_STREAMS = 32
SILENT_EVENTS = 100_000
"""Events an upstream would send to a client that never reads: 17 MB a stream when nothing stops it."""
STEADY_STREAMS = 1000
STEADY_EVENTS = 200
STREAM_S = STEADY_EVENTS * PACE_MS / 1000
"""How long one stream lasts, and so how long it takes until as many end as begin."""


class Times(NamedTuple):
    """How long things are measured."""

    rounds: int
    warmup_s: float
    window_s: float


class StreamCase(NamedTuple):
    """One way to stress the relay."""

    name: str
    streams: int
    upstream: tuple[str, ...]
    reads: bool = True


STREAM_CASES = (
    StreamCase("flat out, 32 streams", 32, ()),
    StreamCase("paced, 256 streams", 256, ("--pace-ms", str(PACE_MS))),
    StreamCase("paced, 1,024 streams", 1024, ("--pace-ms", str(PACE_MS))),
    StreamCase("clients that never read", SILENT_STREAMS, ("--events", str(SILENT_EVENTS)), reads=False),
)
FULL = Times(rounds=3, warmup_s=2.0, window_s=5.0)
QUICK = Times(rounds=1, warmup_s=1.0, window_s=2.0)


def main() -> int:
    """Run what was asked for; exit 1 when a contender could not be measured."""
    arguments = _arguments()
    folder = arguments.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    times = QUICK if arguments.quick else FULL._replace(rounds=arguments.rounds)
    contenders = [contender for contender in CONTENDERS if _is_wanted(contender, arguments)]
    bench = Bench(build(), folder, times)
    results: dict[str, Any] = {"about": about(arguments.quick, times), "failures": []}
    failures: list[str] = results["failures"]
    core = [str(bench.binary("index_bench")), "--json", *(["--quick"] if arguments.quick else [])]
    results["core"] = lines_of("index_bench", core, failures)
    decision = [sys.executable, str(ROOT / "benchmarks/decision_bench.py")]
    results["decision"] = lines_of("decision_bench", decision, failures)
    results["requests"] = list(each_round(contenders, times, bench.requests, failures))
    streaming = [contender for contender in contenders if contender.relays]
    results["streams"] = list(each_round(streaming, times, bench.streams, failures))
    results["first_bytes"] = list(each_round(streaming, times, bench.first_bytes, failures))
    (folder / "benchmarks.json").write_text(json.dumps(results, indent=1) + "\n")
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for benchmarks.json and the routers' logs")
    parser.add_argument("--quick", action="store_true", help="one short round without peers")
    parser.add_argument("--rounds", type=int, default=FULL.rounds, help="turns of every contender")
    parser.add_argument("--only", action="append", default=[], help="part of a contender's name; may be repeated")
    return parser.parse_args()


def _is_wanted(contender: Contender, arguments: argparse.Namespace) -> bool:
    if arguments.only:
        return any(part in contender.name for part in arguments.only)
    return not arguments.quick or contender.distribution is None


def build() -> Path:
    """Build the harness in release mode; return the folder of the programs."""
    command = ["cargo", "build", "--release", "--locked", "-p", "warmfront-bench", "--bins"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=BUILD_TIMEOUT_S)
    return TARGET / "release"


def about(quick: bool, times: Times) -> dict[str, Any]:
    """Say what was measured, where and with what."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "command": "python benchmarks/run.py" + (" --quick" if quick else ""),
        "quick": quick,
        "commit": _output(["git", "rev-parse", "--short", "HEAD"]),
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
            "kernel": platform.release(),
            "load_average_at_start": round(os.getloadavg()[0], 1),
        },
        "versions": {"python": platform.python_version(), "rust": _output(["rustc", "--version"])},
        "parameters": {**times._asdict(), "connections": CONNECTIONS, "shared": SHARED, "pace_ms": PACE_MS},
        "contenders": [
            {
                "name": contender.name,
                "version": contender.distribution.version if contender.distribution else "this commit",
                "note": contender.note,
            }
            for contender in CONTENDERS
        ],
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _output(command: Sequence[str]) -> str:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def lines_of(name: str, command: Sequence[str], failures: list[str]) -> list[dict[str, Any]]:
    """Run a benchmark that prints one JSON object a line; one that fails is noted and gives none."""
    print(" ".join(command), file=sys.stderr, flush=True)
    pinned = ["taskset", "-c", str(HARNESS_CORE), *command]
    try:
        done = subprocess.run(pinned, capture_output=True, text=True, check=True, timeout=RUN_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        failures.append(f"{name}: {error}")
        return []
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def each_round(
    contenders: Sequence[Contender],
    times: Times,
    measure: Callable[[Contender, int], Iterator[dict[str, Any]]],
    failures: list[str],
) -> Iterator[dict[str, Any]]:
    """Let the contenders take turns; one that fails is noted and the others go on."""
    for number in range(times.rounds):
        for contender in contenders:
            try:
                for row in measure(contender, number):
                    print(json.dumps(row), file=sys.stderr, flush=True)
                    yield row
            except (RuntimeError, OSError, subprocess.SubprocessError) as error:
                failures.append(f"{contender.name}, round {number + 1}: {error}")


class Bench:
    """Runs one contender at a time against the harness."""

    def __init__(self, programs: Path, folder: Path, times: Times) -> None:
        self.programs = programs
        self.folder = folder
        self.times = times
        self.tokenizer = model_folder(folder / "model")

    def binary(self, name: str) -> Path:
        return self.programs / name

    def requests(self, contender: Contender, number: int) -> Iterator[dict[str, Any]]:
        """Measure requests of every size on one start of the router."""
        flags = ["--render", "true"] if contender.renders else []
        with upstream(self.binary("upstream"), flags) as servers, running(contender, self._place(servers)) as started:
            for size, size_bytes in SIZES.items():
                load = ["--bytes", str(size_bytes), "--shared", str(SHARED), "--connections", str(CONNECTIONS)]
                load += ["--max-tokens", "1"]  # what Dynamo's mock engines decode is no part of the comparison
                measured = self._drive("load", started.port, started.pid, [*load, "--seed", str(number + 1)])
                yield {"contender": contender.name, "size": size, "round": number, **measured}

    def streams(self, contender: Contender, number: int) -> Iterator[dict[str, Any]]:
        """Measure every way of streaming, each on a fresh start of the router, whose memory is of interest."""
        for case in STREAM_CASES:
            flags = ["--stream", "true", *case.upstream]
            with (
                upstream(self.binary("upstream"), flags) as servers,
                running(contender, self._place(servers)) as started,
            ):
                times = self.times
                if not case.reads:
                    self._settle(started)
                    times = times._replace(window_s=SILENT_WINDOWS * times.window_s)
                load = ["--connections", str(case.streams), "--reads", "true" if case.reads else "false"]
                load += ["--seed", str(number + 1)]
                measured = self._drive("sse", started.port, started.pid, load, times)
                yield {"contender": contender.name, "case": case.name, "round": number, **measured}

    def _settle(self, started: Started) -> None:
        """Let a router serve ordinary streams and come to rest, before its memory is compared with that at rest.

        Memory that was freed at start may stay resident until then and hide what silent streams hold, and more.
        """
        self._drive("sse", started.port, started.pid, ["--connections", str(SETTLING_STREAMS)])
        wait_for_rest(started.pid)

    def first_bytes(self, contender: Contender, number: int) -> Iterator[dict[str, Any]]:
        """Measure streams that begin at a steady rate: directly, through the router, and directly again."""
        flags = ["--stream", "true", "--eager", "true", "--pace-ms", str(PACE_MS), "--events", str(STEADY_EVENTS)]
        load = ["--arrivals-per-s", str(STEADY_STREAMS / STREAM_S), "--connections", str(2 * STEADY_STREAMS)]
        times = self.times._replace(warmup_s=STREAM_S + self.times.warmup_s)
        with upstream(self.binary("upstream"), flags) as servers, running(contender, self._place(servers)) as started:
            for leg, port in zip(LEGS, (servers[0], started.port, servers[0]), strict=True):
                seed = ["--seed", str(number + 1)]
                measured = self._drive("sse", port, started.pid, [*load, *seed], times)
                yield {"contender": contender.name, "leg": leg, "round": number, **measured}

    def _place(self, servers: list[int]) -> Place:
        port, side_port = free_ports(2)
        return Place(port, side_port, servers, self.folder, self.tokenizer)

    def _drive(
        self, program: str, port: int, pid: int, flags: Sequence[str], times: Times | None = None
    ) -> dict[str, Any]:
        lasting = times or self.times
        window = ["--warmup-s", str(lasting.warmup_s), "--window-s", str(lasting.window_s)]
        target = ["--target", f"127.0.0.1:{port}", "--pid", str(pid), "--model", MODEL]
        command = ["taskset", "-c", str(HARNESS_CORE), str(self.binary(program)), *target, *window, *flags]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=RUN_TIMEOUT_S)
        measured: dict[str, Any] = json.loads(done.stdout)
        return measured


if __name__ == "__main__":
    sys.exit(main())
