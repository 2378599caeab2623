"""Reads answers of engines: a whole body up to a bound, or the chunks of a stream.

What one would get wrong: `StreamReader.read(n)` returns as soon as anything has come, so it cuts long answers. Lines of
a stream are bounded by the session's `read_bufsize`: give it `LINE_BYTES_MAX`.
"""

from __future__ import annotations

import json
from typing import Any

import aiohttp

READ_BYTES = 64 * 1024
LINE_BYTES_MAX = 1024 * 1024
"""Longest line of a stream."""


async def read_body(response: aiohttp.ClientResponse, *, bytes_max: int) -> bytes:
    """Return the body.

    Raises:
        ValueError: It is longer than `bytes_max`.
        aiohttp.ClientError: The connection failed.
    """
    body = bytearray()
    async for chunk in response.content.iter_chunked(READ_BYTES):
        body += chunk
        if len(body) > bytes_max:
            raise ValueError(f"answer of more than {bytes_max} bytes")
    return bytes(body)


def stream_chunk(line: bytes) -> dict[str, Any] | None:
    """Return the object in a line of a stream of an OpenAI API; `None`: the line holds none, or ends the stream.

    Raises:
        ValueError: The engine streams what is not a JSON object.
    """
    if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
        return None
    try:
        chunk = json.loads(line[6:])
    except ValueError as error:
        raise ValueError(f"a stream of what is not JSON: {line[:80]!r}") from error
    if not isinstance(chunk, dict):
        raise ValueError(f"a stream of what is not an object: {line[:80]!r}")
    return chunk
