"""The Mooncake format: JSONL of `timestamp` (ms), `input_length`, `output_length`, `hash_ids`.

An id stands for 512 tokens and everything before them; the last one of a prompt may stand for fewer. Source: Qin et
al., Mooncake, FAST '25, and the README of its release.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from warmfront.errors import ConfigError
from warmfront.lab.model import Segment
from warmfront.lab.traces import lines

BLOCK_TOKENS = 512

Natural = Annotated[int, Meta(ge=0)]


class Row(Struct, frozen=True):
    """One line."""

    timestamp: Annotated[float, Meta(ge=0)]
    input_length: Annotated[int, Meta(ge=1)]
    output_length: Natural
    hash_ids: list[Natural]


_decoder = msgspec.json.Decoder(Row)


def rows(path: Path) -> Iterator[Row]:
    """Yield the lines of a file.

    Raises:
        ConfigError: A line is not of this format; names file, line and field.
    """
    earlier_ms = 0.0
    for number, line in lines(path):
        try:
            row = _decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}:{number}: {error}") from error
        if row.timestamp < earlier_ms:
            raise ConfigError(f"{path}:{number}: timestamp {row.timestamp:g} is before the line above")
        blocks = -(-row.input_length // BLOCK_TOKENS)
        if not blocks - 1 <= len(row.hash_ids) <= blocks:
            raise ConfigError(
                f"{path}:{number}: hash_ids: expected {blocks} for {row.input_length} tokens, got {len(row.hash_ids)}"
            )
        earlier_ms = row.timestamp
        yield row


def prompt(row: Row, contents: Mapping[int, int], tail: int) -> tuple[Segment, ...]:
    """Return the prompt of a row.

    Args:
        row: One line.
        contents: Hash id → content id.
        tail: Content id for last tokens without a hash id.
    """
    ids = [contents[block] for block in row.hash_ids]
    full, rest = divmod(row.input_length, BLOCK_TOKENS)
    last = ((ids[full] if len(ids) > full else tail, rest),) if rest else ()
    return (*((content, BLOCK_TOKENS) for content in ids[:full]), *last)
