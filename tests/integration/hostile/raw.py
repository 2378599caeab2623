"""A client that writes bytes and keeps the bytes that come back."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit

TIMEOUT_S = 20.0
CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "Which clouds come before a warm front?"}


class Message(NamedTuple):
    """One answer as it came."""

    status: int
    head: bytes
    body: bytes
    """Without the framing."""

    def values(self, name: str) -> list[bytes]:
        """Return the values of a header in their order."""
        lines = (line.partition(b":") for line in self.head.split(b"\r\n")[1:])
        return [value.strip() for key, _, value in lines if key.lower() == name.encode()]

    def json(self) -> Any:
        return json.loads(self.body)


class RawClient:
    """One connection."""

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_S) -> None:
        parts = urlsplit(url)
        self.socket = socket.create_connection((parts.hostname, parts.port), timeout=timeout_s)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = b""

    def send(self, content: bytes) -> None:
        self.socket.sendall(content)

    def read_until(self, mark: bytes) -> bytes:
        """Take everything up to and with the mark.

        Raises:
            EOFError: The connection ended before.
        """
        while mark not in self._buffer:
            self._more()
        found, _, self._buffer = self._buffer.partition(mark)
        return found + mark

    def read(self, size: int) -> bytes:
        while len(self._buffer) < size:
            self._more()
        content, self._buffer = self._buffer[:size], self._buffer[size:]
        return content

    def read_to_end(self) -> bytes:
        """Take everything until the other side closes."""
        try:
            while True:
                self._more()
        except (EOFError, ConnectionResetError):
            content, self._buffer = self._buffer, b""
            return content

    def answer(self) -> Message:
        """Take one answer whole."""
        head = self.read_until(b"\r\n\r\n")
        message = Message(int(head.split(b" ")[1]), head, b"")
        if message.status in {100, 204}:
            return message
        if message.values("transfer-encoding"):
            return message._replace(body=self._chunks())
        if length := message.values("content-length"):
            return message._replace(body=self.read(int(length[0])))
        return message._replace(body=self.read_to_end())

    def _chunks(self) -> bytes:
        content = b""
        while size := int(self.read_until(b"\r\n"), 16):
            content += self.read(size)
            self.read(2)
        self.read(2)
        return content

    def _more(self) -> None:
        data = self.socket.recv(65536)
        if not data:
            raise EOFError(self._buffer[:200])
        self._buffer += data


@contextmanager
def raw_client(url: str) -> Iterator[RawClient]:
    """Open a connection until the block ends."""
    client = RawClient(url)
    with client.socket:
        yield client


def request(body: bytes, *lines: str, path: str = CHAT, framing: bool = True) -> bytes:
    """Write a POST with these header lines; `framing` adds the length."""
    head = [f"POST {path} HTTP/1.1", "Host: router", *lines]
    head += [f"Content-Length: {len(body)}"] if framing else []
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def post(url: str, body: bytes | Mapping[str, Any], *lines: str, path: str = CHAT) -> Message:
    """Send one request on a connection of its own and take its answer."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    with raw_client(url) as client:
        client.send(request(content, "Content-Type: application/json", *lines, path=path))
        return client.answer()
