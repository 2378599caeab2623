"""TLS for tests: certificates made on the spot, and an engine that speaks nothing else."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from pathlib import Path
from typing import Any

import trustme
from aiohttp import web

HOST = "127.0.0.1"
TURNS_TO_CLOSE = 20
"""Turns of the loop in which connections that were refused in their handshake are closed, too."""
REPLY = {
    "id": "c1",
    "object": "chat.completion",
    "created": 1,
    "model": "tiny",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "warm"}}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
}
CHUNK = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "tiny"}


def write_certificate(folder: Path, name: str, authority: trustme.CA) -> dict[str, str]:
    """Write a certificate for this machine with its key, and the authority; return their paths."""
    issued = authority.issue_cert(HOST, "localhost")
    content = {
        "cert": b"".join(blob.bytes() for blob in issued.cert_chain_pems),
        "key": issued.private_key_pem.bytes(),
        "ca": authority.cert_pem.bytes(),
    }
    paths = {part: folder / f"{name}-{part}.pem" for part in content}
    for part, path in paths.items():
        path.write_bytes(content[part])
    return {part: str(path) for part, path in paths.items()}


class TlsEngine:
    """An engine with one model behind TLS, in a thread of its own; it keeps what it hears.

    Args:
        server: Paths of its certificate and key, and of the authority of its clients.
        wants_certificate: Clients must show one of that authority.
    """

    def __init__(self, server: dict[str, str], *, wants_certificate: bool = False) -> None:
        self.heard: list[tuple[str, dict[str, str]]] = []
        self.url = ""
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=server["ca"])
        self._context.load_cert_chain(server["cert"], server["key"])
        self._context.verify_mode = ssl.CERT_REQUIRED if wants_certificate else ssl.CERT_NONE
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._runner: web.AppRunner | None = None

    def start(self) -> None:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(timeout=10)

    def stop(self) -> None:
        if self._runner is not None:
            asyncio.run_coroutine_threadsafe(self._close(self._runner), self._loop).result(timeout=10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()

    @staticmethod
    async def _close(runner: web.AppRunner) -> None:
        await runner.cleanup()
        for _ in range(TURNS_TO_CLOSE):
            await asyncio.sleep(0)

    async def _open(self) -> None:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, HOST, 0, ssl_context=self._context).start()
        self.url = f"https://{HOST}:{self._runner.addresses[0][1]}"

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.heard.append((request.path, {name.lower(): value for name, value in request.headers.items()}))
        if request.path == "/health":
            return web.Response()
        if request.path == "/v1/models":
            return web.json_response({"object": "list", "data": [{"id": "tiny", "object": "model", "created": 1}]})
        if request.path != "/v1/chat/completions":
            return web.json_response({"detail": "Not Found"}, status=404)
        body = await request.json()
        return await self._stream(request) if body.get("stream") else web.json_response(REPLY)

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for word in ("warm", "front"):
            await response.write(_event(CHUNK | {"choices": [{"index": 0, "delta": {"content": word}}]}))
        await response.write(b"data: [DONE]\n\n")
        return response


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"
