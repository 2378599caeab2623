from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec
import pytest
import zmq
import zmq.asyncio
from warmfront.config import EventsConfig, ServerConfig
from warmfront.control import events
from warmfront.types import EventSource

SERVER = ServerConfig(url="http://10.0.0.7:8000")


@pytest.mark.parametrize("wildcard", ["*", "0.0.0.0", "::", "[::]"])
def test_a_bound_wildcard_becomes_the_host_of_the_api(wildcard: str) -> None:
    assert events.reachable(f"tcp://{wildcard}:5557", "10.0.0.7") == "tcp://10.0.0.7:5557"


@pytest.mark.parametrize("endpoint", ["tcp://10.9.9.9:5557", "ipc:///tmp/kv", "inproc://kv", "nonsense"])
def test_other_endpoints_stay_as_they_are(endpoint: str) -> None:
    assert events.reachable(endpoint, "10.0.0.7") == endpoint


def test_an_ipv6_host_keeps_its_brackets() -> None:
    server = ServerConfig(url="http://[fd00::7]:8000")
    assert events.by_default_port(server, {0: True}, port=5557)[0].endpoint == "tcp://[fd00::7]:5557"


def test_configured_sources_shift_their_ports_by_rank() -> None:
    config = EventsConfig(endpoint="tcp://*:6000", replay="tcp://*:7000", topic="kv")
    assert events.configured(SERVER, config, [0, 1])[1] == EventSource(
        endpoint="tcp://10.0.0.7:6001", replay="tcp://10.0.0.7:7001", topic="kv", origin="configuration"
    )


def test_announced_sources_are_taken_without_another_shift() -> None:
    body = b'{"1":{"endpoint":"tcp://*:5641","replay_endpoint":"tcp://*:5651","topic":"t","publisher":"zmq"}}'
    assert events.announced(SERVER, body) == {
        1: EventSource(endpoint="tcp://10.0.0.7:5641", replay="tcp://10.0.0.7:5651", topic="t", origin="engine")
    }


def test_a_publisher_that_is_off_is_no_source() -> None:
    body = b'{"0":{"endpoint":"tcp://*:5557","publisher":"null"},"1":{"endpoint":"a","enable_kv_cache_events":false}}'
    assert events.announced(SERVER, body) == {}


def test_an_announcement_of_another_shape_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        events.announced(SERVER, b'{"0": "tcp://*:5557"}')


@pytest.fixture
def publisher() -> Iterator[int]:
    """A ZeroMQ publisher; gives its port."""
    with zmq.Context() as context, context.socket(zmq.PUB) as socket:
        yield socket.bind_to_random_port("tcp://127.0.0.1")


async def test_a_zeromq_publisher_at_the_default_port_is_seen(publisher: int) -> None:
    server = ServerConfig(url="http://127.0.0.1:1")
    assert await events.listening(server, [0], port=publisher, timeout_s=5.0) == {0: True}


async def test_another_service_at_the_default_port_is_not_taken_for_a_publisher() -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.6\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as other:
        port = other.sockets[0].getsockname()[1]
        found = await events.listening(ServerConfig(url="http://127.0.0.1:1"), [0], port=port, timeout_s=5.0)
    assert found == {0: False}


async def test_a_closed_default_port_is_no_publisher(unused_port: int) -> None:
    server = ServerConfig(url="http://127.0.0.1:1")
    assert await events.listening(server, [0], port=unused_port, timeout_s=5.0) == {0: False}


@pytest.fixture
async def unused_port() -> int:
    server = await asyncio.start_server(lambda _reader, _writer: None, "127.0.0.1", 0)
    port: int = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    return port
