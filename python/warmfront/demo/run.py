"""The demo from start to end."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from warmfront.clock import Clock
from warmfront.demo.display import shown
from warmfront.demo.load import Progress, run_load
from warmfront.demo.processes import ANY_PORTS, DEFAULT_PORTS, MODEL_NAME, DemoError, Fleet, running_fleet
from warmfront.demo.report import Summary, summarise, table
from warmfront.demo.workload import MIX, Conversation, plan

PHASE_SECONDS = 22.0
"""Two such phases, with starts and last answers, take about a minute on two free cores."""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the command line chooses."""

    policies: tuple[str, ...] = ("round_robin", "marginal_cost")
    """In this order, each with fresh engines; the last one stays up with `keep`."""
    engines: int = 4
    seconds: float = PHASE_SECONDS
    """How long conversations start in each phase; the last answers come a few seconds later."""
    rate: float = MIX.rate
    seed: int = 1
    keep: bool = False


async def run_demo(options: DemoOptions, console: Console, clock: Clock) -> None:
    """Run every policy over the same traffic and print the table.

    Raises:
        DemoError: A process failed, or no request succeeded; the message says where the logs are.
    """
    logs = Path(tempfile.mkdtemp(prefix="warmfront-demo-"))
    conversations = plan(replace(MIX, rate=options.rate), seconds=options.seconds, seed=options.seed)
    turns = sum(len(conversation.turns) for conversation in conversations)
    console.print(
        f"{turns} requests in {len(conversations)} conversations, {options.rate:g} conversations/s, seed {options.seed}"
    )
    summaries: list[tuple[str, Summary]] = []
    try:
        for policy in options.policies:
            console.print(f"starting {options.engines} engines and the router with policy {policy}")
            is_last = len(summaries) == len(options.policies) - 1
            cold = running_fleet(
                engines=options.engines,
                policy=policy,
                seed=options.seed,
                logs=logs,
                clock=clock,
                ports=DEFAULT_PORTS if options.keep and is_last else ANY_PORTS,
            )
            async with cold as fleet:
                progress = Progress(planned=turns)
                async with shown(console, policy, progress):
                    await run_load(
                        [fleet.router], model=MODEL_NAME, conversations=conversations, progress=progress, clock=clock
                    )
                summaries.append((policy, summarise(progress)))
                _check(progress, console, logs)
                if is_last:
                    console.print(table(summaries, engines=options.engines))
                    await _look_around(options, console, fleet, _sample(conversations, logs))
    finally:  # also when Ctrl-C ends a kept fleet
        if len(summaries) == len(options.policies) and not any(summary.errors for _policy, summary in summaries):
            shutil.rmtree(logs)


def _check(progress: Progress, console: Console, logs: Path) -> None:
    """Say which requests failed; the demo goes on unless all of them did."""
    if not progress.errors:
        return
    problem = f"{len(progress.errors)} requests failed, the first with {progress.errors[0]}; logs are in {logs}"
    if not progress.outcomes:
        raise DemoError(problem)
    console.print(problem, soft_wrap=True, markup=False)


def _sample(conversations: Sequence[Conversation], logs: Path) -> Path:
    """Write one of the requests that were sent, a system prompt with a question, beside the logs."""
    one = next((each for each in conversations if each.system is not None), None)
    messages = [{"role": "user", "content": one.turns[0] if one else "What is a warm front?"}]
    if one:
        messages.insert(0, {"role": "system", "content": one.system or ""})
    path = logs / "request.json"
    path.write_text(json.dumps({"model": MODEL_NAME, "messages": messages, "max_tokens": 16}), encoding="utf-8")
    return path


def look_around_commands(fleet: Fleet, sample: Path) -> list[str]:
    """Return what to type into another terminal; `--admin` is left out where it is the default.

    Args:
        fleet: What runs.
        sample: File with the body of a chat request whose prefix some engine holds.
    """
    admin = "" if fleet.admin == f"http://127.0.0.1:{DEFAULT_PORTS[1]}" else f" --admin {fleet.admin}"
    return [
        f"curl -si {fleet.router}/v1/chat/completions -H 'content-type: application/json' -d @{sample}",
        f"warmfront explain{admin} {sample}",
        f"warmfront fleet{admin}",
        f"curl -s {fleet.router}/metrics",
    ]


async def _look_around(options: DemoOptions, console: Console, fleet: Fleet, sample: Path) -> None:
    """Say how to see more; with `keep`, wait for Ctrl-C."""
    if not options.keep:
        console.print("look around further: warmfront demo --keep")
        return
    console.print(
        f"still running: router {fleet.router}, admin {fleet.admin}, {len(fleet.engines)} engines", soft_wrap=True
    )
    for line in look_around_commands(fleet, sample):
        console.print("  " + line, soft_wrap=True, markup=False, highlight=False)
    console.print("Ctrl-C stops everything")
    await asyncio.Event().wait()


def run_until_signal(options: DemoOptions, console: Console, clock: Clock) -> bool:
    """Run the demo; SIGINT, SIGTERM and SIGHUP stop it and everything it started.

    Returns:
        False when a signal stopped it.
    """
    try:
        asyncio.run(_cancellable(options, console, clock))
    except asyncio.CancelledError:
        return False
    return True


async def _cancellable(options: DemoOptions, console: Console, clock: Clock) -> None:
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, task.cancel)
    await run_demo(options, console, clock)
