"""Which runs answer a question, and the results made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing

import msgspec
from msgspec import Struct

from warmfront import core
from warmfront.config import RouterConfig
from warmfront.errors import ConfigError, WarmfrontError
from warmfront.lab import regime as regimes
from warmfront.lab.cells import CellTask, Result, SearchTask, Task, averaged, found, perform
from warmfront.lab.measures import Measures
from warmfront.lab.model import Regime
from warmfront.lab.peers import PEERS
from warmfront.lab.results import Results, machine
from warmfront.lab.search import Sustained
from warmfront.lab.workers import Done, Progress, spread
from warmfront.policy import registry


class SimulationError(WarmfrontError):
    """A run failed; the message names it."""


class Plan(Struct, frozen=True):
    """What to run: every policy in every regime, at every load, with every seed."""

    regimes: tuple[Regime, ...]
    policies: tuple[str, ...]
    seeds: tuple[int, ...] = (1,)
    config: RouterConfig = RouterConfig()
    is_searching: bool = False
    """Also look for the highest load that holds."""

    def tasks(self) -> list[Task]:
        """Return the runs, long ones first: searches, then high loads. One that starts last is waited for."""
        cells: list[Task] = [
            CellTask(regime, policy, load, seed, self.config)
            for regime in self.regimes
            for load in sorted(regime.loads, reverse=True)
            for policy in self.policies
            for seed in self.seeds
        ]
        searches: list[Task] = [
            SearchTask(regime, policy, self.seeds, self.config)
            for regime in self.regimes
            for policy in self.policies
            if self.is_searching
        ]
        return searches + cells

    def results(self, finished: Iterable[tuple[Task, Result]], *, command: str) -> Results:
        """Put together what came of the tasks; a cell that lacks a seed is left out.

        Args:
            finished: In any order.
            command: What somebody types to get the same.
        """
        rows = list(finished)
        measured = [(task, one) for task, one in rows if isinstance(task, CellTask) and isinstance(one, Measures)]
        searched = [(task, one) for task, one in rows if isinstance(task, SearchTask) and isinstance(one, Sustained)]
        return Results(
            version=core.version(),
            command=command,
            machine=machine(),
            seeds=self.seeds,
            regimes=self.regimes,
            config=msgspec.to_builtins(self.config),
            cells=averaged(measured, self.seeds),
            searches=tuple(
                sorted((found(*pair) for pair in searched), key=lambda search: (search.regime, search.policy))
            ),
        )


def carry_out(tasks: Sequence[Task], *, jobs: int, advanced: Callable[[float, int], None]) -> list[tuple[Task, Result]]:
    """Run tasks in processes and return what came of each, in the order of `tasks`.

    Args:
        tasks: See `Plan.tasks`.
        jobs: Processes.
        advanced: Told how many tasks' worth of work is done, fractions included, and how many there are.

    Raises:
        SimulationError: The first task that failed; the others are ended.
    """
    shares = [0.0] * len(tasks)
    results: dict[int, Result] = {}
    with closing(spread(perform, tasks, jobs=jobs)) as messages:
        for message in messages:
            if isinstance(message, Progress):
                shares[message.number] = message.share
            elif isinstance(message, Done):
                shares[message.number], results[message.number] = 1.0, message.result
            else:
                raise SimulationError(f"{tasks[message.number]}: {message.message}")
            advanced(sum(shares), len(tasks))
    return [(task, results[number]) for number, task in enumerate(tasks)]


def policies() -> list[str]:
    """Return every policy that can be run: the built-ins and plugins, then the re-statements of others."""
    return [*registry.names(), *sorted(set(PEERS) - set(registry.names()))]


def known_policies(names: Sequence[str]) -> tuple[str, ...]:
    """Return names as they are, each once; `all` stands for every policy.

    Raises:
        ConfigError: There is no policy of some name.
    """
    known = policies()
    wanted = [name for given in names for name in (known if given == "all" else [given])]
    for name in wanted:
        if name not in known:
            raise ConfigError(f"no policy named {name!r}; known: {', '.join(known)}")
    return tuple(dict.fromkeys(wanted))


def adjusted(names: Sequence[str], *, loads: Sequence[float] = (), requests: int | None = None) -> tuple[Regime, ...]:
    """Load regimes by name or path, each once, with other loads or another length where given.

    Raises:
        ConfigError: A regime is not there or not valid, or two of them have one name.
    """
    found = [regimes.load(name) for name in dict.fromkeys(names)]
    twice = {regime.name for regime in found if [other.name for other in found].count(regime.name) > 1}
    if twice:
        raise ConfigError(f"several regimes are named {', '.join(sorted(twice))}: results could not be told apart")
    return tuple(
        msgspec.structs.replace(
            regime, loads=tuple(sorted(set(loads))) or regime.loads, requests=requests or regime.requests
        )
        for regime in found
    )
