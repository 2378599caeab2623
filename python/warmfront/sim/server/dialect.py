"""What a dialect of the HTTP surface does. One implementation an API: chat, completions, responses, messages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

from warmfront.errors import InvalidRequestError
from warmfront.sim.server.job import Choice, Job
from warmfront.sim.tokens import BuiltinTokenizer

Body = Mapping[str, Any]


class Dialect(Protocol):
    """Reads requests and prints answers of one API."""

    id_prefix: str

    def prompts(self, body: Body, tokenizer: BuiltinTokenizer) -> list[list[int]]:
        """Return the token ids of every prompt in a request.

        Raises:
            InvalidRequestError: The prompt cannot be read.
        """

    def tokens_max(self, body: Body) -> int | None:
        """Return the longest answer asked for."""

    def opening(self, job: Job) -> bytes:
        """Return what a stream begins with, once the first token exists."""

    def token(self, job: Job, choice: Choice, text: bytes) -> bytes:
        """Return the frame of one token; `text` is a JSON string."""

    def ending(self, job: Job, texts: list[str]) -> bytes:
        """Return what a stream ends with."""

    def complete(self, job: Job, texts: list[str]) -> dict[str, Any]:
        """Return the whole answer, for a request that does not stream."""


def frame(content: dict[str, Any], *, event: str | None = None) -> bytes:
    """Return one SSE message."""
    data = b"data: " + json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"
    return data if event is None else b"event: " + event.encode() + b"\n" + data


def positive(body: Body, *names: str) -> int | None:
    """Return the first of these fields that is given, a whole number above 0.

    Raises:
        InvalidRequestError: It is something else.
    """
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InvalidRequestError(f"{name} must be at least 1, got {value}. (parameter={name}, value={value})")
        return value
    return None


def messages_of(body: Body) -> list[dict[str, Any]]:
    """Return the messages of a chat-like body.

    Raises:
        InvalidRequestError: There are none.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidRequestError("messages must be a non-empty list")
    return messages


def openai_usage(job: Job) -> dict[str, Any]:
    """Return `usage` of chat and completions."""
    details = {"cached_tokens": job.cached_tokens} if job.tells_cached_tokens else None
    return {
        "prompt_tokens": job.prompt_tokens,
        "total_tokens": job.prompt_tokens + job.output_tokens,
        "completion_tokens": job.output_tokens,
        "prompt_tokens_details": details,
    }
