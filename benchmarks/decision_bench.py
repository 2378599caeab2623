"""How long a decision takes. Prints one JSON line per figure; the overlap lookup is a stub.

Run: `python benchmarks/decision_bench.py [--replicas 8 64 512] [--policy marginal_cost]`. Compare ratios of one run.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable

from warmfront.config import PolicyConfig, RouterConfig
from warmfront.router import Router
from warmfront.types import (
    Arrived,
    Dispatch,
    EventState,
    Finished,
    FirstToken,
    FleetChanged,
    FleetState,
    Overlap,
    PoolState,
    ReplicaState,
    ReplicaUpdate,
    Request,
    RequestId,
    Slot,
    Usage,
)

WARM_SHARE = 8
"""One replica in so many holds part of the prompt."""


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
        rng = random.Random(seed)
        config = RouterConfig(policy=PolicyConfig(name=policy, seed=seed))
        self.router = Router(config, StubIndex(replicas, rng))
        states = [
            ReplicaState(
                Slot(slot),
                ReplicaUpdate(
                    id=f"http://10.0.0.{slot}:8000",
                    url=f"http://10.0.0.{slot}:8000",
                    rank=None,
                    engine="vllm",
                    ready=True,
                    block_size=16,
                    capacity_tokens=400_000,
                ),
                EventState(state="live"),
            )
            for slot in range(replicas)
        ]
        self.router.step([FleetChanged(0.0, FleetState(1, [PoolState("m", {"m": None}, "exact", None, states)]))])
        self.rng = rng
        self.now_s = 0.0
        self.number = 0
        for _ in range(replicas * 8):
            dispatch = self.arrive(tokens=rng.randrange(200, 6000))
            self.router.step([FirstToken(dispatch.id, self.now_s, dispatch.choices[0].slot)])

    def arrive(self, tokens: int = 4000) -> Dispatch:
        self.number += 1
        self.now_s += 0.001
        request = Request(
            id=RequestId(self.number),
            time_s=self.now_s,
            pool="m",
            model="m",
            adapter=None,
            flow="",
            priority=0,
            route="prefix",
            basis="tokens",
            prompt_tokens=tokens,
            blocks=tokens // 16,
            turn=self.number % 5,
            output_tokens_max=256,
            affinity_key=self.number % 97,
            prefix_key=self.rng.getrandbits(64),
            stream=True,
            fallback=None,
        )
        (command,) = self.router.step([Arrived(request)])
        assert isinstance(command, Dispatch)
        return command

    def finish(self, dispatch: Dispatch) -> None:
        slot = dispatch.choices[0].slot
        usage = Usage(prompt_tokens=4000, cached_tokens=dispatch.choices[0].cached_tokens, output_tokens=200)
        self.router.step([FirstToken(dispatch.id, self.now_s, slot)])
        self.router.step([Finished(dispatch.id, self.now_s, slot, 200, usage, 200)])

    def decision_us(self, rounds: int) -> list[float]:
        """Arrival to dispatch, with the end of the request outside the measurement."""
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            dispatch = self.arrive()
            times.append((time.perf_counter() - start) * 1e6)
            self.finish(dispatch)
        return times

    def life_us(self, rounds: int) -> list[float]:
        """Arrival, first token and end."""
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            self.finish(self.arrive())
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
    parser = argparse.ArgumentParser(description=__doc__)
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


if __name__ == "__main__":
    main()
