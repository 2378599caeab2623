"""KV events over ZMQ as vLLM publishes them: PUB for live batches, ROUTER for replay.

Frames are `topic, sequence number (8 bytes, big-endian), MessagePack`; the number counts batches from 0 in every
process. A batch is `[time, events, rank]` and its events are maps (0.24 and later). Replay answers `"", topic,
number, payload` for each buffered batch and ends with number 2**64 - 1 (0.26 and later).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from warmfront.clock import wall_time_s
from warmfront.errors import WarmfrontError
from warmfront.reference.request import CacheEvent, Cleared, Dropped, Offloaded, Removed, Stored

log = logging.getLogger(__name__)

END_OF_REPLAY = b"\xff" * 8
SEND_HIGH_WATER_MARK = 100_000
"""Batches queued for one slow subscriber before its newest are dropped, as in vLLM."""


class EventSocketError(WarmfrontError):
    """A socket for KV events cannot be opened."""


@dataclass(frozen=True, slots=True)
class PublisherConfig:
    """Where events go. Port 0 takes a free one."""

    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    topic: str = ""
    buffer_steps: int = 10_000


class KvPublisher:
    """Publishes one batch a step and keeps the last `buffer_steps` of them for replay."""

    def __init__(self, config: PublisherConfig, *, block_size: int, adapters: Sequence[str] = ()) -> None:
        """Bind both sockets.

        Raises:
            EventSocketError: An address cannot be bound.
        """
        self._block_size = block_size
        self._adapter_ids = {name: number for number, name in enumerate(adapters, start=1)}
        self._topic = config.topic.encode()
        self._sequence = 0
        self._buffer: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._encoder = msgspec.msgpack.Encoder()
        self._context = zmq.Context()
        self._live = self._context.socket(zmq.PUB)
        self._replay: zmq.asyncio.Socket | None = None
        try:
            self._open(config)
        except EventSocketError:
            self.close()
            raise
        self.source = self._describe(config)
        """This publisher as `GET /kv_event_sources` describes it."""

    def publish(self, events: Sequence[CacheEvent]) -> None:
        """Send one batch; nothing is sent, and no number used, when there are no events."""
        if not events:
            return
        payload = self._encoder.encode([wall_time_s(), [self._encoded(event) for event in events], 0])
        number = self._sequence.to_bytes(8, "big")
        self._sequence += 1
        self._buffer.append((number, payload))
        self._live.send_multipart((self._topic, number, payload))

    async def serve_replay(self) -> None:
        """Answer replay requests until cancelled."""
        if self._replay is None:
            return
        while True:
            frames = await self._replay.recv_multipart()
            if len(frames) != 3:
                log.error("replay request with %d frames instead of 3", len(frames))
                continue
            await self._answer(self._replay, frames[0], int.from_bytes(frames[2], "big"))

    def close(self) -> None:
        """Close both sockets; what was not sent yet is lost."""
        self._live.close(linger=0)
        if self._replay is not None:
            self._replay.close(linger=0)
        self._context.term()

    def _open(self, config: PublisherConfig) -> None:
        self._live.set_hwm(SEND_HIGH_WATER_MARK)
        _bind(self._live, config.endpoint)
        if config.replay_endpoint is not None:
            self._replay = zmq.asyncio.Context(self._context).socket(zmq.ROUTER)
            self._replay.set_hwm(2 * (config.buffer_steps + 1))
            _bind(self._replay, config.replay_endpoint)

    async def _answer(self, replay: zmq.asyncio.Socket, client: bytes, start: int) -> None:
        for number, payload in list(self._buffer):
            if int.from_bytes(number, "big") >= start:
                await replay.send_multipart((client, b"", self._topic, number, payload))
        await replay.send_multipart((client, b"", b"", END_OF_REPLAY, b""))

    def _encoded(self, event: CacheEvent) -> dict[str, Any]:
        match event:
            case Stored():
                return self._stored(event)
            case Removed():
                return {"type": "BlockRemoved", "block_hashes": [event.hash], "medium": "GPU", "group_idx": 0}
            case Offloaded():
                return _placeholder(event)
            case Dropped():
                return {"type": "BlockRemoved", "block_hashes": [event.hash], "medium": event.tier.upper()}
            case Cleared():
                return {"type": "AllBlocksCleared"}

    def _stored(self, event: Stored) -> dict[str, Any]:
        request = event.request
        assert request.tokens is not None  # The server makes every request with its tokens.
        start, stop = event.first * self._block_size, (event.first + event.count) * self._block_size
        encoded: dict[str, Any] = {
            "type": "BlockStored",
            "block_hashes": event.hashes,
            "parent_block_hash": event.parent,
            "token_ids": request.tokens[start:stop],
            "block_size": self._block_size,
            "lora_id": None if request.adapter is None else self._adapter_ids.get(request.adapter),
            "medium": "GPU",
            "lora_name": request.adapter,
            "extra_keys": [_extra_keys(event, block) for block in range(event.first, event.first + event.count)],
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
        if request.session_id is not None:
            encoded["session_id"] = request.session_id
        return encoded

    def _describe(self, config: PublisherConfig) -> dict[str, Any]:
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": _bound(self._live),
            "replay_endpoint": None if self._replay is None else _bound(self._replay),
            "buffer_steps": config.buffer_steps,
            "hwm": SEND_HIGH_WATER_MARK,
            "max_queue_size": SEND_HIGH_WATER_MARK,
            "topic": config.topic,
        }


@contextlib.asynccontextmanager
async def replaying(publisher: KvPublisher) -> AsyncIterator[None]:
    """Answer replay requests while the block runs, then close the publisher."""
    task = asyncio.create_task(publisher.serve_replay())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        publisher.close()


def _placeholder(event: Offloaded) -> dict[str, Any]:
    """A move to a slower tier, which names blocks and says nothing of their content."""
    return {
        "type": "BlockStored",
        "block_hashes": [event.hash],
        "parent_block_hash": None,
        "token_ids": [],
        "block_size": 0,
        "lora_id": None,
        "medium": event.tier.upper(),
    }


def _bind(socket: zmq.Socket[Any], endpoint: str) -> None:
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise EventSocketError(f"cannot publish KV events on {endpoint}: {error.strerror}") from error


def _bound(socket: zmq.Socket[Any]) -> str:
    return bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).decode()


def _extra_keys(event: Stored, block: int) -> list[str] | None:
    request = event.request
    keys = [request.adapter] if request.adapter is not None else []
    if block == 0 and request.cache_salt is not None:
        keys.append(request.cache_salt)
    return keys or None
