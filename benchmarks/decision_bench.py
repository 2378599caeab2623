"""How long a decision takes. Prints one JSON line per figure; the overlap lookup is a stub.

Run: `python benchmarks/decision_bench.py [--replicas 8 64 512] [--policy marginal_cost]`.

What one would get wrong: comparing figures of two runs of a loaded machine. What else it does can only add to a time,
so the minimum is nearest to what the decision costs; the median tells what a router on that machine would have seen.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable

from places import ROOT

sys.path.insert(0, str(ROOT / "tests"))  # for the one description of a small fleet and its requests
from support.routing import BLOCK, fleet, replica, request
from warmfront.config import PolicyConfig, RouterConfig
from warmfront.router import Router
from warmfront.types import (
    Arrived,
    Dispatch,
    Finished,
    FirstToken,
    FleetChanged,
    Overlap,
    Request,
    RequestId,
    Slot,
    Usage,
)

WARM_SHARE = 8
"""One replica in so many holds part of the prompt."""
IN_FLIGHT = 8
"""Requests that every replica serves meanwhile, on average."""
PROMPT_TOKENS = 4000
OUTPUT_TOKENS = 200


class StubIndex:
    """Answers every lookup with the same overlap."""

    def __init__(self, replicas: int, rng: random.Random) -> None:
        warm = [2048 if slot % WARM_SHARE == 0 else 0 for slot in range(replicas)]
        self._overlap = Overlap(
            device=warm,
            confirmed=warm,
            host=warm,
            disk=warm,
            active=[0] * replicas,
            active_tokens=[rng.randrange(20_000, 200_000) for _ in range(replicas)],
            resident_tokens=[300_000] * replicas,
            evicted_blocks=[1000] * replicas,
            regretted_blocks=[100] * replicas,
            age_s=[3.0 if depth else -1.0 for depth in warm],
            frontier_key=7,
        )

    def overlap(self, request: Request) -> Overlap:
        return self._overlap

    def predict(self, request: Request, slot: Slot) -> None:
        return None

    def release(self, request_id: RequestId) -> None:
        return None


class Bench:
    """A router with requests in flight everywhere."""

    def __init__(self, replicas: int, policy: str, seed: int) -> None:
        self.rng = random.Random(seed)
        config = RouterConfig(policy=PolicyConfig(name=policy, seed=seed))
        self.router = Router(config, StubIndex(replicas, self.rng))
        states = [replica(slot, capacity_tokens=400_000) for slot in range(replicas)]
        self.router.step([FleetChanged(0.0, fleet(states))])
        self.now_s = 0.0
        self.number = 0
        for _ in range(replicas * IN_FLIGHT):
            dispatch = self.decide(self.next(prompt_tokens=self.rng.randrange(200, 6000)))
            self.router.step([FirstToken(dispatch.id, self.now_s, dispatch.choices[0].slot)])

    def next(self, prompt_tokens: int = PROMPT_TOKENS) -> Request:
        self.number += 1
        self.now_s += 0.001
        return request(
            self.number,
            time_s=self.now_s,
            prompt_tokens=prompt_tokens,
            blocks=prompt_tokens // BLOCK,
            turn=self.number % 5,
            output_tokens_max=256,
            affinity_key=self.number % 97,
            prefix_key=self.rng.getrandbits(64),
        )

    def decide(self, arrived: Request) -> Dispatch:
        commands = self.router.step([Arrived(arrived)])
        (dispatch,) = [command for command in commands if isinstance(command, Dispatch)]
        return dispatch

    def finish(self, dispatch: Dispatch) -> None:
        choice = dispatch.choices[0]
        usage = Usage(prompt_tokens=PROMPT_TOKENS, cached_tokens=choice.cached_tokens, output_tokens=OUTPUT_TOKENS)
        self.router.step([FirstToken(dispatch.id, self.now_s, choice.slot)])
        self.router.step([Finished(dispatch.id, self.now_s, choice.slot, 200, usage, OUTPUT_TOKENS)])

    def decision_us(self, rounds: int) -> list[float]:
        """Arrival to dispatch, with the end of the request outside the measurement."""
        times = []
        for _ in range(rounds):
            arrived = self.next()
            start = time.perf_counter()
            dispatch = self.decide(arrived)
            times.append((time.perf_counter() - start) * 1e6)
            self.finish(dispatch)
        return times

    def life_us(self, rounds: int) -> list[float]:
        """Arrival, first token and end."""
        times = []
        for _ in range(rounds):
            arrived = self.next()
            start = time.perf_counter()
            self.finish(self.decide(arrived))
            times.append((time.perf_counter() - start) * 1e6)
        return times


def report(name: str, replicas: int, policy: str, measure: Callable[[int], list[float]], rounds: int) -> None:
    """Print minimum, median and 99th percentile."""
    times = sorted(measure(rounds))
    line = {
        "bench": name,
        "policy": policy,
        "replicas": replicas,
        "min_us": round(times[0], 1),
        "median_us": round(statistics.median(times), 1),
        "p99_us": round(times[int(0.99 * len(times))], 1),
        "rounds": rounds,
    }
    print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="*", default=[8, 64, 256, 512])
    parser.add_argument("--policy", nargs="*", default=["marginal_cost"])
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    for policy in options.policy:
        for replicas in options.replicas:
            bench = Bench(replicas, policy, options.seed)
            report("decision", replicas, policy, bench.decision_us, options.rounds)
            report("request_life", replicas, policy, bench.life_us, options.rounds)
    load = f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    print(f"{load}; times under load are not comparable: compare minima, or ratios of one run", file=sys.stderr)


if __name__ == "__main__":
    main()
