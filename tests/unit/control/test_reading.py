from __future__ import annotations

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from warmfront.control.reading import read_body, stream_chunk

PIECES, PIECE = 40, b"x" * 10_000


async def pieces(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    for _ in range(PIECES):
        await response.write(PIECE)
    return response


async def test_a_body_that_comes_in_pieces_is_read_whole_or_refused() -> None:
    application = web.Application()
    application.router.add_get("/", pieces)
    async with TestServer(application) as server, aiohttp.ClientSession() as session:
        async with session.get(server.make_url("/")) as response:
            assert await read_body(response, bytes_max=PIECES * len(PIECE)) == PIECE * PIECES
        async with session.get(server.make_url("/")) as response:
            with pytest.raises(ValueError, match="more than 100 bytes"):
                await read_body(response, bytes_max=100)


@pytest.mark.parametrize("line", [b"\n", b": comment\n", b"event: ping\n", b"data: [DONE]\n"])
def test_lines_of_a_stream_without_a_chunk_are_passed_over(line: bytes) -> None:
    assert stream_chunk(line) is None


def test_a_line_of_a_stream_must_hold_an_object() -> None:
    assert stream_chunk(b'data: {"choices": []}\n') == {"choices": []}
    with pytest.raises(ValueError, match="not JSON"):
        stream_chunk(b"data: {\n")
    with pytest.raises(ValueError, match="not an object"):
        stream_chunk(b"data: 3\n")
