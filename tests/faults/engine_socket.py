"""A publisher of KV events on real libzmq sockets that loses, cuts and restarts on command.

Frames are those of vLLM: live `[topic, number, payload]`; replies `["", topic, number, payload]`, or without the topic
as before 0.26. One thread owns both sockets, as in vLLM. Payloads name their life and number, so a test can tell what a
subscriber holds.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec
import zmq

END = b"\xff" * 8


@dataclass
class EngineSocket:
    """One engine process; `close` and a new object on the same ports are a restart."""

    life: int = 0
    topic: bytes = b"kv-events"
    buffer: int = 10_000
    reply_with_topic: bool = True
    replay: bool = True
    ports: tuple[int, int] = (0, 0)
    filler_bytes: int = 0
    answer: Callable[[list[tuple[int, bytes]]], Iterable[tuple[int, bytes] | None]] | None = None
    """Spoils replies: gets what should be sent, gives what is sent; `None` in it ends the reply without a marker."""
    log: list[bytes] = field(default_factory=list)
    replays: int = 0

    def __post_init__(self) -> None:
        self._context = zmq.Context()
        self._live = self._context.socket(zmq.PUB)
        self._router = self._context.socket(zmq.ROUTER)
        self.ports = (_bind(self._live, self.ports[0]), _bind(self._router, self.ports[1]))
        self._jobs: queue.Queue[Callable[[], None]] = queue.Queue()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def endpoints(self) -> tuple[str, str]:
        """Live and replay endpoint; the second is empty when there is none."""
        live, replay = (f"tcp://127.0.0.1:{port}" for port in self.ports)
        return live, replay if self.replay else ""

    def publish(self, batches: int = 1, *, lost: bool = False) -> None:
        """Add batches to the log and, unless lost, send them."""
        self._run(lambda: self._publish(batches, lost))

    def send_raw(self, frames: list[bytes]) -> None:
        """Send any message on the live socket."""
        self._run(lambda: self._live.send_multipart(frames))

    def close(self) -> None:
        """End the process: both sockets close at once. Closing twice is allowed."""
        self._stopped.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _run(self, job: Callable[[], None]) -> None:
        done = threading.Event()
        self._jobs.put(lambda: (job(), done.set())[0])
        assert done.wait(20)

    def _publish(self, batches: int, lost: bool) -> None:
        for _ in range(batches):
            number = len(self.log)
            event = {"type": "BlockStored", "life": self.life, "number": number, "filler": "x" * self.filler_bytes}
            payload = msgspec.msgpack.encode([float(number), [event], 0])
            self.log.append(payload)
            if not lost:
                self._live.send_multipart([self.topic, number.to_bytes(8, "big"), payload])

    def _serve(self) -> None:
        while not self._stopped.is_set():
            if self._router.poll(5):
                self._reply(*self._router.recv_multipart())
            try:
                self._jobs.get_nowait()()
            except queue.Empty:
                continue

    def _reply(self, client: bytes, _empty: bytes, start: bytes) -> None:
        self.replays += 1
        first = max(int.from_bytes(start, "big"), len(self.log) - self.buffer)
        entries = list(enumerate(self.log))[first:]
        for entry in self.answer(entries) if self.answer else entries:
            if entry is None:
                return
            self._send(client, self.topic, entry[0].to_bytes(8, "big"), entry[1])
        self._send(client, b"", END, b"")

    def _send(self, client: bytes, topic: bytes, number: bytes, payload: bytes) -> None:
        frames = [client, b"", *([topic] if self.reply_with_topic else []), number, payload]
        self._router.send_multipart(frames)


def _bind(socket: zmq.Socket[bytes], port: int) -> int:
    if port == 0:
        return socket.bind_to_random_port("tcp://127.0.0.1")
    socket.bind(f"tcp://127.0.0.1:{port}")
    return port
