"""One fault in one world: what clients see, how long it lasts, and what the index believes a minute later."""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from warmfront.clock import MonotonicClock

from faults.cases import Case
from faults.load import Shot, plan, send
from faults.world import MODEL, World, running

BEFORE_S, DURING_S, LATER_S = 10.0, 24.0, 46.0
RATE, LATER_RATE = 5.0, 2.0
BELIEF_S = 18.0
"""What the index believes is read from the requests of the last seconds: a minute after the fault began."""
SLOW_FACTOR, SLOW_MIN_S = 5.0, 1.0
"""A first token later than this many times the p90 before, and than a second, counts as an effect of the fault."""


@dataclass(frozen=True)
class Observation:
    """What one run shows. Times in seconds since the fault began."""

    case: str
    router: str
    requests: int
    """Sent from the fault on."""
    seen: dict[str, int]
    """What they saw, by kind."""
    slow: int
    """Answered, but with a first token that came far too late."""
    recovered_s: float
    """Start of the last request that failed or was slow; 0 when none did."""
    ttft_before_s: float
    """Median."""
    ttft_after_s: float | None
    """Median of the last five seconds of full load; nothing when none was answered."""
    belief_requests: int
    """Requests a minute later that tell what was predicted and what was cached."""
    belief_exact: float | None
    """Share of them whose prediction was exact."""
    belief_error: float | None
    """Sum of |predicted - reported| cached tokens over their prompt tokens."""
    hit_rate_before: float
    hit_rate_after: float | None


async def observe(case: Case, router: str, folder: Path, *, seed: int = 0) -> Observation:
    """Run one case.

    Args:
        case: The fault.
        router: `warmfront`, or the name of a contender; for those the minute afterwards is left out.
        folder: For logs and state.
        seed: Of the load.

    Raises:
        TimeoutError: Something did not become ready in the beginning.
    """
    spans = [(BEFORE_S + DURING_S, RATE)] + ([(LATER_S, LATER_RATE)] if router == "warmfront" else [])
    async with running(router, folder, case.settings, through_doors=case.doors, source=case.source) as world:
        await send(plan([(6.0, RATE)], seed + 1), world.url, MODEL, MonotonicClock())  # nothing is cold afterwards
        shots, _ = await asyncio.gather(
            send(plan(spans, seed), world.url, MODEL, MonotonicClock()), _befall(case, world)
        )
    return _reduce(case, router, shots)


async def _befall(case: Case, world: World) -> None:
    await asyncio.sleep(BEFORE_S)
    await case.begin(world)
    await asyncio.sleep(case.heals_s)
    await case.heal(world)


def _reduce(case: Case, router: str, shots: Sequence[Shot]) -> Observation:
    before = [shot for shot in shots if shot.start_s < BEFORE_S]
    # A request that was on its way when the fault began belongs to what the fault did.
    touched = [shot for shot in shots if (shot.end_s or 0.0) >= BEFORE_S]
    calm = [shot.ttft_s for shot in before if shot.seen == "ok" and shot.ttft_s is not None and shot not in touched]
    limit_s = max(SLOW_MIN_S, SLOW_FACTOR * statistics.quantiles(calm, n=10)[-1])
    slow = [shot for shot in touched if shot.seen == "ok" and (shot.ttft_s or 0.0) > limit_s]
    bad = slow + [shot for shot in touched if shot.seen != "ok"]
    end_s = BEFORE_S + DURING_S
    after = [shot for shot in touched if end_s - 5.0 <= shot.start_s < end_s and shot.seen == "ok"]
    later = [shot for shot in shots if shot.start_s >= end_s + LATER_S - BELIEF_S and shot.seen == "ok"]
    told = [shot for shot in later if shot.predicted_tokens is not None and shot.prompt_tokens]
    errors = [abs((shot.predicted_tokens or 0) - shot.cached_tokens) for shot in told]
    return Observation(
        case=case.name,
        router=router,
        requests=len(touched),
        seen=dict(sorted(Counter(shot.seen for shot in touched).items())),
        slow=len(slow),
        recovered_s=round(max((max(0.0, shot.start_s - BEFORE_S) for shot in bad), default=0.0), 1),
        ttft_before_s=round(statistics.median(calm), 3),
        ttft_after_s=round(statistics.median(shot.ttft_s or 0.0 for shot in after), 3) if after else None,
        belief_requests=len(told),
        belief_exact=round(sum(error == 0 for error in errors) / len(told), 3) if told else None,
        belief_error=round(sum(errors) / sum(shot.prompt_tokens for shot in told), 4) if told else None,
        hit_rate_before=_hit_rate(before) or 0.0,
        hit_rate_after=_hit_rate(after),
    )


def _hit_rate(shots: Sequence[Shot]) -> float | None:
    tokens = sum(shot.prompt_tokens for shot in shots)
    return round(sum(shot.cached_tokens for shot in shots) / tokens, 3) if tokens else None


def as_json(observation: Observation) -> dict[str, Any]:
    """Return it as a JSON object."""
    return asdict(observation)
