"""Turns a log of requests into a workload file that holds no prompt text.

A line is `{"time": …, "body": …}` with the OpenAI body of a chat or a completion; `usage`, `response` and `answer` are
optional and say how long the answer was. Each prompt is cut into blocks and each block is replaced by a keyed hash of
itself and all before it. Without the key nobody can test a guess against the file, and a random key is forgotten when
the file is written. What one would get wrong: hashes without a key would be no protection, since texts can be guessed.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from warmfront.errors import ConfigError
from warmfront.lab.jobs import Job, Step
from warmfront.lab.model import Segment
from warmfront.lab.traces import lines

TOKEN_BYTES = 4
"""Bytes that count as one token where there is no tokenizer, as in the core."""
SALT_BYTES_MAX = 64
"""Longest key of BLAKE2b."""
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"

Progress = Callable[[int, int], None]
Tokenize = Callable[[str, bytes], Sequence[Sequence[int]]]
"""Path and body → token ids of each prompt; raises `ValueError` where they cannot be known."""


class Usage(Struct, frozen=True):
    """What the engine counted."""

    completion_tokens: Annotated[int, Meta(ge=0)] | None = None


class Response(Struct, frozen=True):
    """An answer as the engine sent it; only its usage is looked at."""

    usage: Usage | None = None


class Entry(Struct, frozen=True):
    """One line of the log. Fields that are not named here are ignored."""

    time: float | str
    """Seconds since any moment, or ISO 8601."""
    body: msgspec.Raw
    """The request's body, as an object or as a string that holds one."""
    usage: Usage | None = None
    response: Response | None = None
    answer: str | None = None
    """Text of the answer, to estimate its length."""


class Options(Struct, frozen=True):
    """How to read a log."""

    salt: bytes
    """Key of the hashes, 1 to 64 bytes."""
    block_tokens: int = 64
    output_tokens: int = 256
    """Length of an answer about which the log says nothing."""
    tokenize: Tokenize | None = None


class Imported(Struct):
    """What became of a log."""

    jobs: list[Job]
    notes: Counter[str]
    """What was skipped or guessed, in words, and how often."""


_decoder = msgspec.json.Decoder(Entry)


def read(path: Path, options: Options, progress: Progress | None = None) -> Imported:
    """Read a log.

    Args:
        path: JSONL, in any order of times.
        options: See there.
        progress: Called with bytes done and in all.

    Raises:
        ConfigError: A line cannot be read; names file, line and field.
    """
    notes: Counter[str] = Counter()
    timed: list[tuple[float, Step]] = []
    done, size = 0, path.stat().st_size if path.is_file() else 0
    for number, line in lines(path):
        done += len(line)
        if progress is not None:
            progress(done, size)
        try:
            entry = _decoder.decode(line)
            at_s = _seconds(entry.time)
            steps = list(_steps(entry, options, notes))
        except (ValueError, msgspec.DecodeError) as error:
            raise ConfigError(f"{path}:{number}: {error}") from error
        timed += ((at_s, step) for step in steps)
    timed.sort(key=lambda pair: pair[0])
    return Imported([Job(at_s - timed[0][0], (step,)) for at_s, step in timed], notes)


def _steps(entry: Entry, options: Options, notes: Counter[str]) -> Iterator[Step]:
    """Yield the requests of one line: one for each prompt of its body.

    Raises:
        ValueError: The body is none.
    """
    raw = bytes(entry.body)
    body = msgspec.json.decode(raw)
    if isinstance(body, str):
        raw = body.encode()
        body = msgspec.json.decode(raw)
    if not isinstance(body, dict):
        raise ValueError(f"body: expected an object, got {type(body).__name__}")
    if "messages" not in body and "prompt" not in body:
        notes["lines without a prompt, left out"] += 1
        return
    key = body.get("prompt_cache_key") or body.get("user")
    for data in _prompts(raw, body, options, notes):
        if not data:
            notes["empty prompts, left out"] += 1
            continue
        yield Step(
            prompt=hashed(data, options.block_tokens, options.salt),
            output_tokens=_output_tokens(entry, body, options, notes),
            output_tokens_max=_limit(body),
            session=_hash(options.salt, str(key).encode()) if key is not None else None,
            turn=_turn(body),
        )


def hashed(data: bytes, block_tokens: int, salt: bytes) -> tuple[Segment, ...]:
    """Return a prompt as blocks known by hash alone.

    Args:
        data: Four bytes a token.
        block_tokens: Tokens in a block; the last one may be shorter.
        salt: Key.
    """
    size, parent = block_tokens * TOKEN_BYTES, b""
    segments: list[Segment] = []
    for start in range(0, len(data), size):
        block = data[start : start + size]
        content = _hash(salt, parent + block)
        segments.append((content, -(-len(block) // TOKEN_BYTES)))
        parent = content.to_bytes(8, "big")
    return tuple(segments)


def _hash(salt: bytes, data: bytes) -> int:
    """Return 63 bits, so that every reader's integers hold them."""
    return int.from_bytes(blake2b(data, digest_size=8, key=salt).digest(), "big") >> 1


def _prompts(raw: bytes, body: dict[str, Any], options: Options, notes: Counter[str]) -> list[bytes]:
    """Return each prompt of a body as four bytes a token."""
    if options.tokenize is not None:
        try:
            prompts = options.tokenize(CHAT if "messages" in body else COMPLETION, raw)
        except ValueError as error:
            notes[f"requests cut into bytes instead of tokens ({error})"] += 1
        else:
            return [_packed(ids) for ids in prompts]
    if "messages" in body:
        return [_chat_text(body)]
    return _completion_texts(body["prompt"])


def _chat_text(body: dict[str, Any]) -> bytes:
    """Write a chat so that a conversation begins with the bytes of its earlier turns, as templates do."""
    messages = body["messages"]
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError("body.messages: expected a list of objects")
    tools = [msgspec.json.encode(body["tools"])] if body.get("tools") else []
    return b"".join([*tools, *(_message_text(message) for message in messages)])


def _message_text(message: dict[str, Any]) -> bytes:
    content = message.get("content")
    if isinstance(content, list):
        text = b"".join(
            str(part["text"]).encode() if isinstance(part, dict) and "text" in part else msgspec.json.encode(part)
            for part in content
        )
    else:
        text = content.encode() if isinstance(content, str) else b""
    calls = msgspec.json.encode(message["tool_calls"]) if message.get("tool_calls") else b""
    return b"<%b>%b%b\n" % (str(message.get("role")).encode(), text, calls)


def _completion_texts(prompt: Any) -> list[bytes]:
    match prompt:
        case str():
            return [prompt.encode()]
        case [int(), *_]:
            return [_packed(prompt)]
        case [str() | list(), *_]:
            return [text for one in prompt for text in _completion_texts(one)]
        case _:
            raise ValueError("body.prompt: expected text, token ids, or a list of these")


def _packed(ids: Sequence[Any]) -> bytes:
    try:
        return struct.pack(f"<{len(ids)}I", *ids)
    except struct.error as error:
        raise ValueError(f"body.prompt: {error}") from error


def _output_tokens(entry: Entry, body: dict[str, Any], options: Options, notes: Counter[str]) -> int:
    """Return the length of the answer from the best source that there is."""
    for usage in (entry.usage, entry.response and entry.response.usage):
        if usage and usage.completion_tokens is not None:
            return max(1, usage.completion_tokens)
    if entry.answer is not None:
        notes["answers whose length was estimated from their text"] += 1
        return max(1, -(-len(entry.answer.encode()) // TOKEN_BYTES))
    if (limit := _limit(body)) is not None:
        notes["answers taken to be as long as their limit"] += 1
        return limit
    notes[f"answers taken to have {options.output_tokens} tokens"] += 1
    return options.output_tokens


def _limit(body: dict[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = body.get(name)
        if isinstance(value, int) and value >= 1:
            return value
    return None


def _turn(body: dict[str, Any]) -> int:
    messages = body.get("messages", [])
    return sum(1 for message in messages if isinstance(message, dict) and message.get("role") == "assistant")


def _seconds(time: float | str) -> float:
    if isinstance(time, int | float):
        return float(time)
    try:
        moment = datetime.fromisoformat(time)
    except ValueError as error:
        raise ValueError(f"time: {error}") from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
