"""`python -m warmfront.lab.page`: run every policy in every regime, then write the page about it.

What is done is kept in a cache file, so a run can be stopped and continued, and a change of one policy repeats only
that policy's runs. The page is made of what the cache holds for the code as it is now: `--only` and `--policy` limit
what is run, not what is shown. Sources must not change while it runs, since a worker may import one later.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from pathlib import Path

import click

from warmfront.clock import MonotonicClock
from warmfront.errors import ConfigError, WarmfrontError
from warmfront.lab import cache, grid, regime, repeats, results_file
from warmfront.lab import contest as contests
from warmfront.lab.cells import Task
from warmfront.lab.plan import known_policies, policies

SEARCHED = ("cacheroute-long", "cacheroute-paper", "llmd-ladder", "llmd-shared-prefix")
"""Regimes whose highest load is looked for unless others are named: a search costs as much as four rows of cells."""
SEEDS = "1,2"
INTERRUPTED = 130


@click.command()
@click.option("--only", default="all", show_default=True, metavar="REGIME,...", help="Run these regimes.")
@click.option("--policy", default="all", show_default=True, metavar="NAME,...", help="Run these policies.")
@click.option("--seed", "seeds", default=SEEDS, show_default=True, metavar="S,T,...", help="Seeds of every cell.")
@click.option("--search", default=",".join(SEARCHED), show_default=True, metavar="REGIME,...",
              help="Look for the highest load in these; `all`, or `none`.")  # fmt: skip
@click.option("--budget", type=click.FloatRange(min=0), metavar="SECONDS", help="Stop running after so long.")
@click.option("--jobs", type=click.IntRange(min=1), help="Processes. Default: one a core.")
@click.option("--cache", "cache_path", type=click.Path(path_type=Path), default=cache.default_path, metavar="FILE",
              help="Finished runs. Default: in the user's cache directory.")  # fmt: skip
@click.option("--root", type=click.Path(path_type=Path, exists=True, file_okay=False), default=Path(),
              help="Root of the source tree whose page is written. Default: here.")  # fmt: skip
@click.option("--estimate", "is_estimating", is_flag=True, help="Say what there is to do, and end.")
@click.option("--contest", metavar="S,T,...", help="Run the cells that the page says are lost, and no others, with "
              "these seeds, against the two best there.")  # fmt: skip
@click.option("--repeat", type=int, metavar="DRAW", help="Run the best policy of each cell again, and the default one, "
              "each request up to a millisecond later.")  # fmt: skip
@click.option("--render", "is_rendering", is_flag=True, help="Write the page from the data that is there, and end.")
def main(
    only: str,
    policy: str,
    seeds: str,
    search: str,
    budget: float | None,
    jobs: int | None,
    cache_path: Path,
    root: Path,
    is_estimating: bool,
    contest: str | None,
    repeat: int | None,
    is_rendering: bool,
) -> None:
    """Run what the cache lacks, then write regimes.json and regimes.md."""
    try:
        if is_rendering:
            (root / grid.PAGE).write_text(grid.page(root), encoding="utf-8")
            return
        whole = _grid(seeds, search)
        chosen_regimes, chosen_policies = _regimes(only), known_policies(policy.split(","))
        tasks = _tasks(root, whole, contest, repeat)
        with cache.Cache(cache_path) as finished:
            missing = [
                task
                for task in tasks
                if task.regime.name in chosen_regimes and task.policy in chosen_policies and finished.get(task) is None
            ]
            processes = jobs or os.cpu_count() or 1
            minutes = grid.estimate_s(missing, whole, finished) / processes / 60
            click.echo(f"{len(missing)} of {len(tasks)} tasks to do, about {minutes:.0f} minutes")
            if is_estimating:
                return
            failures = grid.run(missing, finished, jobs=processes, budget_s=budget, clock=MonotonicClock())
            if contest is not None:
                grid.write_contest(finished, root, seeds=_numbers("--contest", contest))
            elif repeat is not None:
                grid.write_repeats(finished, root, draw=repeat)
            else:
                grid.write(whole, finished, root, command=_command(seeds, search))
    except KeyboardInterrupt:
        click.echo("interrupted; what is done is kept", err=True)
        sys.exit(INTERRUPTED)
    except WarmfrontError as error:
        raise click.ClickException(str(error)) from error
    click.echo("\n".join(failures), err=True, nl=bool(failures))
    sys.exit(1 if failures else 0)


def _grid(seeds: str, search: str) -> grid.Grid:
    return grid.Grid(
        regimes=tuple(grid.with_two_loads(regime.load(name)) for name in regime.names()),
        policies=tuple(policies()),
        seeds=_numbers("--seed", seeds),
        searched=() if search == "none" else tuple(_regimes(search)),
    )


def _tasks(root: Path, whole: grid.Grid, contest: str | None, repeat: int | None) -> list[Task]:
    """Return what was asked for: the whole grid, or what its results below `root` say is worth another look."""
    if contest is not None and repeat is not None:
        raise ConfigError("--contest and --repeat are two runs; give one of them")
    if contest is None and repeat is None:
        return whole.tasks()
    results = results_file.read(root / grid.DATA)
    if repeat is not None:
        return [*repeats.tasks(results, repeat)]
    return [*contests.tasks(contests.contests(results), results, _numbers("--contest", contest or ""))]


def _numbers(option: str, given: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in given.split(","))
    except ValueError as error:
        raise ConfigError(f"{option} {given}: expected numbers with commas between them") from error


def _command(seeds: str, search: str) -> str:
    """Say what fills the same grid; what limits a run does not change what is shown in the end."""
    given = [("--seed", seeds, SEEDS), ("--search", search, ",".join(SEARCHED))]
    options = " ".join(f"{name} {value}" for name, value, default in given if value != default)
    return f'make lab LAB="{options}"' if options else "make lab"


def _regimes(names: str) -> Collection[str]:
    if names == "all":
        return regime.names()
    wanted = names.split(",")
    unknown = set(wanted) - set(regime.names())
    if unknown:
        raise ConfigError(f"no regimes named {', '.join(sorted(unknown))}; known: {', '.join(regime.names())}")
    return wanted


if __name__ == "__main__":
    main()
