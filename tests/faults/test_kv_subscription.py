"""The KV event subscription against real libzmq publishers: gaps, replays, restarts, bad peers."""

from __future__ import annotations

import json
import re
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_socket import EngineSocket

ROOT = Path(__file__).parents[2]
DEADLINE_S = 15.0
HANDSHAKE = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48) + b"\x04\x06\x05READY"
CONFIG = {
    "message_bytes_max": 1 << 20,
    "replay_timeout_s": 0.5,
    "replay_check_interval_s": 0.2,
    "reconnect_delay_s": 0.02,
    "reconnect_delay_s_max": 0.1,
    "unknown_parents_max": 64,
}


class Follower:
    """The example program `subscribe`: what it has applied since the last forget, and its state."""

    def __init__(self, program: Path, live: str, replay: str, topic: str = "kv-events", **config: float) -> None:
        arguments = [str(program), live, replay, topic, json.dumps(CONFIG | config)]
        self.process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
        self.applied: list[tuple[int, int]] = []
        self.doubts = 0
        self.stale = True
        self.state: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            match json.loads(line):
                case {"applied": [_, [event], _]}:
                    self.applied.append((event["life"], event["number"]))
                case {"forget": True}:
                    self.applied = []
                case {"doubt": True}:
                    self.doubts += 1
                case {"stale": stale}:
                    self.stale = stale
                case {"state": state}:
                    self.state = state

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds or fail with what is known."""
        end = time.monotonic() + DEADLINE_S
        while not condition():
            assert self.process.poll() is None, "the program has ended"
            assert time.monotonic() < end, (self.stale, self.state, len(self.applied), self.applied[-5:])
            time.sleep(0.01)

    def wait_live(self, engine: EngineSocket, first: int = 0) -> None:
        """Wait until the index is live and holds the engine's log from `first` on."""
        log = [(engine.life, number) for number in range(first, len(engine.log))]
        self.wait(lambda: self.state.get("state") == "live" and not self.stale and self.applied == log)

    def resident_bytes(self) -> int:
        """Peak resident memory of the program."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        match = re.search(r"VmHWM:\s+(\d+) kB", status)
        assert match is not None
        return int(match[1]) * 1024

    def close(self) -> None:
        """End the program."""
        self.process.kill()
        self.process.wait()
        self._thread.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="session")
def program() -> Path:
    """The built example; built here, since no other test needs it."""
    command = ["cargo", "build", "--quiet", "-p", "warmfront-core", "--example", "subscribe"]
    built = subprocess.run(
        [*command, "--message-format", "json"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    )
    artifacts = [json.loads(line) for line in built.stdout.splitlines()]
    return Path(next(each["executable"] for each in artifacts if each.get("executable")))


@pytest.fixture
def start(program: Path) -> Iterator[Callable[..., Any]]:
    """Start engines and followers that end with the test."""
    things: list[Any] = []

    def start(kind: type, *arguments: Any, **options: Any) -> Any:
        if kind is Follower:
            arguments = (program, *arguments)
        things.append(kind(*arguments, **options))
        return things[-1]

    yield start
    for thing in reversed(things):
        thing.close()


@pytest.mark.bug(45)
@pytest.mark.parametrize("reply_with_topic", [True, False], ids=["since 0.26", "before 0.26"])
def test_batches_from_before_the_connection_are_replayed(start: Callable[..., Any], reply_with_topic: bool) -> None:
    engine = start(EngineSocket, reply_with_topic=reply_with_topic)
    engine.publish(10)
    follower = start(Follower, *engine.endpoints)
    follower.wait_live(engine)
    engine.publish(5)
    follower.wait_live(engine)
    follower.wait(lambda: follower.state["complete"])
    assert (follower.state["gaps"], follower.state["restarts"]) == (0, 0)


def test_a_lost_message_is_replayed(start: Callable[..., Any]) -> None:
    engine = start(EngineSocket)
    engine.publish(3)
    follower = start(Follower, *engine.endpoints, replay_check_interval_s=60)
    follower.wait_live(engine)
    follower.wait(lambda: engine.replays >= 2)  # the first check is over: what follows is the gap's own replay
    engine.publish(2, lost=True)
    engine.publish(2)
    follower.wait_live(engine)
    follower.wait(lambda: follower.state["gaps"] == 1)
    follower.wait(lambda: follower.state["complete"])


def test_a_loss_at_the_end_of_a_quiet_stream_is_found(start: Callable[..., Any]) -> None:
    engine = start(EngineSocket)
    engine.publish(3)
    follower = start(Follower, *engine.endpoints)
    follower.wait_live(engine)
    engine.publish(2, lost=True)
    follower.wait_live(engine)


@pytest.mark.parametrize("published", [0, 3, 10, 40])
def test_a_restarted_engine_replaces_the_old_one_however_far_it_got(start: Callable[..., Any], published: int) -> None:
    engine = start(EngineSocket)
    engine.publish(10)
    follower = start(Follower, *engine.endpoints)
    follower.wait_live(engine)
    engine.close()
    follower.wait(lambda: follower.stale)
    engine = start(EngineSocket, life=1, ports=engine.ports)
    engine.publish(published)
    follower.wait_live(engine)
    engine.publish(2)
    follower.wait_live(engine)
    follower.wait(lambda: follower.state["restarts"] == 1)


def test_a_short_buffer_leaves_a_late_start_incomplete_and_live(start: Callable[..., Any]) -> None:
    engine = start(EngineSocket, buffer=20)
    engine.publish(50)
    follower = start(Follower, *engine.endpoints)
    follower.wait_live(engine, first=30)
    follower.wait(lambda: not follower.state["complete"])
    follower.wait(lambda: follower.state["reason"] == "events before batch 30 are unknown")


def test_a_replay_without_an_end_is_asked_for_again(start: Callable[..., Any]) -> None:
    cuts = iter([3, 5, 1])
    engine = start(
        EngineSocket,
        answer=lambda entries: [*entries[:cut], None] if (cut := next(cuts, None)) is not None else entries,
    )
    engine.publish(12)
    follower = start(Follower, *engine.endpoints)
    follower.wait_live(engine)
    follower.wait(lambda: follower.state["complete"])


def test_a_replay_with_a_hole_is_asked_for_again_from_there(start: Callable[..., Any]) -> None:
    holes = iter([4, 2])
    engine = start(
        EngineSocket,
        answer=lambda entries: (
            [e for place, e in enumerate(entries) if place != hole]
            if (hole := next(holes, None)) is not None
            else entries
        ),
    )
    engine.publish(12)
    follower = start(Follower, *engine.endpoints)
    follower.wait_live(engine)
    follower.wait(lambda: follower.state["complete"])


def test_without_a_replay_endpoint_a_loss_puts_what_came_before_in_doubt(start: Callable[..., Any]) -> None:
    engine = start(EngineSocket, replay=False)
    follower = start(Follower, *engine.endpoints)
    follower.wait(lambda: follower.state.get("state") == "live")
    follower.wait(lambda: bool(engine.publish()) or bool(follower.applied))
    engine.publish(2, lost=True)
    engine.publish(2)
    last = len(engine.log) - 1
    follower.wait(lambda: follower.applied[-2:] == [(0, last - 1), (0, last)] and not follower.stale)
    assert follower.applied[-3] == (0, last - 4)
    follower.wait(lambda: follower.state["gaps"] == 1 and not follower.state["complete"])
    assert follower.doubts == 1


def test_a_stream_that_keeps_losing_batches_is_not_used_until_its_engine_starts_anew(start: Callable[..., Any]) -> None:
    engine = start(EngineSocket, replay=False)
    follower = start(Follower, *engine.endpoints)
    follower.wait(lambda: follower.state.get("state") == "live")
    follower.wait(lambda: bool(engine.publish()) or bool(follower.applied))
    for _ in range(10):
        engine.publish(lost=True)
        engine.publish()
    follower.wait(lambda: follower.state["state"] == "lossy" and follower.stale and not follower.applied)
    assert "what was sent says more" in follower.state["reason"]
    ports = engine.ports
    engine.close()
    reborn = start(EngineSocket, life=1, replay=False, ports=ports)
    follower.wait(lambda: bool(reborn.publish()) or (bool(follower.applied) and not follower.stale))
    follower.wait(lambda: follower.state["state"] == "live")


@pytest.mark.bug(38)
def test_an_engine_that_never_answers_replays_is_followed_from_now_on(start: Callable[..., Any]) -> None:
    engine = start(EngineSocket, answer=lambda _entries: [None])
    engine.publish(5)
    follower = start(Follower, *engine.endpoints)
    follower.wait(lambda: follower.state.get("state") == "live")
    engine.publish(3)
    follower.wait(lambda: bool(engine.publish()) or follower.applied[-1:] == [(0, len(engine.log) - 1)])
    follower.wait(lambda: not follower.state["complete"])
    engine.answer = None
    follower.wait_live(engine)  # history comes back once replays work
    follower.wait(lambda: follower.state["complete"])


@pytest.mark.bug(46)
def test_malformed_messages_are_counted_and_the_stream_goes_on(start: Callable[..., Any]) -> None:
    engine = start(EngineSocket)
    engine.publish(3)
    follower = start(Follower, *engine.endpoints)
    follower.wait_live(engine)
    engine.send_raw([b"kv-events", b"short", b""])
    engine.send_raw([b"kv-events", len(engine.log).to_bytes(8, "big"), b"\xc1 not msgpack"])
    follower.wait(lambda: follower.state["malformed"] == 2)
    follower.wait(lambda: not follower.state["complete"])


def test_an_oversized_message_ends_in_a_live_stream_that_knows_its_loss(start: Callable[..., Any]) -> None:
    engine = start(EngineSocket)
    engine.publish(3)
    follower = start(Follower, *engine.endpoints)
    follower.wait_live(engine)
    engine.filler_bytes = 2 << 20
    engine.publish()
    engine.filler_bytes = 0
    follower.wait(lambda: follower.stale)
    follower.wait(lambda: bool(engine.publish()) or (0, 6) in follower.applied)
    assert (0, 3) not in follower.applied
    assert follower.doubts == 1
    follower.wait(lambda: not follower.stale and not follower.state["complete"])


@pytest.mark.parametrize(
    "greeting",
    [
        b"HTTP/1.1 400 Bad Request\r\n" + b"x" * 64,
        b"\xff"
        + bytes(8)
        + b"\x7f\x03\x01NULL"
        + bytes(48)
        + b"\x04\x06\x05READY"
        + b"\x02"
        + struct.pack(">Q", 1 << 62),
        HANDSHAKE + b"\x01\x00" * 100_000,
        HANDSHAKE + b"\x04\x07\x04PING\0\0" * 100_000,
    ],
    ids=["not zmtp", "a frame of 4 EiB", "endless frames", "endless heartbeats"],
)
def test_a_bad_peer_costs_no_memory_and_the_next_connection_works(start: Callable[..., Any], greeting: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        follower = start(Follower, f"tcp://127.0.0.1:{port}", "")
        for _ in range(3):
            connection, _address = listener.accept()
            with connection:
                connection.settimeout(DEADLINE_S)
                try:
                    connection.sendall(greeting)
                except (BrokenPipeError, ConnectionResetError):
                    continue
        listener.close()
    assert follower.resident_bytes() < 64 << 20
    engine = start(EngineSocket, ports=(port, 0), replay=False)
    follower.wait(lambda: bool(engine.publish()) or bool(follower.applied))


def test_ten_thousand_batches_are_replayed_through_a_socket_that_drops(start: Callable[..., Any]) -> None:
    engine = start(EngineSocket, filler_bytes=2_000)
    engine.publish(10_000)
    follower = start(Follower, *engine.endpoints, replay_timeout_s=5)
    follower.wait_live(engine)
    follower.wait(lambda: follower.state["complete"])
