"""The demo's traffic twice: over HTTP through a real router to real engine processes, and on virtual time.

Both sides get the same prompts at the same moments: here the texts, there their tokens as segments, cut where the chat
template and the answers cut them. What differs is what virtual time leaves out: sockets, tokenizing, interpreters that
share two cores. One would get wrong the pieces of the template: they are contents that all prompts share, and a block
that ends within them is found again by any of them.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from warmfront.clock import MonotonicClock
from warmfront.demo.load import Progress, run_load
from warmfront.demo.processes import MODEL_NAME, running_fleet
from warmfront.demo.report import percentile
from warmfront.demo.workload import MIX, Conversation, plan
from warmfront.lab.model import EngineSpec, FleetSpec, Regime, Segment, SimRequest, Slo
from warmfront.lab.run import run_source
from warmfront.sim.tokens import END, START, BuiltinTokenizer

from lab_checks.figures import Figures, of_outcome
from lab_checks.figures import figures as reduced

POLICIES = ("round_robin", "marginal_cost")
ENGINES = 4
SECONDS = 20.0
RATE = MIX.rate
SEED = 1
HIT_RATE_WITHIN = 0.02
TTFT_P50_WITHIN = 0.20
ANSWERS = 1 << 32
"""Content ids from here on are answers."""
COMPARED = ("hit_rate", "ttft_mean_ms", "ttft_p50_ms", "ttft_p90_ms", "ttft_p99_ms")


def check(
    *, policies: Sequence[str] = POLICIES, engines: int = ENGINES, seconds: float = SECONDS, rate: float = RATE
) -> dict[str, Any]:
    """Run every policy on both clocks.

    Raises:
        RuntimeError: A request failed.
    """
    conversations = plan(replace(MIX, rate=rate), seconds=seconds, seed=SEED)
    return {
        "engines": engines,
        "seconds": seconds,
        "conversations_per_s": rate,
        "requests": sum(len(conversation.turns) for conversation in conversations),
        "seed": SEED,
        "within": {"hit_rate": HIT_RATE_WITHIN, "ttft_p50_ms": TTFT_P50_WITHIN},
        "policies": {
            policy: {
                "processes": asyncio.run(over_http(conversations, policy, engines)),
                "virtual": on_virtual_time(conversations, policy, engines),
            }
            for policy in policies
        },
    }


# -- real processes


async def over_http(conversations: Sequence[Conversation], policy: str, engines: int) -> Figures:
    """Hold all conversations with fresh processes.

    Raises:
        RuntimeError: A request failed; the logs stay where the message says.
    """
    clock = MonotonicClock()
    logs = Path(tempfile.mkdtemp(prefix="warmfront-lab-check-"))
    progress = Progress(planned=sum(len(conversation.turns) for conversation in conversations))
    async with running_fleet(engines=engines, policy=policy, seed=SEED, logs=logs, clock=clock) as fleet:
        await run_load([fleet.router], model=MODEL_NAME, conversations=conversations, progress=progress, clock=clock)
    if progress.errors:
        raise RuntimeError(f"{len(progress.errors)} requests failed, the first with {progress.errors[0]}; logs: {logs}")
    shutil.rmtree(logs)
    outcomes = progress.outcomes
    ttft_ms = sorted(1e3 * outcome.ttft_s for outcome in outcomes)
    shares = {"ttft_p50_ms": 0.5, "ttft_p90_ms": 0.9, "ttft_p99_ms": 0.99}
    return {
        "hit_rate": round(
            sum(each.cached_tokens for each in outcomes) / sum(each.prompt_tokens for each in outcomes), 5
        ),
        "ttft_mean_ms": round(sum(ttft_ms) / len(ttft_ms), 3),
        **{name: round(percentile(ttft_ms, share), 3) for name, share in shares.items()},
    }


# -- virtual time


def on_virtual_time(conversations: Sequence[Conversation], policy: str, engines: int) -> Figures:
    """Hold all conversations in the lab."""
    regime = Regime(
        name="lab-check",
        title="the demo",
        expects="",
        workload={},
        fleet=FleetSpec((EngineSpec("demo", count=engines),), block_size=16),
        slo=Slo(ttft_s=2.0),
        loads=(RATE,),
        warmup=0.0,
    )
    result = run_source(regime, Conversations(conversations), policy, RATE, SEED)
    whole = reduced([of_outcome(outcome) for outcome in result.outcomes])
    return {name: whole[name] for name in COMPARED}


class Conversations:
    """The demo's conversations as a source: a turn follows the answer after the pause."""

    def __init__(self, conversations: Sequence[Conversation]) -> None:
        self._conversations = conversations
        self._tokenizer = BuiltinTokenizer()
        self._keys = itertools.count()
        self._pieces: dict[str, Segment] = {}
        self._turns: dict[int, tuple[Conversation, int]] = {}
        """Key of a request → its conversation and the number of its turn."""

    def arrivals(self) -> Iterator[SimRequest]:
        """Yield the first turn of each."""
        for conversation in self._conversations:
            yield self._request(conversation, 0, self._opening(conversation), conversation.start_s)

    def finished(self, request: SimRequest, now_s: float) -> Sequence[SimRequest]:
        """Return the next turn, if there is one."""
        conversation, turn = self._turns.pop(request.key)
        if turn + 1 == len(conversation.turns):
            return ()
        assert request.answer is not None
        prompt = (*request.prompt, (request.answer, request.output_tokens), self._piece(f"{END}\n"))
        return (self._request(conversation, turn + 1, prompt, now_s + conversation.pause_s),)

    def _opening(self, conversation: Conversation) -> tuple[Segment, ...]:
        if conversation.system is None:
            return ()
        return tuple(self._piece(text) for text in (f"{START}system\n", conversation.system, f"{END}\n"))

    def _request(self, conversation: Conversation, turn: int, before: tuple[Segment, ...], at_s: float) -> SimRequest:
        key = next(self._keys)
        self._turns[key] = (conversation, turn)
        pieces = (f"{START}user\n", conversation.turns[turn], f"{END}\n", f"{START}assistant\n")
        return SimRequest(
            key=key,
            at_s=at_s,
            prompt=(*before, *(self._piece(text) for text in pieces)),
            output_tokens=conversation.answer_tokens[turn],
            output_tokens_max=conversation.answer_tokens[turn],
            answer=ANSWERS + key,
            turn=turn,
        )

    def _piece(self, text: str) -> Segment:
        """Return a text as content of its own: equal texts are equal tokens."""
        if text not in self._pieces:
            self._pieces[text] = (len(self._pieces), len(self._tokenizer.encode(text)))
        return self._pieces[text]
