"""`warmfront simulate`: policies against regimes, on virtual time."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click
from rich.table import Table

from warmfront.cli.output import show, table, width
from warmfront.config import PolicyConfig, RouterConfig, load_with_sources
from warmfront.errors import ConfigError

if TYPE_CHECKING:
    from warmfront.lab.results import Results

Number = TypeVar("Number", int, float)

POLICIES = f"{PolicyConfig().name},least_loaded,round_robin"
"""The default policy, and two that know nothing of caches: what it has to beat to be worth anything."""
INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""


def _numbers(kind: Callable[[str], Number], least: Number) -> Callable[..., tuple[Number, ...]]:
    def parse(_: click.Context, parameter: click.Parameter, text: str | None) -> tuple[Number, ...]:
        if text is None:
            return ()
        try:
            values = tuple(kind(part) for part in text.split(","))
        except ValueError as error:
            raise click.BadParameter(f"{text!r} is no list of numbers", param=parameter) from error
        if not all(least <= value < float("inf") for value in values):
            raise click.BadParameter(f"{text!r} is out of range", param=parameter)
        return values

    return parse


@click.command(name="simulate", short_help="Run policies against regimes, on virtual time.")
@click.argument("regimes", nargs=-1, metavar="REGIME_OR_FILE...")
@click.option("--policy", default=POLICIES, show_default=True, metavar="A,B,...", help="Policies; `all` for every one.")
@click.option("--load", "loads", callback=_numbers(float, 1e-9), metavar="X,Y,...",
              help="Loads in the regime's unit. Default: those it names.")  # fmt: skip
@click.option("--seed", "seeds", default="1", callback=_numbers(int, 0), show_default=True, metavar="S,T,...",
              help="Seeds; figures are means over them.")  # fmt: skip
@click.option("--requests", type=click.IntRange(min=1), help="Requests in a run. Default: what the regime says.")
@click.option("--search", is_flag=True, help="Also find the highest load that holds the targets.")
@click.option("--jobs", type=click.IntRange(min=1), help="Processes. Default: one a core.")
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Write all figures and what reproduces them.")  # fmt: skip
@click.option("--html", "html_path", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Write one page with plots. Needs `pip install 'warmfront[lab]'`.")  # fmt: skip
@click.option("--set", "settings", multiple=True, metavar="PATH=VALUE",
              help="One value of the router, for example router.policy.seed=2; repeatable.")  # fmt: skip
@click.option("--list", "is_listing", is_flag=True, help="List regimes and policies and end.")
def command(
    regimes: tuple[str, ...],
    policy: str,
    loads: tuple[float, ...],
    seeds: tuple[int, ...],
    requests: int | None,
    search: bool,
    jobs: int | None,
    json_path: Path | None,
    html_path: Path | None,
    settings: tuple[str, ...],
    is_listing: bool,
) -> None:
    """Run every policy in every regime and say who wins, and by how much.

    REGIME_OR_FILE is the name of a shipped regime or a file of the same form. A score of 1.00 is the best policy of
    that column; ▼ marks one more than 3 % behind it.
    """
    from warmfront.lab import plan as planning  # loads the router and the core
    from warmfront.lab import results_file
    from warmfront.lab.display import bar
    from warmfront.lab.table import tables

    if is_listing:
        show(*_lists())
        return
    if not regimes:
        raise click.UsageError("give a regime, or --list to see them")
    render = _renderer() if html_path else None
    _require_writable(json_path, html_path)
    plan = planning.Plan(
        regimes=planning.adjusted(regimes, loads=loads, requests=requests),
        policies=planning.known_policies([name.strip() for name in policy.split(",")]),
        seeds=tuple(dict.fromkeys(seeds)),
        config=_router_config(settings),
        is_searching=search,
    )
    tasks = plan.tasks()
    try:
        with bar("simulating") as advanced:
            finished = planning.carry_out(tasks, jobs=jobs or os.cpu_count() or 1, advanced=advanced)
    except KeyboardInterrupt:
        click.echo("interrupted: no results", err=True)
        sys.exit(INTERRUPTED)
    results = plan.results(finished, command=_typed())
    show(*tables(results, width=width()))
    if json_path:
        results_file.write(results, json_path)
    if html_path and render:
        html_path.write_text(render(results), encoding="utf-8")


def _lists() -> Iterator[Table | str]:
    from warmfront.lab import plan, regime

    regimes = table("regime", "loads", "unit", "what it is", title="regimes")
    for name in regime.names():
        found = regime.load(name)
        regimes.add_row(name, ", ".join(f"{load:g}" for load in found.loads), found.unit, found.title)
    yield regimes
    yield ""
    yield "policies: " + ", ".join(plan.policies())


def _router_config(settings: Sequence[str]) -> RouterConfig:
    config, sources = load_with_sources(environment={}, overrides=settings)
    for path in sources:
        if path == "router.policy.name":
            raise ConfigError("--set router.policy.name: give --policy instead")
        if not path.startswith("router."):
            raise ConfigError(f"--set {path}: a simulation has only a router; expected router.…")
    return config.router


def _renderer() -> Callable[[Results], str]:
    try:
        from warmfront.lab.html import render
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("warmfront"):
            raise
        raise ConfigError(f"--html needs {error.name}: pip install 'warmfront[lab]'") from error
    return render


def _require_writable(*paths: Path | None) -> None:
    """Find out before an hour of work that its result has nowhere to go."""
    for path in paths:
        if path is not None and not path.resolve().parent.is_dir():
            raise ConfigError(f"{path}: there is no directory {path.parent}")


def _typed() -> str:
    return shlex.join(["warmfront", *sys.argv[1:]])
