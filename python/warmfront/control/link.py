"""The Unix socket to the data process.

Frames are a u32 length, big-endian, and a MessagePack map with a `type`; unknown types and fields are ignored, so that
either side may learn first. The core listens, this side connects, and the
end of the connection is the end of this process. Questions of the admin API go over the same socket and are told apart
by their number.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import struct
from pathlib import Path

import msgspec
from msgspec import Struct

from warmfront.errors import OverloadedError, WarmfrontError
from warmfront.types import FleetState, FleetUpdate

logger = logging.getLogger(__name__)

FRAME_BYTES_MAX = 128 * 1024 * 1024
"""A longer frame means that the two sides do not speak one language; the largest honest one holds a request body."""

QUESTIONS_MAX = 32
"""Questions waiting for their answers; more are refused."""

_LENGTH = struct.Struct(">I")


class LinkClosedError(WarmfrontError):
    """The data process has gone, or what it sends cannot be read."""


class UnansweredError(OverloadedError):
    """The data process did not answer a question in time."""


class Hello(Struct, frozen=True, tag="hello"):
    """First frame of the core."""

    serving: str
    """Address of the clients' port."""
    pid: int


class State(Struct, frozen=True, tag="state"):
    """The fleet as the core serves it, with slots and event states."""

    state: FleetState


class Reply(Struct, frozen=True, tag="answer"):
    """Answer to a `Question`."""

    id: int
    status: int
    body: bytes


class Reload(Struct, frozen=True, tag="reload"):
    """Somebody asked the data process by signal for the configuration to be read again."""


class Stop(Struct, frozen=True, tag="stop"):
    """The data process ends; so should this one."""


class Fleet(Struct, frozen=True, tag="fleet"):
    """The whole fleet as probed."""

    update: FleetUpdate


class Question(Struct, frozen=True, tag="ask"):
    """Something that only the data process knows."""

    id: int
    question: str
    payload: bytes = b""
    path: str = ""
    """For `explain` and `tokens`: the path the request would have come to."""


class Stopping(Struct, frozen=True, tag="stopping"):
    """This process ends on purpose."""


Incoming = Hello | State | Reply | Reload | Stop


class _Kind(Struct, frozen=True):
    """The first look at a frame."""

    type: str


_KNOWN = frozenset({"hello", "state", "answer", "reload", "stop"})


class Link:
    """One connection to the data process."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Wrap an open connection; use `connect`."""
        self.hello: Hello | None = None
        self.state: FleetState | None = None
        self.reloads = asyncio.Event()
        """Set when the configuration is to be read again."""
        self._told = asyncio.Event()
        """Set, and replaced by another one, when the core tells its fleet."""
        self._reader = reader
        self._writer = writer
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._decoder: msgspec.msgpack.Decoder[Incoming] = msgspec.msgpack.Decoder(Incoming)
        self._encoder = msgspec.msgpack.Encoder()

    @classmethod
    async def connect(cls, path: Path) -> Link:
        """Connect to the core.

        Raises:
            LinkClosedError: Nobody listens at `path`.
        """
        try:
            reader, writer = await asyncio.open_unix_connection(str(path))
        except OSError as error:
            raise LinkClosedError(f"cannot connect to {path}: {error.strerror}") from error
        return cls(reader, writer)

    async def read(self) -> None:
        """Take frames until the core says stop.

        Raises:
            LinkClosedError: The connection has ended or carries something unreadable.
        """
        try:
            while not isinstance(frame := self._decode(await self._payload()), Stop):
                self._take(frame)
        finally:
            for waiting in self._waiting.values():
                waiting.cancel()

    async def first_state(self, *, timeout_s: float) -> FleetState | None:
        """Wait for the fleet that the core has now; `None` when it does not tell in time. `read` must be running."""
        try:
            return await self.state_since(0, timeout_s=timeout_s)
        except UnansweredError:
            logger.warning("the data process does not tell its fleet within %g s", timeout_s)
        return None

    async def state_since(self, version: int, *, timeout_s: float) -> FleetState:
        """Wait for a fleet of the core that knows the update of this number. `read` must be running.

        Raises:
            UnansweredError: It does not come in time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while self.state is None or self.state.version < version:
                    await self._told.wait()
                return self.state
        except TimeoutError as error:
            raise UnansweredError(f"the data process did not take the fleet within {timeout_s:g} s") from error

    async def send_fleet(self, update: FleetUpdate) -> None:
        """Tell the core the fleet; returns when the socket has taken it."""
        await self._send(Fleet(update))

    async def ask(self, question: str, *, payload: bytes = b"", path: str = "", timeout_s: float) -> Reply:
        """Ask the data process and wait for its answer.

        Raises:
            UnansweredError: It does not answer in time, or too many questions wait already.
        """
        if len(self._waiting) >= QUESTIONS_MAX:
            raise UnansweredError(f"{QUESTIONS_MAX} questions wait for the data process already")
        number = next(self._numbers)
        waiting: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[number] = waiting
        try:
            async with asyncio.timeout(timeout_s):
                await self._send(Question(number, question, payload, path))
                return await waiting
        except TimeoutError as error:
            raise UnansweredError(f"the data process did not answer within {timeout_s:g} s") from error
        finally:
            del self._waiting[number]

    async def close(self) -> None:
        """Say goodbye and close."""
        try:
            await self._send(Stopping())
            self._writer.close()
            await self._writer.wait_closed()
        except (OSError, LinkClosedError):
            return  # the other side was faster

    def _take(self, frame: Hello | State | Reply | Reload | None) -> None:
        if isinstance(frame, Hello):
            self.hello = frame
        elif isinstance(frame, State):
            self.state = frame.state
            self._told.set()
            self._told = asyncio.Event()
        elif isinstance(frame, Reload):
            self.reloads.set()
        elif frame is not None and (waiting := self._waiting.get(frame.id)) is not None and not waiting.done():
            waiting.set_result(frame)

    async def _payload(self) -> bytes:
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if length > FRAME_BYTES_MAX:
                raise LinkClosedError(f"a frame of {length} bytes from the data process")
            return await self._reader.readexactly(length)
        except (OSError, asyncio.IncompleteReadError) as error:
            raise LinkClosedError("the data process has gone") from error

    def _decode(self, payload: bytes) -> Incoming | None:
        """Return the frame; `None` when its type is not one we know."""
        try:
            if msgspec.msgpack.decode(payload, type=_Kind).type not in _KNOWN:
                return None
            return self._decoder.decode(payload)
        except (msgspec.DecodeError, RecursionError) as error:
            raise LinkClosedError(f"a frame of the data process cannot be read: {error}") from error

    async def _send(self, frame: Fleet | Question | Stopping) -> None:
        payload = self._encoder.encode(frame)
        try:
            self._writer.write(_LENGTH.pack(len(payload)) + payload)
            await self._writer.drain()
        except OSError as error:
            raise LinkClosedError("the data process has gone") from error
