"""Clients that record what they see, second by second, while a fault goes on.

Open loop: requests start at planned times however slow the answers are, so a fleet that stalls cannot slow its own
clients down and look better for it. Nothing is retried here: what one request sees is what is recorded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import aiohttp
from warmfront.clock import Clock
from warmfront.control.reading import LINE_BYTES_MAX, stream_chunk
from warmfront.demo.load import PREDICTED_HEADER
from warmfront.sim.words import NOUNS, OTHERS, VERBS

CLIENT_TIMEOUT_S = 20.0
ASSISTANTS = 12
SYSTEM_WORDS = 700
QUESTION_WORDS = 25
ANSWER_TOKENS = (16, 48)


@dataclass(slots=True)
class Shot:
    """One request. Times are seconds since the load began."""

    start_s: float
    seen: str = "unanswered"
    """`ok`, `status 503`, `error event`, `cut`, `timeout` or `refused`."""
    ttft_s: float | None = None
    end_s: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    predicted_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Planned:
    """A request to come."""

    start_s: float
    messages: list[dict[str, str]]
    tokens: int


def plan(spans: Sequence[tuple[float, float]], seed: int) -> list[Planned]:
    """Return requests at random times, in order.

    Args:
        spans: One after the other: seconds, requests a second.
        seed: Decides times, prompts and lengths.
    """
    random = Random(seed)
    systems = [_text(random, SYSTEM_WORDS) for _ in range(ASSISTANTS)]
    weights = [1 / (rank + 1) ** 0.5 for rank in range(ASSISTANTS)]
    planned: list[Planned] = []
    begun_s = 0.0
    for seconds, rate in spans:
        start_s = begun_s + random.expovariate(rate)
        while start_s < begun_s + seconds:
            system = random.choices(systems, weights)[0]
            messages = [
                {"role": "system", "content": system},
                {"role": "user", "content": _text(random, QUESTION_WORDS)},
            ]
            planned.append(Planned(start_s, messages, random.randint(*ANSWER_TOKENS)))
            start_s += random.expovariate(rate)
        begun_s += seconds
    return planned


def _text(random: Random, words: int) -> str:
    return " ".join(random.choice(random.choice((NOUNS, VERBS, OTHERS))) for _ in range(words)) + "."


async def send(planned: Sequence[Planned], url: str, model: str, clock: Clock) -> list[Shot]:
    """Send everything at its time; return what each request saw, in the same order."""
    begun_s = clock.now_s()
    timeout = aiohttp.ClientTimeout(total=CLIENT_TIMEOUT_S)
    # A connection for each request: a pooled one that a dying router closes would blame the client's library.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, read_bufsize=LINE_BYTES_MAX) as session:

        async def one(each: Planned) -> Shot:
            await asyncio.sleep(begun_s + each.start_s - clock.now_s())
            shot = Shot(round(clock.now_s() - begun_s, 3))
            try:
                shot.seen = await _ask(session, url, model, each, shot, lambda: clock.now_s() - begun_s)
            except aiohttp.ClientConnectorError:
                shot.seen = "refused"
            except TimeoutError:
                shot.seen = "timeout"
            except (aiohttp.ClientError, OSError):
                shot.seen = "cut"
            shot.end_s = round(clock.now_s() - begun_s, 3)
            return shot

        return await asyncio.gather(*(one(each) for each in planned))


async def _ask(session: aiohttp.ClientSession, url: str, model: str, each: Planned, shot: Shot, now: Any) -> str:
    body = {
        "model": model,
        "messages": each.messages,
        "max_tokens": each.tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with session.post(url + "/v1/chat/completions", json=body) as response:
        if response.status != 200:
            await response.read()
            return f"status {response.status}"
        predicted = response.headers.get(PREDICTED_HEADER)
        shot.predicted_tokens = None if predicted is None else int(predicted)
        done = False
        async for line in response.content:
            done = done or line.startswith(b"data: [DONE]")
            chunk = stream_chunk(line)
            if chunk is None:
                continue
            if "error" in chunk:
                return "error event"
            if shot.ttft_s is None and chunk.get("choices"):
                shot.ttft_s = round(now() - shot.start_s, 4)
            usage = chunk.get("usage")
            if usage:
                shot.prompt_tokens = usage["prompt_tokens"]
                shot.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return "ok" if done else "cut"
