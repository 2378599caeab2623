"""What is run: one cell for one seed, or one search; and how seeds become a mean.

A task carries its whole regime, so that a worker needs no file and a change of a file during a long run cannot mix
two versions.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from warmfront.config import RouterConfig
from warmfront.lab import search
from warmfront.lab.measures import Measures, mean, measure
from warmfront.lab.model import Regime
from warmfront.lab.results import Cell, Search, joined
from warmfront.lab.run import run
from warmfront.lab.workers import Report


class CellTask(Struct, frozen=True):
    """One run."""

    regime: Regime
    policy: str
    load: float
    seed: int
    config: RouterConfig = RouterConfig()
    later: int = 0
    """Above 0: requests come up to a millisecond later, by this draw."""

    def __str__(self) -> str:
        again = f", again ({self.later})" if self.later else ""
        return f"{self.regime.name} at {self.load:g} with {self.policy}, seed {self.seed}{again}"


class SearchTask(Struct, frozen=True):
    """As many runs as it takes to find the highest load that holds."""

    regime: Regime
    policy: str
    seeds: tuple[int, ...]
    config: RouterConfig = RouterConfig()

    def __str__(self) -> str:
        return f"highest load of {self.regime.name} with {self.policy}"


Task = CellTask | SearchTask
Result = Measures | search.Sustained


def perform(task: Task, report: Report) -> Result:
    """Do one task in this process.

    Raises:
        ConfigError: The regime or the policy cannot be run.
    """
    logging.getLogger("warmfront").setLevel(logging.ERROR)  # the router's warnings are for who runs a fleet
    if isinstance(task, CellTask):
        return _measured(task, report)
    return _searched(task, report)


def _measured(task: CellTask, report: Report) -> Measures:
    result = run(
        task.regime,
        task.policy,
        task.load,
        task.seed,
        later=task.later,
        config=task.config,
        progress=lambda done, total: report(done / total),
    )
    return measure(result, task.regime)


def _searched(task: SearchTask, report: Report) -> search.Sustained:
    tried = 0

    def probe(load: float) -> Measures:
        nonlocal tried
        tried += 1
        report(tried / (search.PROBES_MAX + 1))
        return mean(
            [_measured(CellTask(task.regime, task.policy, load, seed, task.config), _quiet) for seed in task.seeds]
        )

    return search.search(task.regime, probe)


def _quiet(_: float) -> None:
    """The search tells how far it is, not how far one of its runs is."""


def averaged(measured: Iterable[tuple[CellTask, Measures]], seeds: Sequence[int]) -> tuple[Cell, ...]:
    """Turn runs into cells; one that lacks a seed is left out."""
    rows: dict[tuple[str, str, float], dict[int, Measures]] = defaultdict(dict)
    for task, measures in measured:
        rows[task.regime.name, task.policy, task.load][task.seed] = measures
    complete = {place: by_seed for place, by_seed in rows.items() if set(by_seed) >= set(seeds)}
    return joined([Cell(*place, mean(_in_order(by_seed, seeds))) for place, by_seed in complete.items()])


def _in_order(by_seed: Mapping[int, Measures], seeds: Sequence[int]) -> list[Measures]:
    return [by_seed[seed] for seed in seeds]


def found(task: SearchTask, sustained: search.Sustained) -> Search:
    """Name what a search found."""
    return Search(task.regime.name, task.policy, sustained.load, sustained.tried)
