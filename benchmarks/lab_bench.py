"""How fast virtual time runs: 100,000 requests over 16 replicas, in seconds of one core, and where they go.

Run: `python benchmarks/lab_bench.py [--requests 100000] [--replicas 16] [--policy marginal_cost]`; prints a JSON line.
Processor time, not wall time, so that a busy machine does not change the figures much; the process uses one thread.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence

from warmfront.lab.model import EngineSpec, FleetSpec, Regime, SimRequest, Slo
from warmfront.lab.run import run_source

TURNS = 3
APPS = 200
SYSTEM_TOKENS = 2000
PER_REPLICA = 9.0
"""Requests a second for each replica: busy most of the time, no growing queue."""


class Conversations:
    """Conversations of three turns behind one of 200 system prompts."""

    def __init__(self, *, requests: int, rate: float, seed: int) -> None:
        self._random = random.Random(seed)
        self._sessions, self._rate = requests // TURNS, rate / TURNS
        self._created = 0

    def arrivals(self) -> Iterator[SimRequest]:
        at_s = 0.0
        for session in range(self._sessions):
            at_s += self._random.expovariate(self._rate)
            system = (1 + int(APPS * self._random.random() ** 2), SYSTEM_TOKENS)
            yield self._request(at_s, (system, self._said()), session, 0)

    def finished(self, request: SimRequest, now_s: float) -> Sequence[SimRequest]:
        if request.turn + 1 == TURNS or request.answer is None or request.session is None:
            return []
        prompt = (*request.prompt, (request.answer, request.output_tokens), self._said())
        return [self._request(now_s + self._random.expovariate(0.2), prompt, request.session, request.turn + 1)]

    def _said(self) -> tuple[int, int]:
        return self._random.getrandbits(48), self._random.randint(50, 450)

    def _request(self, at_s: float, prompt: tuple[tuple[int, int], ...], session: int, turn: int) -> SimRequest:
        key, self._created = self._created, self._created + 1
        output = min(2000, max(1, round(self._random.lognormvariate(5.0, 0.8))))
        answer = self._random.getrandbits(48)
        return SimRequest(key, at_s, prompt, output, answer=answer, session=session, turn=turn)


class ProcessorClock:
    """Seconds of processor time of this process."""

    def now_s(self) -> float:
        return time.process_time()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--replicas", type=int, default=16)
    parser.add_argument("--policy", default="marginal_cost")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    regime = Regime(
        name="lab_bench",
        title="conversations",
        expects="",
        workload={},
        fleet=FleetSpec((EngineSpec("qwen3-32b-tp2-h100", count=given.replicas),)),
        slo=Slo(ttft_s=2.0),
        loads=(PER_REPLICA * given.replicas,),
        requests=given.requests,
    )
    load = regime.loads[0]
    source = Conversations(requests=given.requests, rate=load, seed=given.seed)
    result = run_source(regime, source, given.policy, load, given.seed, clock=ProcessorClock())
    outcomes = result.outcomes
    first_s = sorted(each.first_token_s - each.arrived_s for each in outcomes if each.first_token_s is not None)
    steps = sum(count for _, count in result.gaps)
    print(
        json.dumps(
            {
                "policy": given.policy,
                "requests": len(outcomes),
                "replicas": given.replicas,
                "processor_s": round(result.wall_s, 2),
                "us_per_request": round(1e6 * result.wall_s / len(outcomes), 1),
                "stages_s": {name: round(seconds, 2) for name, seconds in result.stages_s.items()},
                "virtual_s": round(result.ended_s, 1),
                "tokens_out": steps + len(outcomes),
                "hit_rate": round(
                    sum(each.cached_tokens for each in outcomes) / sum(each.prompt_tokens for each in outcomes), 3
                ),
                "ttft_p50_s": round(first_s[len(first_s) // 2], 4),
                "ttft_p99_s": round(first_s[int(0.99 * len(first_s))], 4),
                "busy": round(sum(result.busy_s) / result.ended_s / given.replicas, 3),
                "failed": sum(each.error is not None for each in outcomes),
            }
        )
    )


if __name__ == "__main__":
    main()
