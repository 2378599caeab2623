"""Recording: every batch of events, the overlap answers it needed, and the commands it led to.

A file is a sequence of frames, each a big-endian length of four bytes and that much MessagePack: first a `Header`, then
one `Step` a batch. No prompt text is in it. What is easy to get wrong: the index changes while the router runs, so
its answers are inputs and belong into the recording. A disk that fills up ends the recording and nothing else.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec
from msgspec import Struct

from warmfront.config import RouterConfig
from warmfront.errors import WarmfrontError
from warmfront.router.index import Index
from warmfront.router.meter import Meter
from warmfront.router.router import Router
from warmfront.types import Command, Event, Overlap, Request, RequestId, Slot

logger = logging.getLogger(__name__)

VERSION = 1
BYTES_MAX = 4 * 1024**3
"""A recording ends at this size."""
FRAME_BYTES_MAX = 256 * 1024 * 1024
"""A longer frame is not one."""
_LENGTH = struct.Struct(">I")


class RecordingError(WarmfrontError):
    """A file is not a recording, or of another version."""


class Header(Struct, frozen=True):
    """First frame. The seed is in the configuration."""

    version: int
    config: RouterConfig


class Step(Struct, frozen=True, array_like=True):
    """One batch. `overlaps` are in the order in which they were asked for; `None`: the request was unknown by then."""

    events: list[Event]
    overlaps: list[Overlap | None]
    commands: list[Command]


class Stepper(Protocol):
    """A router, recorded or not."""

    def step(self, events: Sequence[Event]) -> list[Command]:
        """Take note of what happened, then decide what can be decided."""


def open_router(config: RouterConfig, index: Index, *, meter: Meter | None = None) -> Stepper:
    """Make a router that records when its configuration says so.

    Raises:
        ConfigError: The policy's name is not known.
        RecordingError: The recording cannot be opened.
    """
    if config.record is None:
        return Router(config, index, meter=meter)
    return RecordedRouter(config, index, meter=meter, path=Path(config.record))


class RecordedRouter:
    """A router whose every step goes to a file."""

    def __init__(
        self, config: RouterConfig, index: Index, *, path: Path, meter: Meter | None = None, bytes_max: int = BYTES_MAX
    ) -> None:
        self._tap = _Tap(index)
        self._router = Router(config, self._tap, meter=meter)
        self._encoder = msgspec.msgpack.Encoder()
        self._path, self._bytes, self._bytes_max = path, 0, bytes_max
        try:
            self._file: BinaryIO | None = path.open("wb")
        except OSError as error:
            raise RecordingError(f"cannot record to {path}: {error.strerror}") from error
        self._write(Header(VERSION, config))

    def step(self, events: Sequence[Event]) -> list[Command]:
        """Step the router and write down what it saw and said."""
        commands = self._router.step(events)
        overlaps, self._tap.overlaps = self._tap.overlaps, []
        if self._file is not None:
            self._write(Step(list(events), overlaps, commands))
        return commands

    def close(self) -> None:
        """End the recording; the router goes on."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, frame: Struct) -> None:
        assert self._file is not None
        body = self._encoder.encode(frame)
        self._bytes += _LENGTH.size + len(body)
        if self._bytes > self._bytes_max:
            self._stop(f"it reached {self._bytes_max} bytes")
            return
        try:
            self._file.write(_LENGTH.pack(len(body)) + body)
            self._file.flush()
        except OSError as error:
            self._stop(str(error.strerror))

    def _stop(self, reason: str) -> None:
        logger.error("recording to %s stopped: %s; serving goes on", self._path, reason)
        file, self._file = self._file, None
        assert file is not None
        try:
            file.close()
        except OSError:
            logger.debug("closing %s failed after the recording had stopped", self._path, exc_info=True)


class _Tap:
    """An index that remembers what it answered."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self.overlaps: list[Overlap | None] = []

    def overlap(self, request: Request) -> Overlap:
        try:
            overlap = self._index.overlap(request)
        except LookupError:
            self.overlaps.append(None)
            raise
        self.overlaps.append(overlap)
        return overlap

    def predict(self, request: Request, slot: Slot) -> None:
        self._index.predict(request, slot)

    def release(self, request_id: RequestId) -> None:
        self._index.release(request_id)


def read(path: Path) -> tuple[Header, Iterator[Step]]:
    """Open a recording.

    Returns:
        The header, and the steps one by one. A frame cut off at the end (the process died while writing) ends them.

    Raises:
        RecordingError: The file cannot be read, is not a recording, or is of another version.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise RecordingError(f"cannot read {path}: {error.strerror}") from error
    frames = _frames(file)
    try:
        header = msgspec.msgpack.decode(next(frames), type=Header)
    except (StopIteration, msgspec.MsgspecError) as error:
        file.close()
        raise RecordingError(f"{path} is not a recording") from error
    if header.version != VERSION:
        file.close()
        raise RecordingError(f"{path} has version {header.version}; this warmfront reads {VERSION}")
    return header, _steps(path, frames)


def _steps(path: Path, frames: Iterator[bytes]) -> Iterator[Step]:
    decoder = msgspec.msgpack.Decoder(Step)
    for frame in frames:
        try:
            yield decoder.decode(frame)
        except msgspec.MsgspecError as error:
            raise RecordingError(f"{path}: a frame cannot be read: {error}") from error


def _frames(file: BinaryIO) -> Iterator[bytes]:
    with file:
        while len(head := file.read(_LENGTH.size)) == _LENGTH.size:
            (length,) = _LENGTH.unpack(head)
            if length > FRAME_BYTES_MAX:
                raise RecordingError(f"a frame of {length} bytes is not one of a recording")
            body = file.read(length)
            if len(body) < length:
                return
            yield body
