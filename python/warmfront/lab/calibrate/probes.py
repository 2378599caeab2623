"""Timed probes of a live engine over its OpenAI API: prefills alone, and decodes side by side.

Prompts are random words, so nothing of them is cached; lengths are what the engine's own usage reports, so no
tokenizer is needed. What is easy to get wrong: a decode gap is taken only while all streams of a probe decode, or it
would hold the prefill of a neighbour; and the engine must be idle otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import aiohttp

from warmfront.clock import Clock
from warmfront.control.engine_metrics import parse
from warmfront.control.reading import read_body, stream_chunk
from warmfront.errors import WarmfrontError

SYLLABLES = ("ba", "de", "fi", "go", "ku", "la", "me", "ni", "po", "ru", "sa", "te", "vi", "wo", "xu", "za")
WARMUP_WORDS = 256
"""Length of the first prompt: it tells how many tokens a word has and pays for what engines compile when first used."""
LENGTHENINGS_MAX = 5
"""How often a decode probe is tried with streams twice as long."""
KV_SHARE = 0.5
"""Share of the KV cache that a decode probe may fill; lengthened ones need room, too."""
CONTEXT_MIN = 16
"""Shorter prompts say nothing about context."""
GAPS_MIN = 4
"""Fewer gaps in common say nothing."""
REQUEST_TIMEOUT_S = 300.0
METRICS_BYTES_MAX = 32 * 1024 * 1024


class ProbeError(WarmfrontError):
    """The engine cannot be probed."""


@dataclass(frozen=True, slots=True)
class PrefillProbe:
    """One prompt alone."""

    new_tokens: int
    """Computed; what the engine says it found in its cache is left out."""
    context_tokens: int
    """Cached tokens before them."""
    ttft_s: float


@dataclass(frozen=True, slots=True)
class DecodeProbe:
    """Some streams side by side."""

    sequences: int
    context_tokens: float
    """Mean over the probe of the context that all of them read in one step."""
    gap_s: float
    """Mean time between two tokens of a stream."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to try."""

    prompt_tokens: tuple[int, ...]
    sequences: tuple[int, ...]
    output_tokens: int
    repeats: int

    @property
    def contexts(self) -> tuple[int, ...]:
        """Prompt lengths of decode probes: short ones show the cost of a sequence, long ones that of its context."""
        return tuple(sorted({self.prompt_tokens[0], max(1, self.prompt_tokens[-1] // 2)}))


@dataclass(frozen=True, slots=True)
class Measured:
    """All probes of one engine."""

    model: str
    prefills: list[PrefillProbe]
    decodes: list[DecodeProbe]
    kv_tokens: int | None
    """From the engine's metrics; `None`: not told."""


def plan(*, tokens_max: int, sequences_max: int, output_tokens: int, repeats: int) -> Plan:
    """Return lengths and widths that grow by factors of two and four.

    Args:
        tokens_max: Longest prompt, at least 64.
        sequences_max: Most streams side by side.
        output_tokens: Length of each decode probe.
        repeats: How often each prefill is timed.
    """
    lengths = [tokens_max]
    while lengths[-1] >= 128:
        lengths.append(lengths[-1] // 2)
    widths = [1]
    while widths[-1] * 4 <= sequences_max:
        widths.append(widths[-1] * 4)
    if widths[-1] < sequences_max:
        widths.append(sequences_max)
    return Plan(tuple(reversed(lengths)), tuple(widths), output_tokens, repeats)


def decode_probes(todo: Plan, kv_tokens: int | None) -> list[tuple[int, int]]:
    """Return streams and prompt tokens of each decode probe, shortened until all streams of one fit the KV cache.

    Args:
        todo: What to try.
        kv_tokens: Capacity of the engine; `None`: not known, nothing is shortened.
    """
    probes: list[tuple[int, int]] = []
    for sequences in todo.sequences:
        room = None if kv_tokens is None else int(KV_SHARE * kv_tokens) // sequences - todo.output_tokens
        for tokens in todo.contexts:
            fitting = tokens if room is None else min(tokens, room)
            if fitting >= CONTEXT_MIN and (sequences, fitting) not in probes:
                probes.append((sequences, fitting))
    return probes


@dataclass(slots=True)
class _Stream:
    """One answer as it was read."""

    sent_s: float
    token_s: list[float]
    """When each chunk of the answer came."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class Prober:
    """Sends probes to one engine, one after the other."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, *, model: str | None, clock: Clock, rng: Random
    ) -> None:
        """Wrap an engine.

        Args:
            session: With a read buffer of at least `LINE_BYTES_MAX`.
            url: Base URL, without `/v1`.
            model: Name to ask for; `None`: the first that it serves.
            clock: Measures.
            rng: Words of the prompts. With equal seeds a second run finds them cached.
        """
        self._session, self._url, self._clock, self._rng = session, url.rstrip("/"), clock, rng
        self._model = model or ""
        self._tokens_a_word = 1.0

    async def measure(self, todo: Plan, *, done: Callable[[int, int], None]) -> Measured:
        """Run every probe of a plan.

        Args:
            todo: What to try; decode probes that do not fit the engine's KV cache are shortened or left out.
            done: Called after each probe with how many were taken and how many there are.

        Raises:
            ProbeError: The engine does not answer, refuses, or does not report usage.
        """
        try:
            self._model = self._model or await self._first_model()
            await self._learn_length()
            kv_tokens = await self._kv_tokens()
            lengths = [tokens for tokens in todo.prompt_tokens for _ in range(todo.repeats)]
            fitting = decode_probes(todo, kv_tokens)
            probes = len(lengths) + len(fitting)
            prefills: list[PrefillProbe] = []
            for tokens in lengths:
                prefills.append(await self._prefill(tokens))
                done(len(prefills), probes)
            decodes: list[DecodeProbe] = []
            for sequences, tokens in fitting:
                decodes.append(await self._decode(sequences, tokens, todo.output_tokens))
                done(len(prefills) + len(decodes), probes)
            return Measured(self._model, prefills, decodes, kv_tokens)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise ProbeError(f"{self._url}: {error or type(error).__name__}") from error

    async def _first_model(self) -> str:
        async with self._session.get(f"{self._url}/v1/models") as response:
            await _require_ok(response)
            cards = (await response.json(content_type=None)).get("data") or []
        if not cards:
            raise ProbeError(f"{self._url}: /v1/models names no model; give --model")
        return str(cards[0]["id"])

    async def _kv_tokens(self) -> int | None:
        async with self._session.get(f"{self._url}/metrics") as response:
            if response.status != 200:
                return None
            page = (await read_body(response, bytes_max=METRICS_BYTES_MAX)).decode(errors="replace")
        return next((rank.capacity_tokens for rank in parse(page).ranks.values()), None)

    async def _learn_length(self) -> None:
        words = self._words(WARMUP_WORDS)
        stream = await self._stream(words, output_tokens=2)
        self._tokens_a_word = max(0.5, stream.prompt_tokens / WARMUP_WORDS)

    async def _prefill(self, tokens: int) -> PrefillProbe:
        stream = await self._stream(self._prompt(tokens), output_tokens=1)
        return PrefillProbe(
            new_tokens=max(1, stream.prompt_tokens - stream.cached_tokens),
            context_tokens=stream.cached_tokens,
            ttft_s=stream.token_s[0] - stream.sent_s,
        )

    async def _decode(self, sequences: int, tokens: int, output_tokens: int) -> DecodeProbe:
        """Time streams side by side, longer ones when the first has ended before the last begins."""
        for _ in range(LENGTHENINGS_MAX):
            probe = _overlap(await self._side_by_side(sequences, tokens, output_tokens))
            if probe is not None:
                return probe
            output_tokens *= 2
        raise ProbeError(
            f"{sequences} streams of {output_tokens // 2} tokens never decode side by side: raise --output-tokens, or "
            f"lower --sequences-max to what the engine runs at once"
        )

    async def _side_by_side(self, sequences: int, tokens: int, output_tokens: int) -> list[_Stream]:
        prompts = [self._prompt(tokens) for _ in range(sequences)]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._stream(prompt, output_tokens=output_tokens)) for prompt in prompts]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from failed
        return [task.result() for task in tasks]

    async def _stream(self, prompt: str, *, output_tokens: int) -> _Stream:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        sent_s = self._clock.now_s()
        times: list[float] = []
        usage: dict[str, Any] | None = None
        async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
            await _require_ok(response)
            async for line in response.content:
                chunk = stream_chunk(line)
                if chunk is None:
                    continue
                if "error" in chunk:
                    raise ProbeError(f"the engine answers with an error: {chunk['error']}")
                usage = chunk.get("usage") or usage
                if chunk.get("choices"):  # also with empty text: half a character is a token too
                    times.append(self._clock.now_s())
        if not times or usage is None:
            raise ProbeError("the engine streams no answer or no usage; it must know stream_options.include_usage")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return _Stream(sent_s, times, usage["prompt_tokens"], cached, usage["completion_tokens"])

    def _prompt(self, tokens: int) -> str:
        return self._words(max(1, round(tokens / self._tokens_a_word)))

    def _words(self, count: int) -> str:
        return " ".join("".join(self._rng.choices(SYLLABLES, k=2)) for _ in range(count))


def _overlap(streams: list[_Stream]) -> DecodeProbe | None:
    """Return the mean gap between two tokens while every stream decodes; `None` when that is too short a time."""
    begin_s = max(stream.token_s[0] for stream in streams)
    end_s = min(stream.token_s[-1] for stream in streams)
    inside = [[at_s for at_s in stream.token_s if begin_s <= at_s <= end_s] for stream in streams]
    # A chunk may hold several tokens: usage says how many there were in all.
    tokens_a_chunk = sum(stream.output_tokens for stream in streams) / sum(len(stream.token_s) for stream in streams)
    if min(len(times) for times in inside) <= GAPS_MIN:
        return None
    gaps = sum((len(times) - 1) * tokens_a_chunk for times in inside)
    middle_s = (begin_s + end_s) / 2
    context = sum(
        stream.prompt_tokens + tokens_a_chunk * sum(at_s < middle_s for at_s in stream.token_s) for stream in streams
    )
    return DecodeProbe(len(streams), context, sum(times[-1] - times[0] for times in inside) / gaps)


async def _require_ok(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        raise ProbeError(f"{response.url} answers {response.status}: {(await response.text())[:200]}")
