"""Hand-made runs and figures, and tasks that a worker process can be given."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from warmfront.errors import ConfigError
from warmfront.lab.measures import Figures, Measures
from warmfront.lab.model import EngineSpec, FleetSpec, Group, Outcome, Regime, RunResult, Slo
from warmfront.lab.results import Cell, Results, Search
from warmfront.lab.workers import Report

NEVER = None


def regime(name: str = "chat", *, loads: tuple[float, ...] = (4.0, 8.0), warmup: float = 0.0, **slo: float) -> Regime:
    return Regime(
        name=name,
        title=f"title of {name}",
        expects="Keep turns together.",
        workload={"kind": "chat"},
        fleet=FleetSpec(engines=(EngineSpec(preset="demo", count=2),)),
        slo=Slo(**{"ttft_s": 1.0, "tpot_s": 0.1, **slo}),
        loads=loads,
        requests=10,
        warmup=warmup,
    )


def outcome(key: int, first: float | None, last: float | None, **fields: Any) -> Outcome:
    """A request of ten tokens in and eleven out that arrived at second `key`; times are since its arrival."""
    at = float(key)
    defaults = {"prompt_tokens": 10, "output_tokens": 11}
    return Outcome(
        key=key,
        group="",
        arrived_s=at,
        first_token_s=None if first is None else at + first,
        finished_s=None if last is None else at + last,
        **{**defaults, **fields},
    )


def result(*outcomes: Outcome, **fields: Any) -> RunResult:
    defaults: dict[str, Any] = {
        "gaps": [],
        "busy_s": [],
        "imbalance": [],
        "preemptions": 0,
        "ended_s": 100.0,
        "wall_s": 1.0,
    }
    return RunResult(regime="chat", policy="p", load=1.0, seed=1, outcomes=list(outcomes), **{**defaults, **fields})


GOOD = Measures(
    requests=100,
    failures=0,
    ttft_p50_s=0.1,
    ttft_p90_s=0.2,
    ttft_p99_s=0.5,
    itl_p50_s=0.01,
    itl_p99_s=0.02,
    tpot_p50_s=0.01,
    tpot_p99_s=0.02,
    e2e_p99_s=5.0,
    overrun_p99=0.5,
    ttft_share=1.0,
    tpot_share=1.0,
    good_share=1.0,
    goodput=10.0,
    throughput=10.0,
    hit_rate=0.5,
    imbalance=1.25,
    busy=0.5,
    preemptions=0,
    wall_s=1.0,
)
"""Figures of a run in which all is well."""


def figures(**changed: Any) -> Measures:
    return replace(GOOD, **changed)


def results(*cells: Cell, searches: tuple[Search, ...] = (), regimes: tuple[Regime, ...] = ()) -> Results:
    return Results(
        version="1.2.3",
        command="warmfront simulate chat",
        machine="a machine",
        seeds=(1, 2),
        regimes=regimes or (regime(),),
        config={"policy": {"name": "marginal_cost"}},
        cells=cells,
        searches=searches,
    )


def three_policies() -> Results:
    """Two loads; at 8 the default loses TTFT to `peer`, and `slow` never answers its slowest hundredth."""
    lost = figures(ttft_p99_s=NEVER, overrun_p99=NEVER, ttft_share=0.9, goodput=4.0, itl_p99_s=0.05, failures=3)
    return results(
        Cell("chat", "marginal_cost", 4.0, figures(ttft_p99_s=0.4)),
        Cell("chat", "peer", 4.0, figures(ttft_p99_s=0.5)),
        Cell("chat", "slow", 4.0, figures(ttft_p99_s=0.8, hit_rate=0.0)),
        Cell("chat", "marginal_cost", 8.0, figures(ttft_p99_s=1.0, overrun_p99=1.0, goodput=12.0)),
        Cell("chat", "peer", 8.0, figures(ttft_p99_s=0.8, overrun_p99=0.8, goodput=11.0, itl_p99_s=0.025)),
        Cell("chat", "slow", 8.0, lost),
        searches=(
            Search("chat", "marginal_cost", 8.0, ((8.0, True),)),
            Search("chat", "peer", 10.0, ((8.0, True), (12.0, False), (10.0, True))),
            Search("chat", "slow", 0.0, ((8.0, False),)),
        ),
    )


def part_of(measures: Measures, **changed: Any) -> Figures:
    """Figures of a group, like those of all requests but for what is given."""
    fields = {name: getattr(measures, name) for name in Figures.__struct_fields__}
    return Figures(**{**fields, **changed})


def two_classes() -> Results:
    """The default serves people first, so that the batch, which is compared by goodput alone, and all requests wait."""
    serving = replace(
        regime("serving", loads=(4.0,)),
        groups=(Group(name="people", priority=0), Group(name="batch", priority=10, ttft_s=60.0, compared=("goodput",))),
    )

    def cell(policy: str, all_s: float, people_s: float, batch_s: float, batch_goodput: float) -> Cell:
        groups = {
            "people": part_of(GOOD, ttft_p99_s=people_s),
            "batch": part_of(GOOD, ttft_p99_s=batch_s, goodput=batch_goodput),
        }
        return Cell("serving", policy, 4.0, figures(ttft_p99_s=all_s, groups=groups))

    return results(cell("marginal_cost", 8.0, 0.2, 9.0, 8.0), cell("peer", 1.0, 0.4, 1.0, 10.0), regimes=(serving,))


def is_running(pid: int) -> bool:
    """Whether a process is there and not merely waiting for its exit status to be read."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"


def double(task: int, report: Report) -> int:
    report(0.5)
    return 2 * task


def fail_on_odd(task: int, report: Report) -> int:
    if task % 2:
        raise ConfigError(f"{task} is odd")
    return task


def raise_a_bug(task: int, report: Report) -> int:
    raise IndexError(f"bug in {task}")


def die(task: int, report: Report) -> int:
    os._exit(7)


def wait_for_ever(task: int, report: Report) -> int:
    """Says which process it is in, as progress, then never ends."""
    report(float(os.getpid()))
    os.read(os.pipe()[0], 1)  # nobody writes
    return task


def report_for_ever(task: int, report: Report) -> int:
    """Ends only because nobody listens any more."""
    share = float(os.getpid())
    while True:
        report(share)
        share += 1
