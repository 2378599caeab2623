"""Dynamo's mocker and the lab on the same trace, with the same engine model.

Each case runs twice on Dynamo's side (`round_robin` tells engines apart, `kv_router` engines and router together) and
on ours with the preset `dynamo-mocker`. A third run of ours sends every request where Dynamo's router sent it: what is
left then is the engine's difference, and the rest of the difference is the router's.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from contenders import DYNAMO, environment
from warmfront.lab.model import EngineSpec, EventSpec, FleetSpec, Regime, Slo
from warmfront.lab.peers import PEERS, View
from warmfront.lab.peers.base import choices, events_only
from warmfront.lab.peers.dynamo import Kv
from warmfront.lab.run import run
from warmfront.lab.traces import locate
from warmfront.policy.base import Fleet
from warmfront.types import Choice, Overlap, Request, Slot

from lab_checks.figures import Figures, Measured, figures, means, of_outcome

BLOCKS, BLOCK_TOKENS = 16_384, 64
TIMEOUT_S = 300.0
SEEDS = (1, 2, 3, 4, 5)
"""Where the router draws among equals, runs differ: so many are averaged, and how far they lie apart is told."""
ROUTERS = {"round_robin": "round_robin", "kv_router": "dynamo_kv"}
"""Dynamo's name of a router → ours."""
PLACED = "placed"
DIFFERS = 0.05
EQUAL_BLOCKS = 1e-6
"""Costs so close are equal."""


class Case(NamedTuple):
    """A trace's first requests over some replicas."""

    trace: str
    requests: int
    replicas: int
    speed: float
    """Arrivals so many times as fast as recorded."""

    @property
    def name(self) -> str:
        return f"{self.trace.removeprefix('mooncake_')}, {self.replicas} replicas, {self.speed:g} times recorded speed"


CASES = (
    Case("mooncake_conversation", 2000, 4, 1.0),
    Case("mooncake_conversation", 2000, 8, 1.0),
    Case("mooncake_conversation", 2000, 8, 4.0),
    Case("mooncake_synthetic", 2000, 8, 1.0),
    Case("mooncake_synthetic", 2000, 8, 4.0),
)


class Replayed(NamedTuple):
    """What Dynamo did, in the order of the trace."""

    workers: list[int]
    figures: Figures


def check(cases: Sequence[Case] = CASES) -> dict[str, Any]:
    """Run every case on both sides."""
    return {
        "peer": {"name": "ai-dynamo-runtime", "version": DYNAMO.version},
        "blocks": BLOCKS,
        "block_tokens": BLOCK_TOKENS,
        "seeds": list(SEEDS),
        "differs": DIFFERS,
        "cases": [_compare(case, router) for case in cases for router in ROUTERS],
    }


def _compare(case: Case, router: str) -> dict[str, Any]:
    seeds = SEEDS if router == "kv_router" else SEEDS[:1]
    replays = [replay(case, router) for _ in seeds]
    row: dict[str, Any] = {
        **case._asdict(),
        "name": case.name,
        "router": router,
        "policy": ROUTERS[router],
        "dynamo": _summary([each.figures for each in replays]),
        "warmfront": _summary([simulate(case, ROUTERS[router], seed) for seed in seeds]),
    }
    if router == "kv_router":
        placed = [as_placed(case, each.workers) for each in replays]
        row[PLACED] = _summary([each for each, _ in placed])
        row["decisions"] = {
            name: sum(getattr(each, name) for _, each in placed) for name in ("all", "cheapest", "drawn")
        }
    return row


def _summary(runs: Sequence[Figures]) -> dict[str, Figures]:
    """Return the mean of equal runs, and the lowest and the highest of each figure."""
    return {
        "mean": means(runs),
        "least": {name: min(run[name] for run in runs) for name in runs[0]},
        "most": {name: max(run[name] for run in runs) for name in runs[0]},
    }


# -- Dynamo's side


def replay(case: Case, router: str) -> Replayed:
    """Replay a case in Dynamo's environment, which is installed on first use.

    Raises:
        subprocess.SubprocessError: The replay failed or took too long.
    """
    lines = _head(case)
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as trace:
        trace.write("".join(lines))
        trace.flush()
        python = environment(DYNAMO) / "bin" / "python"
        script = Path(__file__).with_name("dynamo_replay.py")
        arguments = [trace.name, router, str(case.replicas), str(BLOCKS), str(case.speed)]
        done = subprocess.run(
            [str(python), str(script), *arguments],
            stdout=subprocess.PIPE,
            timeout=TIMEOUT_S,
            check=True,
            env=os.environ | {"DYN_LOG": "error", "PYTHONPATH": ""},
        )
    rows = _ordered([json.loads(line) for line in done.stdout.splitlines()], [json.loads(line) for line in lines], case)
    return Replayed([row["worker"] for row in rows], figures([_measured(row) for row in rows]))


def _head(case: Case) -> list[str]:
    with locate(case.trace).open(encoding="utf-8") as file:
        return list(itertools.islice(file, case.requests))


def _ordered(rows: Sequence[Mapping[str, Any]], trace: Sequence[Mapping[str, Any]], case: Case) -> list[Any]:
    """Put Dynamo's report, which has an order of its own, into that of the trace."""
    found: dict[tuple[int, int, int], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        found[round(row["arrived_ms"] * case.speed), row["prompt_tokens"], row["output_tokens"]].append(row)
    return [found[line["timestamp"], line["input_length"], line["output_length"]].pop(0) for line in trace]


def _measured(row: Mapping[str, Any]) -> Measured:
    gaps = row["output_tokens"] - 1
    return Measured(
        prompt_tokens=row["prompt_tokens"],
        cached_tokens=row["cached_tokens"],
        ttft_s=(row["first_token_ms"] - row["arrived_ms"]) / 1e3,
        tpot_s=(row["last_token_ms"] - row["first_token_ms"]) / 1e3 / gaps if gaps else None,
    )


# -- ours


def simulate(case: Case, policy: str, seed: int) -> Figures:
    """Run a case in the lab."""
    result = run(regime(case), policy, case.speed, seed)
    return figures([of_outcome(outcome) for outcome in result.outcomes])


def as_placed(case: Case, workers: Sequence[int]) -> tuple[Figures, Decisions]:
    """Run a case in the lab with every request where Dynamo sent it, and count what our rule thinks of that."""
    decisions = Decisions()
    PEERS[PLACED] = lambda view: Placed(view, workers, decisions)
    try:
        return simulate(case, PLACED, seed=SEEDS[0]), decisions
    finally:
        del PEERS[PLACED]


@dataclass
class Decisions:
    """Dynamo's decisions, counted."""

    all: int = 0
    cheapest: int = 0
    """No replica cost less."""
    drawn: int = 0
    """Several cost the least."""


class Placed:
    """Sends each request where a list says, and asks the rule."""

    def __init__(self, view: View, slots: Sequence[int], decisions: Decisions) -> None:
        self._view = view
        self._slots = slots
        self._rule = Kv(view)
        self._decisions = decisions

    def choose(self, request: Request, overlap: Overlap, fleet: Fleet) -> Sequence[Choice]:
        """Look it up."""
        slot = Slot(self._slots[self._view.prompt(request).key])
        device = events_only(overlap, fleet)
        costs = dict(zip(fleet.eligible, self._rule.costs(request, overlap, device, fleet), strict=True))
        least = min(costs.values()) + EQUAL_BLOCKS
        self._decisions.all += 1
        self._decisions.cheapest += costs[slot] <= least
        self._decisions.drawn += sum(cost <= least for cost in costs.values()) > 1
        return choices([slot], device, request, fleet)


def regime(case: Case) -> Regime:
    """Describe a case: the trace as recorded, engines as the mocker's, events without delay."""
    return Regime(
        name="lab-check",
        title=case.name,
        expects="",
        workload={"kind": "mooncake", "file": case.trace},
        fleet=FleetSpec(
            engines=(EngineSpec("dynamo-mocker", count=case.replicas, kv_tokens=BLOCKS * BLOCK_TOKENS),),
            block_size=BLOCK_TOKENS,
            events=EventSpec(delay_s=0.0),
        ),
        slo=Slo(ttft_s=2.0),
        loads=(case.speed,),
        requests=case.requests,
        warmup=0.0,
    )
