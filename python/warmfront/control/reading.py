"""Reads the whole body of an engine's answer, up to a bound.

What one would get wrong: `StreamReader.read(n)` returns as soon as anything has come, so it cuts long answers.
"""

from __future__ import annotations

import aiohttp

READ_BYTES = 64 * 1024


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
