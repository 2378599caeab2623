"""Every policy in every regime: what to run, doing it so that it can be stopped, and the files that come of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import msgspec

from warmfront.clock import Clock
from warmfront.lab import contest, regimes_page, repeats, results_file
from warmfront.lab.cache import Cache
from warmfront.lab.cells import CellTask, SearchTask, Task, perform
from warmfront.lab.display import bar
from warmfront.lab.measures import Measures
from warmfront.lab.model import Regime
from warmfront.lab.plan import Plan
from warmfront.lab.workers import Done, Failure, Progress, spread

LOADS_MAX = 5
"""Loads of a regime that are considered, from the lowest: a ladder of many goes far beyond saturation."""
QUARTILES = (0.25, 0.75)
"""Where among these the two lie that are shown: a moderate one, and one near saturation."""
RUN_S_PER_REQUEST = 4e-4
"""Guess for the seconds of a run while nothing is known about its regime."""
SEARCH_RUNS = 8
"""Guess for the runs of a search with one seed."""
DATA, REASONS, CONTEST, REPEATS, PAGE = (
    Path(f"docs/explanation/regimes{suffix}")
    for suffix in (".json", ".reasons.toml", ".contest.json", ".repeats.json", ".md")
)
"""Below the root of the source tree: the results, the hand-written reasons, the lost cells under other seeds, what the
best do when requests come a little later, and the page made of all four."""


class Grid(Plan, frozen=True):
    """Every policy in every regime, in an order that is useful when it is cut short."""

    searched: tuple[str, ...] = ()
    """Regimes in which the highest load is looked for, with the first seed."""

    def tasks(self) -> list[Task]:
        """Return the cells seed by seed, then the searches; policies turn fastest, so that rows fill up."""
        cells: list[Task] = [
            CellTask(regime, policy, load, seed, self.config)
            for seed in self.seeds
            for regime in self.regimes
            for load in regime.loads
            for policy in self.policies
        ]
        searches: list[Task] = [
            SearchTask(regime, policy, self.seeds[:1], self.config)
            for regime in self.regimes
            for policy in self.policies
            if regime.name in self.searched
        ]
        return cells + searches


def with_two_loads(regime: Regime) -> Regime:
    """Return a regime with the loads at `QUARTILES` of its first `LOADS_MAX` only."""
    loads = sorted(regime.loads)[:LOADS_MAX]
    chosen = {loads[int((len(loads) - 1) * share + 0.5)] for share in QUARTILES}
    return msgspec.structs.replace(regime, loads=tuple(sorted(chosen)))


def estimate_s(tasks: Sequence[Task], grid: Grid, cache: Cache) -> float:
    """Guess the processor seconds of tasks, from finished runs of the same regime where there are any."""
    known: dict[str, list[float]] = defaultdict(list)
    for task in grid.tasks():
        found = cache.get(task)
        if isinstance(found, Measures):
            known[task.regime.name].append(found.wall_s)
    return sum(_guess_s(task, known[task.regime.name]) for task in tasks)


def _guess_s(task: Task, known_s: Sequence[float]) -> float:
    run_s = sum(known_s) / len(known_s) if known_s else RUN_S_PER_REQUEST * task.regime.requests
    return run_s * (SEARCH_RUNS * len(task.seeds) if isinstance(task, SearchTask) else 1)


def run(tasks: Sequence[Task], cache: Cache, *, jobs: int, budget_s: float | None, clock: Clock) -> list[str]:
    """Do tasks and keep what comes of them.

    Args:
        tasks: In this order.
        cache: Open.
        jobs: Processes.
        budget_s: End after so long; tasks that are not done then are dropped.
        clock: Measures the budget.

    Returns:
        What went wrong, one text for each task that failed.
    """
    failures: list[str] = []
    end_s = clock.now_s() + budget_s if budget_s is not None else float("inf")
    done = 0
    with bar("simulating") as advanced, closing(spread(perform, tasks, jobs=jobs)) as messages:
        for message in messages:
            if isinstance(message, Done):
                cache.put(tasks[message.number], message.result)
            elif isinstance(message, Failure):
                failures.append(f"{tasks[message.number]}: {message.message}")
            done += not isinstance(message, Progress)
            advanced(done, len(tasks))
            if clock.now_s() > end_s:
                break
    return failures


def write(grid: Grid, cache: Cache, root: Path, *, command: str) -> None:
    """Write the results that the cache holds, and the page made of exactly those.

    Args:
        grid: Says which.
        cache: Open.
        root: Of the source tree.
        command: What somebody types to get the same.

    Raises:
        ConfigError: See `regimes_page.render`.
    """
    done = [(task, result) for task in grid.tasks() if (result := cache.get(task)) is not None]
    results_file.write(grid.results(done, command=command), root / DATA)
    (root / PAGE).write_text(page(root), encoding="utf-8")


def write_contest(cache: Cache, root: Path, *, seeds: Sequence[int]) -> None:
    """Write what the cache holds of the cells that the results below `root` say are lost, and the page anew.

    Args:
        cache: Open.
        root: Of the source tree.
        seeds: Other ones than those of the results.

    Raises:
        ConfigError: See `contest.tasks` and `regimes_page.render`.
    """
    results = results_file.read(root / DATA)
    cells = contest.contests(results)
    found = [(task, cache.get(task)) for task in contest.tasks(cells, results, seeds)]
    done = [(task, result) for task, result in found if isinstance(result, Measures)]
    command = f'make lab LAB="--contest {",".join(map(str, seeds))}"'
    results_file.write_rows(
        contest.rounds(cells, results, done, seeds=seeds, command=command), root / CONTEST, rows="cells"
    )
    (root / PAGE).write_text(page(root), encoding="utf-8")


def write_repeats(cache: Cache, root: Path, *, draw: int) -> None:
    """Write what the cache holds of the best of each cell, run again with requests a little later, and the page anew.

    Args:
        cache: Open.
        root: Of the source tree.
        draw: Seed of the delays.

    Raises:
        ConfigError: See `repeats.tasks` and `regimes_page.render`.
    """
    results = results_file.read(root / DATA)
    found = [(task, cache.get(task)) for task in repeats.tasks(results, draw)]
    done = [(task, result) for task, result in found if isinstance(result, Measures)]
    command = f'make lab LAB="--repeat {draw}"'
    results_file.write_rows(repeats.repeats(results, done, draw=draw, command=command), root / REPEATS, rows="rows")
    (root / PAGE).write_text(page(root), encoding="utf-8")


def page(root: Path) -> str:
    """Return the page that follows from the data below the root of a source tree.

    Raises:
        ConfigError: See `regimes_page.render`.
    """
    return regimes_page.render(
        results_file.read(root / DATA),
        regimes_page.read_reasons(root / REASONS),
        results_file.read_rows(root / CONTEST, contest.Rounds),
        results_file.read_rows(root / REPEATS, repeats.Repeats),
    )
