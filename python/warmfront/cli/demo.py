"""`warmfront demo`: see prefix routing beat round robin on this machine."""

from __future__ import annotations

import sys

import click
from rich.console import Console

from warmfront.clock import MonotonicClock
from warmfront.config import PolicyConfig
from warmfront.demo.processes import DemoError
from warmfront.demo.run import PHASE_SECONDS, DemoOptions, run_until_signal
from warmfront.demo.workload import MIX

TERMINATED = 130
"""Exit status after Ctrl-C, as shells have it."""


@click.command("demo", short_help="Compare round robin with prefix routing on embedded engines.")
@click.option("--seconds", type=click.FloatRange(min=1), default=PHASE_SECONDS, show_default=True,
              help="Length of each phase.")  # fmt: skip
@click.option("--rate", type=click.FloatRange(min=0.1), default=MIX.rate, show_default=True,
              help="Conversations that start in a second.")  # fmt: skip
@click.option("--engines", type=click.IntRange(min=1), default=4, show_default=True, help="Embedded engines.")
@click.option("--baseline", default="round_robin", show_default=True, help="Policy of the first phase.")
@click.option("--policy", default=PolicyConfig().name, show_default=True, help="Policy of the second phase.")
@click.option("--seed", default=1, show_default=True, help="Seed of the traffic.")
@click.option(
    "--keep",
    is_flag=True,
    help="Leave the second fleet running, on ports 8080 and 8081 if free, and print commands to look around.",
)
def command(seconds: float, rate: float, engines: int, baseline: str, policy: str, seed: int, keep: bool) -> None:
    """Start embedded engines and the router, send the same traffic under two policies, print one table."""
    options = DemoOptions(
        policies=(baseline, policy), engines=engines, seconds=seconds, rate=rate, seed=seed, keep=keep
    )
    console = Console()
    try:
        if not run_until_signal(options, console, MonotonicClock()) and not keep:
            sys.exit(TERMINATED)
    except DemoError as error:
        raise click.ClickException(str(error)) from error
