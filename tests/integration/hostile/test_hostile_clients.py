"""Clients that mean harm or are broken cost a bounded amount, and everyone else is served meanwhile.

Each test uses a router process of its own, with short time limits where it is about them. Memory is the resident memory
of the process; what the kernel holds for a socket is not in it.
"""

from __future__ import annotations

import json
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import repeat

import pytest
from support import wire
from support.process import cpu_s, descriptors, resident_bytes
from support.raw_engine import SSE_HEAD, RawEngine, Reply, answer, chunk
from support.service import wait_for

from integration.conftest import Serve

from .conftest import StartRouter
from .raw import CHAT, USER, RawClient, post, raw_client, request

STREAM = json.dumps({"messages": [USER], "stream": True}).encode()
PLAIN = json.dumps({"messages": [USER]}).encode()
STREAM_BYTES_MAX = 256 * 1024
IDLE_BYTES_MAX = 32 * 1024
IDLE_CLIENTS = 10_000
SPARE_FILES = 500
LARGE_BYTES = 20 * 1024 * 1024
FLOOD = chunk(b"data: " + b"x" * 1000 + b"\n\n") * 20


def pid(router: Serve) -> int:
    assert router.process is not None
    return router.process.pid


def metric(router: Serve, name: str) -> float:
    page = wire.get(f"{router.url}/metrics").body.decode()
    return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.split("{")[0].split(" ")[0] == name)


def is_unharmed(router: Serve) -> None:
    """The router still serves, has nothing left in flight, and nothing in it has panicked."""
    assert post(router.url, PLAIN).status == 200
    wait_for(lambda: metric(router, "warmfront_replica_requests") == 0, "nothing in flight", timeout_s=10)
    assert "panick" not in router.log.read_text()


@contextmanager
def clients(url: str, count: int) -> Iterator[list[RawClient]]:
    """Open many connections until the block ends."""
    with ExitStack() as stack:
        opened = []
        for _ in range(count):
            client = RawClient(url)
            stack.enter_context(client.socket)
            opened.append(client)
        yield opened


@pytest.mark.bug(94)
def test_streams_that_nobody_reads_hold_a_bounded_amount_each(start_router: StartRouter, engine: RawEngine) -> None:
    router = start_router([engine])
    is_unharmed(router)
    engine.script = lambda _: Reply(count_written([SSE_HEAD, *repeat(FLOOD, 4000)], written), "hang")
    written: list[int] = []
    streams, before = 64, resident_bytes(pid(router))
    with clients(router.url, streams) as opened:
        for client in opened:
            client.send(request(STREAM))
        wait_for(is_still(written), "every engine held back", timeout_s=30)
        stream_bytes = (resident_bytes(pid(router)) - before) / streams
        assert len(engine.heard) == streams + 1
        assert wire.get(f"{router.url}/health").status == 200
    assert stream_bytes < STREAM_BYTES_MAX, f"{stream_bytes / 1024:.0f} KiB a stream"
    wait_for(lambda: engine.closed == streams, "every engine freed", timeout_s=20)
    engine.script = lambda _: answer(b"{}")
    is_unharmed(router)


def count_written(pieces: list[bytes], written: list[int]) -> Iterator[bytes]:
    for piece in pieces:
        written.append(len(piece))
        yield piece


def is_still(written: list[int]) -> Callable[[], bool]:
    """Tell whether nothing more was written since the last look, a while ago."""
    seen = [(0, time.monotonic())]

    def look() -> bool:
        if len(written) != seen[-1][0]:
            seen.append((len(written), time.monotonic()))
        return len(written) > 0 and time.monotonic() - seen[-1][1] > 0.5

    return look


def test_a_client_that_is_gone_without_a_word_loses_its_stream(start_router: StartRouter, engine: RawEngine) -> None:
    router = start_router([engine], "front.write_timeout_s=0.5")
    engine.script = lambda _: Reply([SSE_HEAD, *repeat(FLOOD, 4000)], "hang")
    with raw_client(router.url) as client:
        client.send(request(STREAM))
        wait_for(lambda: engine.closed == 1, "the engine freed", timeout_s=15)
    engine.script = lambda _: answer(b"{}")
    is_unharmed(router)


def drip(client: RawClient, content: bytes, pause_s: float, stopped: threading.Event) -> None:
    """Write a byte at a time until told to stop or refused."""
    with suppress(OSError):
        for at in range(len(content)):
            if stopped.wait(pause_s):
                return
            client.send(content[at : at + 1])


def dripped(router: Serve, start: bytes, rest: bytes) -> tuple[bytes, float]:
    """Send `start`, then a byte every 50 ms; return what the router says until it closes, and after how long."""
    stopped, began_s = threading.Event(), time.monotonic()
    with raw_client(router.url) as client:
        client.send(start)
        writer = threading.Thread(target=drip, args=(client, rest, 0.05, stopped))
        writer.start()
        said = client.read_to_end()
        took_s = time.monotonic() - began_s
        stopped.set()
        writer.join()
    return said, took_s


def test_clients_that_write_a_byte_at_a_time_are_given_up(start_router: StartRouter, engine: RawEngine) -> None:
    router = start_router([engine], "front.header_timeout_s=0.5", "front.body_timeout_s=0.5")
    said, took_s = dripped(router, b"POST /v1/", b"a" * 1000)
    assert (said, took_s < 5) == (b"", True), "in a header: closed without a word"
    head = request(b" " * 5000).rstrip(b" ")
    said, took_s = dripped(router, head + b"{", b" " * 1000)
    assert said.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"request_timeout"' in said
    assert took_s < 8
    assert engine.heard == []
    is_unharmed(router)


@pytest.mark.parametrize("asked", [b"GET /health HTTP/1.1\r\nHost: r\r\n\r\n", request(PLAIN)], ids=["own", "engine"])
def test_a_client_that_stays_after_its_answer_is_let_go_when_idle(
    start_router: StartRouter, engine: RawEngine, asked: bytes
) -> None:
    router = start_router([engine], "front.idle_timeout_s=0.5")
    with raw_client(router.url) as client:
        for _ in range(2):
            client.send(asked)
            assert client.answer().status == 200
        client.socket.settimeout(5)
        assert client.read_to_end() == b""


def test_a_slow_client_that_makes_progress_is_served(start_router: StartRouter, engine: RawEngine) -> None:
    router = start_router([engine], "front.header_timeout_s=5", "front.body_timeout_s=2")
    stopped = threading.Event()
    with raw_client(router.url) as client:
        drip(client, request(PLAIN), 0.005, stopped)
        assert client.answer().status == 200
    assert engine.heard[0].body == PLAIN


def test_a_client_that_closes_its_half_while_it_waits_has_left(router: Serve, engine: RawEngine) -> None:
    engine.script = lambda _: Reply([], "hang")
    with raw_client(router.url) as client:
        client.send(request(PLAIN))
        wait_for(lambda: len(engine.heard) == 1, "the request there", timeout_s=5)
        client.socket.shutdown(socket.SHUT_WR)
        wait_for(lambda: engine.closed == 1, "the engine freed", timeout_s=5)
        assert client.read_to_end() == b""


@pytest.mark.bug(111)
def test_ten_thousand_idle_clients_cost_little_and_others_are_served(
    start_router: StartRouter, engine: RawEngine
) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    count = min(IDLE_CLIENTS, (hard - SPARE_FILES) // 2)  # the router keeps a file for the engine of each client
    print(f"{count} idle clients; the limit of open files is {hard}")
    router = start_router([engine])
    is_unharmed(router)
    before = resident_bytes(pid(router))
    with clients(router.url, count) as idle:
        wait_for(lambda: metric(router, "warmfront_connections") >= count, "every client accepted", timeout_s=30)
        client_bytes = (resident_bytes(pid(router)) - before) / count
        assert client_bytes < IDLE_BYTES_MAX, f"{client_bytes:.0f} bytes a client"
        began_s = time.monotonic()
        assert wire.get(f"{router.url}/health").status == 200
        assert post(router.url, PLAIN).status == 200
        assert time.monotonic() - began_s < 2
        idle[-1].send(request(PLAIN))
        assert idle[-1].answer().status == 200, "an idle client may still ask"
    wait_for(lambda: metric(router, "warmfront_connections") < 10, "every client forgotten", timeout_s=20)
    is_unharmed(router)


@pytest.mark.bug(109, 110, 111)
def test_hundreds_of_requests_at_once_all_reach_the_engine(start_router: StartRouter, engine: RawEngine) -> None:
    count, gate = 300, threading.Event()

    def held() -> Iterator[bytes]:
        assert gate.wait(30)
        yield b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"

    router = start_router([engine])
    engine.script = lambda _: Reply(held())
    with clients(router.url, count) as opened:
        for client in opened:
            client.send(request(PLAIN))
        wait_for(lambda: len(engine.heard) == count, "every request at the engine", timeout_s=20)
        assert wire.get(f"{router.url}/health").status == 200
        gate.set()
        assert {client.answer().status for client in opened} == {200}
    engine.script = lambda _: answer(b"{}")
    is_unharmed(router)


def test_a_router_out_of_descriptors_waits_without_spinning_and_accepts_again(
    start_router: StartRouter, engine: RawEngine
) -> None:
    router = start_router([engine])
    is_unharmed(router)
    with raw_client(router.url) as known:
        known.send(b"GET /health HTTP/1.1\r\nhost: r\r\n\r\n")
        assert known.answer().status == 200
        resource.prlimit(pid(router), resource.RLIMIT_NOFILE, (descriptors(pid(router)) + 5, 20_000))
        with clients(router.url, 50):
            wait_for(lambda: "cannot accept a connection" in router.log.read_text(), "it is said", timeout_s=10)
            began_s, used_s = time.monotonic(), cpu_s(pid(router))
            wait_for(lambda: time.monotonic() - began_s > 1.0, "a second over", timeout_s=5)
            assert cpu_s(pid(router)) - used_s < 0.5, "accepting spins"
            known.send(b"GET /health HTTP/1.1\r\nhost: r\r\n\r\n")
            assert known.answer().status == 200, "who is connected is served"
            known.send(request(PLAIN))
            assert known.answer().status in {200, 502}, "with or without a connection to the engine, there is an answer"
    resource.prlimit(pid(router), resource.RLIMIT_NOFILE, (20_000, 20_000))
    assert wire.get(f"{router.url}/health").status == 200
    is_unharmed(router)


@pytest.mark.bug(78, 79, 186)
def test_prompts_and_answers_of_twenty_megabytes_pass_and_leave_no_memory_behind(
    start_router: StartRouter, engine: RawEngine
) -> None:
    text = "".join(f"{number:07d} " for number in range(LARGE_BYTES // 8))
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    engine.script = lambda heard: answer(heard.body)
    router = start_router([engine])
    assert post(router.url, PLAIN).status == 200
    sizes = []
    for _ in range(3):
        began_s = time.monotonic()
        assert post(router.url, body).body == body
        assert time.monotonic() - began_s < 10
        sizes.append(resident_bytes(pid(router)))
    assert sizes[-1] - sizes[0] < 4 * LARGE_BYTES, [size >> 20 for size in sizes]
    with raw_client(router.url) as client:
        client.send(f"POST {CHAT} HTTP/1.1\r\nhost: r\r\ncontent-length: {100 << 20}\r\n\r\n".encode())
        assert client.answer().status == 413
    is_unharmed(router)


def test_hundreds_of_requests_in_one_write_are_answered_in_order(router: Serve, engine: RawEngine) -> None:
    engine.script = lambda heard: answer(heard.body)
    bodies = [json.dumps({"messages": [USER], "number": number}).encode() for number in range(300)]
    with raw_client(router.url) as client:
        writer = threading.Thread(target=client.send, args=(b"".join(map(request, bodies)),))
        writer.start()
        assert [client.answer().body for _ in bodies] == bodies
        writer.join()
    assert len(engine.heard) == len(bodies)
