"""An engine made of sockets: it keeps every byte it is sent and answers with the bytes it is told.

No HTTP library stands between a test and the wire, so nothing is normalised on the way. Questions of the control
process are answered by the engine itself and are not in `heard`; they are in `asked`, by path. What one would get
wrong: the router keeps connections open, so an answer has to say where it ends, or close.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

READ_BYTES = 65536
JOIN_TIMEOUT_S = 10.0
MODEL = "raw"
CARD = {"id": MODEL, "object": "model", "owned_by": "test", "max_model_len": 4096, "x_kept": {"a": [1, None]}}
SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"

Then = Literal["keep", "close", "hang"]


class Heard(NamedTuple):
    """One request as it came."""

    head: bytes
    """Request line and headers with their line ends, the empty line included."""
    body: bytes

    @property
    def line(self) -> bytes:
        return self.head.split(b"\r\n", 1)[0]

    def values(self, name: str) -> list[bytes]:
        """Return the values of a header in their order."""
        lines = (line.partition(b":") for line in self.head.split(b"\r\n")[1:])
        return [value.strip() for key, _, value in lines if key.lower() == name.encode()]


class Reply(NamedTuple):
    """What to do with one request."""

    pieces: Iterable[bytes]
    """Written one after another; a generator may wait between them."""
    then: Then = "keep"
    """Keep the connection, close it, or say nothing more until the other side closes."""


Script = Callable[[Heard], Reply]


def chunk(content: bytes) -> bytes:
    """Frame content as one chunk."""
    return b"%x\r\n%s\r\n" % (len(content), content)


def answer(body: bytes, *headers: bytes, status: bytes = b"200 OK", content_type: bytes = b"application/json") -> Reply:
    """Make a whole answer with its length."""
    lines = [b"HTTP/1.1 " + status, b"content-type: " + content_type, b"content-length: %d" % len(body), *headers]
    return Reply([b"\r\n".join(lines) + b"\r\n\r\n" + body])


def stream(*pieces: bytes) -> Reply:
    """Make a chunked event stream, each piece a chunk of its own."""
    return Reply([SSE_HEAD, *(chunk(piece) for piece in pieces), b"0\r\n\r\n"])


class RawEngine:
    """One listening socket; a thread for each connection."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.closed = 0
        """Connections that the router closed while they hung or spoke."""
        self.reset()
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def reset(self) -> None:
        """Forget what was heard, and answer with an empty object again."""
        self.heard: list[Heard] = []
        self.asked: list[str] = []
        self.closed = 0
        self.script: Script = lambda _: answer(b"{}")
        self.is_mute = False

    def close(self) -> None:
        """Stop listening and close every connection."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(JOIN_TIMEOUT_S)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._open.add(connection)
            threading.Thread(target=self._converse, args=(connection,), daemon=True).start()

    def _converse(self, connection: socket.socket) -> None:
        try:
            with connection, contextlib.suppress(OSError):
                for heard in _requests(connection):
                    if not self._respond(connection, heard):
                        return
        finally:
            with self._lock:
                self._open.discard(connection)

    def _respond(self, connection: socket.socket, heard: Heard) -> bool:
        """Answer; false when the connection ends."""
        if heard.line.startswith(b"GET "):
            path = heard.line.split(b" ")[1].decode()
            self.asked.append(path)
            if self.is_mute:
                return _hang(connection)
            connection.sendall(_probe_answer(path))
            return True
        self.heard.append(heard)
        reply = self.script(heard)
        try:
            for piece in reply.pieces:
                connection.sendall(piece)
        except OSError:
            self.closed += 1
            return False
        if reply.then == "hang":
            _hang(connection)
            self.closed += 1
        return reply.then == "keep"


@contextmanager
def raw_engine() -> Iterator[RawEngine]:
    """Run an engine until the block ends."""
    engine = RawEngine()
    try:
        yield engine
    finally:
        engine.close()


def paced(pieces: Iterable[bytes], pause_s: float) -> Iterator[bytes]:
    """Give pieces with a pause before each, as an engine decodes."""
    for piece in pieces:
        time.sleep(pause_s)
        yield piece


def _hang(connection: socket.socket) -> bool:
    with contextlib.suppress(OSError):
        while connection.recv(READ_BYTES):
            pass
    return False


def _requests(connection: socket.socket) -> Iterator[Heard]:
    """Cut requests off a connection. The router always announces a length."""
    buffer = b""
    while True:
        while (end := buffer.find(b"\r\n\r\n")) < 0:
            data = connection.recv(READ_BYTES)
            if not data:
                return
            buffer += data
        heard = Heard(buffer[: end + 4], b"")
        length = int((heard.values("content-length") or [b"0"])[0])
        pieces, size = [buffer[end + 4 :]], len(buffer) - end - 4
        while size < length:
            data = connection.recv(READ_BYTES)
            if not data:
                return
            pieces.append(data)
            size += len(data)
        rest = b"".join(pieces)
        buffer = rest[length:]
        yield heard._replace(body=rest[:length])


def _probe_answer(path: str) -> bytes:
    """Answer as a server that has nothing but models."""
    known = {"/health": {}, "/v1/models": {"object": "list", "data": [CARD]}}
    status, content = (b"200 OK", known[path]) if path in known else (b"404 Not Found", {"detail": "Not Found"})
    return b"".join(answer(json.dumps(content).encode(), status=status).pieces)
