"""Sends the demo's conversations and measures them where a client sits."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from warmfront.clock import Clock
from warmfront.control.reading import LINE_BYTES_MAX, stream_chunk
from warmfront.demo.workload import Conversation

REQUEST_TIMEOUT_S = 60.0
PREDICTED_HEADER = "x-warmfront-predicted-cached-tokens"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One finished request."""

    ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    predicted_tokens: int | None
    """What the router said it expected to be cached; `None` without the header."""


@dataclass(slots=True)
class Progress:
    """What has happened so far; the display reads it."""

    planned: int
    sent: int = 0
    outcomes: list[Outcome] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    started_s: float = 0.0
    ended_s: float = 0.0

    @property
    def in_flight(self) -> int:
        """Requests without an answer yet."""
        return self.sent - len(self.outcomes) - len(self.errors)


async def run_load(
    urls: Sequence[str], *, model: str, conversations: Sequence[Conversation], progress: Progress, clock: Clock
) -> None:
    """Send all conversations; several entry points are used in turn.

    Args:
        urls: Base URLs.
        model: Name to ask for.
        conversations: As planned; the first starts `start_s` from now.
        progress: Filled as answers come. A failed request ends its conversation and is listed, never raised.
        clock: Measures everything.
    """
    entry = itertools.cycle(urls)
    progress.started_s = clock.now_s()
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        aiohttp.ClientSession(timeout=timeout, connector=connector, read_bufsize=LINE_BYTES_MAX) as session,
        asyncio.TaskGroup() as group,
    ):
        client = _Client(session, lambda: next(entry), model, progress, clock)
        for conversation in conversations:
            group.create_task(client.converse(conversation))
    progress.ended_s = clock.now_s()


class _Client:
    def __init__(
        self, session: aiohttp.ClientSession, entry: Callable[[], str], model: str, progress: Progress, clock: Clock
    ) -> None:
        self._session = session
        self._entry = entry
        self._model = model
        self._progress = progress
        self._clock = clock

    async def converse(self, conversation: Conversation) -> None:
        """Hold one conversation from its planned start to its last answer."""
        await asyncio.sleep(self._progress.started_s + conversation.start_s - self._clock.now_s())
        messages: list[dict[str, str]] = []
        if conversation.system is not None:
            messages.append({"role": "system", "content": conversation.system})
        for number, (turn, tokens) in enumerate(zip(conversation.turns, conversation.answer_tokens, strict=True)):
            if number:
                await asyncio.sleep(conversation.pause_s)
            messages.append({"role": "user", "content": turn})
            self._progress.sent += 1
            try:
                outcome, answer = await self._ask(messages, tokens)
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                self._progress.errors.append(f"{type(error).__name__}: {error}")
                return
            self._progress.outcomes.append(outcome)
            messages.append({"role": "assistant", "content": answer})

    async def _ask(self, messages: list[dict[str, str]], tokens: int) -> tuple[Outcome, str]:
        body = {
            "model": self._model,
            "messages": messages,
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        started_s = self._clock.now_s()
        async with self._session.post(self._entry() + "/v1/chat/completions", json=body) as response:
            if response.status != 200:
                raise _BadAnswerError(f"status {response.status}: {(await response.text())[:200]}")
            predicted = response.headers.get(PREDICTED_HEADER)
            answer = _Answer()
            async for line in response.content:
                answer.feed(line, self._clock)
        return answer.outcome(started_s, None if predicted is None else int(predicted)), answer.text


class _BadAnswerError(ValueError):
    """The answer is not what was asked for."""


class _Answer:
    """One stream as it is read."""

    def __init__(self) -> None:
        self.text = ""
        self._first_s: float | None = None
        self._usage: dict[str, Any] | None = None

    def feed(self, line: bytes, clock: Clock) -> None:
        chunk = stream_chunk(line)
        if chunk is None:
            return
        if "error" in chunk:
            raise _BadAnswerError(str(chunk["error"]))
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk["choices"]:
            content = choice["delta"].get("content")
            if content:
                self._first_s = clock.now_s() if self._first_s is None else self._first_s
                self.text += content

    def outcome(self, started_s: float, predicted: int | None) -> Outcome:
        if self._first_s is None or self._usage is None:
            raise _BadAnswerError("the stream ended without text or usage")
        return Outcome(
            ttft_s=self._first_s - started_s,
            prompt_tokens=self._usage["prompt_tokens"],
            cached_tokens=(self._usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            output_tokens=self._usage["completion_tokens"],
            predicted_tokens=predicted,
        )
