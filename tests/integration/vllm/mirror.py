"""An engine's cache as its KV events tell it, kept without any code of warmfront.

It asks the replay socket, so it sees every batch since the engine started. Blocks are found by the engine's own hashes:
a store names its parent, so a prompt is walked from the first block on.

What one would get wrong: the same hash is stored once for each physical copy and removed once for each, so residency is
a count; and the replay answers a DEALER socket only.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import zmq

from .engine import BLOCK_SIZE, Engine

REPLY_TIMEOUT_MS = 20_000
END = (2**64 - 1).to_bytes(8, "big")
Extra = tuple[Any, ...]


class Mirror:
    """What one engine holds."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.forget()

    @property
    def url(self) -> str:
        return self.engine.url

    def forget(self) -> None:
        """Start again, after the engine was started again."""
        self.sequence = -1
        self.copies: Counter[int] = Counter()
        self.names: dict[tuple[int | None, tuple[int, ...], Extra], int] = {}

    def refresh(self) -> int:
        """Apply what was published since; return the last sequence number, -1 before the first."""
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.RCVTIMEO, REPLY_TIMEOUT_MS)
            socket.connect(f"tcp://127.0.0.1:{self.engine.replay_port}")
            socket.send_multipart([b"", (self.sequence + 1).to_bytes(8, "big")])
            while (frames := socket.recv_multipart())[-2] != END:
                sequence = int.from_bytes(frames[-2], "big")
                assert sequence == self.sequence + 1, f"replay skips from {self.sequence} to {sequence}"
                self.sequence = sequence
                for event in msgspec.msgpack.decode(frames[-1])[1]:
                    self._apply(event)
        return self.sequence

    def depth(self, tokens: list[int], *, adapter: str | None = None, salt: str | None = None) -> int:
        """Count the leading tokens of a prompt that lie in the cache, in full blocks."""
        parent: int | None = None
        for start in range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE):
            extra = tuple(filter(None, (adapter, salt if start == 0 else None)))
            parent = self.names.get((parent, tuple(tokens[start : start + BLOCK_SIZE]), extra))
            if parent is None or self.copies[parent] <= 0:
                return start
        return len(tokens) // BLOCK_SIZE * BLOCK_SIZE

    def _apply(self, event: dict[str, Any]) -> None:
        match event["type"]:
            case "BlockStored":
                self._store(event)
            case "BlockRemoved":
                self.copies.subtract(event["block_hashes"])
            case "AllBlocksCleared":
                self.copies.clear()
            case kind:
                raise AssertionError(f"unknown KV event {kind}")

    def _store(self, event: dict[str, Any]) -> None:
        parent, tokens = event["parent_block_hash"], event["token_ids"]
        extras = event.get("extra_keys") or [None] * len(event["block_hashes"])
        for number, (name, extra) in enumerate(zip(event["block_hashes"], extras, strict=True)):
            block = tuple(tokens[number * BLOCK_SIZE : (number + 1) * BLOCK_SIZE])
            self.names[parent, block, tuple(extra or ())] = name
            self.copies[name] += 1
            parent = name
