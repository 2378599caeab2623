"""The ladder of the llm-d guide on virtual time: the stages of its load generator, in its order, on one warm fleet.

One would get wrong what its throughput is: tokens of a stage over the time until the stage's *last answer*, so that a
short stage at a low rate is mostly the length of one answer. The next stage begins a second after that. Both are
reproduced here, because they bend the lower half of every published curve.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from msgspec.structs import replace
from warmfront.lab import regime as regimes
from warmfront.lab.measures import percentile
from warmfront.lab.model import Outcome, Regime, RunResult, Segment, SimRequest
from warmfront.lab.run import run_source
from warmfront.sim.latency import preset, save_preset

from lab_checks.figures import Figures, Measured, of_outcome

REGIME = "llmd-ladder"
"""Its fleet; the workload here is the load generator's own."""
SEED = 1
GROUPS, PROMPTS, SHARED_TOKENS, OWN_TOKENS = 150, 5, 6000, 1200
ANSWERS = ((0.0, 4), (0.01, 33), (0.05, 193), (0.1, 945), (0.25, 992), (0.5, 998), (1.0, 1000))
"""Share of the answers → tokens they have at most, straight lines between. From the report of the last stage in the
guide: asked for 1,000 tokens, a twentieth of the answers stays below 200. If all were equal, they would end in waves.
"""
PAUSE_S = 1.0
BASELINE, PREFIX = "round_robin", "llmd_precise"
POLICIES = (BASELINE, PREFIX, "llmd_default", "marginal_cost")
ROOMY_KV_TOKENS = 500_000
"""A cache in which every running request fits: what is left of a difference then is not memory."""
LIGHT_READS = 0.65
"""Share of the price of reading context: what is left then is not that a shared prefix is read for every sequence."""
KNEE = 0.9
"""Share of the highest throughput at which a curve counts as having reached its plateau."""
PLATEAU_FROM = 40.0


class Stage(NamedTuple):
    """One rung."""

    rate: float
    seconds: float


WARMUP = Stage(15.0, 50.0)
STAGES = tuple(
    Stage(rate, seconds)
    for rate, seconds in (
        *(
            (3.0, 20.0),
            (10.0, 20.0),
            (15.0, 20.0),
            (20.0, 38.0),
            (22.0, 34.0),
            (25.0, 30.0),
            (30.0, 25.0),
            (35.0, 21.0),
        ),
        *(
            (40.0, 38.0),
            (43.0, 36.0),
            (46.0, 33.0),
            (49.0, 30.0),
            (52.0, 29.0),
            (55.0, 27.0),
            (57.0, 26.0),
            (60.0, 25.0),
        ),
    )
)

PUBLISHED: dict[str, Any] = {
    "source": "llm-d guide on precise prefix cache aware routing, v0.8: Qwen3-32B, 8 replicas of 2 H100, "
    "150 groups of 5 prompts, 6,000 + 1,200 tokens in, 1,000 out",
    "rates": [stage.rate for stage in STAGES],
    "baseline": {
        "output_tokens_per_s": [
            *(1797, 4215, 5381, 6205, 5517, 5965, 5702, 5890),
            *(6336, 6588, 6459, 6265, 6303, 6290, 6089, 6551),
        ],
        "ttft_mean_s": 58.10,
        "ttft_p90_s": 107.43,
    },
    "prefix": {
        "output_tokens_per_s": [
            *(1707, 4904, 6887, 11224, 11980, 12548, 13507, 13803),
            *(15593, 15612, 15462, 15607, 15728, 15612, 15667, 15733),
        ],
        "ttft_mean_s": 0.247,
        "ttft_p90_s": 0.262,
    },
}
"""`baseline` is a Kubernetes service without a router, `prefix` llm-d with exact knowledge of the caches."""


class Ladder:
    """The load generator: prompts shuffled once and sent over and over, stage after stage."""

    def __init__(self, stages: Sequence[Stage], seed: int) -> None:
        self.stage_of: list[int] = []
        """By key of a request."""
        self._random = Random(seed)
        self._stages = stages
        self._prompts = self._make_prompts()
        self._left = 0

    def arrivals(self) -> Iterator[SimRequest]:
        """Yield the first stage; the others follow answers."""
        yield from self._begin(0, now_s=0.0)

    def finished(self, request: SimRequest, now_s: float) -> Sequence[SimRequest]:
        """Begin the next stage after the last answer of one."""
        self._left -= 1
        following = self.stage_of[request.key] + 1
        if self._left or following == len(self._stages):
            return ()
        return list(self._begin(following, now_s + PAUSE_S))

    def _make_prompts(self) -> list[tuple[Segment, ...]]:
        prompts: list[tuple[Segment, ...]] = [
            ((group, SHARED_TOKENS), (GROUPS + PROMPTS * group + own, OWN_TOKENS))
            for group in range(GROUPS)
            for own in range(PROMPTS)
        ]
        self._random.shuffle(prompts)
        return prompts

    def _begin(self, stage: int, now_s: float) -> Iterator[SimRequest]:
        rate, seconds = self._stages[stage]
        count = round(rate * seconds)
        self._left = count
        moments = sorted(self._random.uniform(0.0, seconds) for _ in range(count))
        for offset_s in moments:
            key = len(self.stage_of)
            self.stage_of.append(stage)
            yield SimRequest(key, now_s + offset_s, self._prompts[key % len(self._prompts)], self._answer())

    def _answer(self) -> int:
        drawn = self._random.random()
        (low, fewest), (high, most) = next(piece for piece in pairwise(ANSWERS) if drawn <= piece[1][0])
        return round(fewest + (most - fewest) * (drawn - low) / (high - low))


def check(stages: Sequence[Stage] = STAGES, policies: Sequence[str] = POLICIES) -> dict[str, Any]:
    """Climb the ladder with each policy, and with the compared ones on fleets that differ in one thing."""
    regime = regimes.load(REGIME)
    with tempfile.TemporaryDirectory() as folder:
        variants = {
            "roomy": {"kv_tokens": ROOMY_KV_TOKENS, **_variant(roomy(regime), stages)},
            "light": {"context_price": LIGHT_READS, **_variant(light(regime, Path(folder)), stages)},
        }
    return {
        "published": PUBLISHED,
        "regime": REGIME,
        "seed": SEED,
        "knee": KNEE,
        "plateau_from": PLATEAU_FROM,
        "policies": {policy: climb(regime, stages, policy) for policy in policies},
        "variants": variants,
    }


def _variant(regime: Regime, stages: Sequence[Stage]) -> dict[str, Any]:
    return {"policies": {policy: climb(regime, stages, policy) for policy in (BASELINE, PREFIX)}}


def roomy(regime: Regime) -> Regime:
    """Return the regime with larger caches."""
    engines = tuple(replace(engine, kv_tokens=ROOMY_KV_TOKENS) for engine in regime.fleet.engines)
    return replace(regime, fleet=replace(regime.fleet, engines=engines))


def light(regime: Regime, folder: Path) -> Regime:
    """Return the regime with engines that read context at a lower price; their preset is written into `folder`."""
    (engine,) = regime.fleet.engines
    found = preset(engine.preset)
    price_s = LIGHT_READS * found.latency.context_token_s
    lighter = dataclasses.replace(found, latency=dataclasses.replace(found.latency, context_token_s=price_s))
    path = folder / "light.json"
    save_preset(path, lighter, source=f"{engine.preset} with context at {LIGHT_READS:.0%} of its price")
    return replace(regime, fleet=replace(regime.fleet, engines=(replace(engine, preset=str(path)),)))


def climb(regime: Regime, stages: Sequence[Stage], policy: str) -> dict[str, Any]:
    """Run the warm-up and all stages on one fleet; return figures by stage and over all stages."""
    ladder = Ladder((WARMUP, *stages), SEED)
    result = run_source(regime, ladder, policy, regime.loads[0], SEED)
    rungs = by_stage(result, ladder)[1:]
    measured = [of_outcome(outcome) for rung in rungs for outcome in rung]
    columns = [_stage(rung) for rung in rungs]
    return {
        **{name: [column[name] for column in columns] for name in columns[0]},
        **_over_all(measured),
        "preemptions": result.preemptions,
    }


def by_stage(result: RunResult, ladder: Ladder) -> list[list[Outcome]]:
    """Split outcomes by stage."""
    stages: list[list[Outcome]] = [[] for _ in range(1 + max(ladder.stage_of))]
    for outcome in result.outcomes:
        stages[ladder.stage_of[outcome.key]].append(outcome)
    return stages


def _stage(outcomes: Sequence[Outcome]) -> Figures:
    began_s = min(outcome.arrived_s for outcome in outcomes)
    ended_s = max(outcome.finished_s for outcome in outcomes if outcome.finished_s is not None)
    measured = [of_outcome(outcome) for outcome in outcomes]
    return {
        "output_tokens_per_s": round(sum(outcome.output_tokens for outcome in outcomes) / (ended_s - began_s)),
        "hit_rate": round(_hit_rate(measured), 4),
        "ttft_mean_s": round(statistics.fmean(each.ttft_s for each in measured), 4),
        "ttft_p90_s": round(percentile([each.ttft_s for each in measured], 0.9) or 0.0, 4),
    }


def _over_all(measured: Sequence[Measured]) -> dict[str, Any]:
    ttft_s = [each.ttft_s for each in measured]
    return {
        "ladder": {
            "hit_rate": round(_hit_rate(measured), 4),
            "ttft_mean_s": round(statistics.fmean(ttft_s), 4),
            "ttft_p90_s": round(percentile(ttft_s, 0.9) or 0.0, 4),
        }
    }


def _hit_rate(measured: Sequence[Measured]) -> float:
    return sum(each.cached_tokens for each in measured) / sum(each.prompt_tokens for each in measured)


def knee(rates: Sequence[float], curve: Sequence[float]) -> float:
    """Return the lowest rate at which a curve comes near its highest point."""
    return next(rate for rate, value in zip(rates, curve, strict=True) if value >= KNEE * max(curve))


def plateau(rates: Sequence[float], curve: Sequence[float]) -> float:
    """Return the mean of a curve over the upper rates."""
    return statistics.fmean(value for rate, value in zip(rates, curve, strict=True) if rate >= PLATEAU_FROM)
