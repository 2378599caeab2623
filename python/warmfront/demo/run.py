"""The demo from start to end."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from warmfront.clock import Clock
from warmfront.demo.display import shown
from warmfront.demo.load import Progress, run_load
from warmfront.demo.processes import MODEL_NAME, DemoError, Fleet, running_fleet
from warmfront.demo.report import Summary, summarise, table
from warmfront.demo.workload import MIX, plan

PHASE_SECONDS = 25.0
"""Two such phases, with starts and ends, take about 70 s."""


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
        DemoError: A process failed; the message says where its log is.
    """
    logs = Path(tempfile.mkdtemp(prefix="warmfront-demo-"))
    conversations = plan(replace(MIX, rate=options.rate), seconds=options.seconds, seed=options.seed)
    turns = sum(len(conversation.turns) for conversation in conversations)
    console.print(
        f"{turns} requests in {len(conversations)} conversations, {options.rate:g} conversations/s, seed {options.seed}"
    )
    summaries: list[tuple[str, Summary]] = []
    for policy in options.policies:
        console.print(f"starting {options.engines} engines and the router with policy {policy}")
        fleet_of_policy = running_fleet(
            engines=options.engines, policy=policy, seed=options.seed, logs=logs, clock=clock
        )
        async with fleet_of_policy as fleet:
            progress = Progress(planned=turns)
            async with shown(console, policy, progress):
                await run_load(
                    [fleet.router], model=MODEL_NAME, conversations=conversations, progress=progress, clock=clock
                )
            summaries.append((policy, summarise(progress)))
            if policy == options.policies[-1]:
                await _conclude(options, console, summaries, fleet)
            if not progress.outcomes:
                raise DemoError(f"no request succeeded ({progress.errors[0]}); logs are in {logs}")


async def _conclude(options: DemoOptions, console: Console, summaries: list[tuple[str, Summary]], fleet: Fleet) -> None:
    console.print(table(summaries, engines=options.engines))
    if not options.keep:
        console.print("look around further: warmfront demo --keep")
        return
    question = f'{{"model": "{MODEL_NAME}", "messages": [{{"role": "user", "content": "Where does this go?"}}]}}'
    console.print(f"router {fleet.router}, admin {fleet.admin}, engines {' '.join(fleet.engines)}", soft_wrap=True)
    for line in (
        f"curl -s {fleet.router}/v1/chat/completions -H 'content-type: application/json' -d '{question}'",
        f"curl -s {fleet.admin}/admin/explain -H 'content-type: application/json' -d '{question}'",
        f"curl -s {fleet.admin}/admin/fleet",
        f"curl -s {fleet.router}/metrics",
    ):
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
