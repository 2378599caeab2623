"""A TCP relay in front of an engine that keeps what the engine sent, byte for byte."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

READ_BYTES = 65536
JOIN_TIMEOUT_S = 10.0


class Recorder(NamedTuple):
    """A running relay."""

    url: str
    sent: list[bytearray]
    """What the engine sent on each connection so far."""

    def holds(self, content: bytes) -> bool:
        """Tell whether some connection carried these bytes in one piece."""
        return any(content in bytes(stream) for stream in self.sent)


@contextmanager
def recording(port: int) -> Iterator[Recorder]:
    """Relay to a local port until the block ends."""
    listener = socket.create_server(("127.0.0.1", 0))
    recorder = Recorder(f"http://127.0.0.1:{listener.getsockname()[1]}", [])
    with contextlib.ExitStack() as stack:
        stack.callback(listener.close)
        thread = threading.Thread(target=_accept, args=(listener, port, recorder.sent, stack), daemon=True)
        thread.start()
        yield recorder
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(JOIN_TIMEOUT_S)


def _accept(listener: socket.socket, port: int, sent: list[bytearray], stack: contextlib.ExitStack) -> None:
    while True:
        try:
            client, _ = listener.accept()
        except OSError:
            return
        stack.callback(client.close)
        engine = socket.create_connection(("127.0.0.1", port))
        stack.callback(engine.close)
        record = bytearray()
        sent.append(record)
        for source, target, kept in ((client, engine, None), (engine, client, record)):
            threading.Thread(target=_pump, args=(source, target, kept), daemon=True).start()


def _pump(source: socket.socket, target: socket.socket, kept: bytearray | None) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(READ_BYTES):
            if kept is not None:
                kept += data
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
