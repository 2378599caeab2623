"""The Azure LLM inference format: CSV of a time, input tokens, output tokens; nothing about contents.

Both the published columns (`TIMESTAMP,ContextTokens,GeneratedTokens`, a date and time) and those of the shipped files
(`t_s,input_tokens,output_tokens`, seconds from the first request) are read. Source: Patel et al., Splitwise, ISCA '24.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from msgspec import Struct

from warmfront.errors import ConfigError
from warmfront.lab.traces import lines

HEADERS = ("t_s,input_tokens,output_tokens", "TIMESTAMP,ContextTokens,GeneratedTokens")


class Row(Struct, frozen=True):
    """One line; `at_s` counts from the first."""

    at_s: float
    input_tokens: int
    output_tokens: int


def rows(path: Path) -> Iterator[Row]:
    """Yield the lines of a file.

    Raises:
        ConfigError: A line is not of this format; names file and line.
    """
    start_s: float | None = None
    earlier_s = 0.0
    for number, line in lines(path):
        text = line.decode("utf-8", errors="replace").lstrip("\ufeff").strip()
        if number == 1:
            if text not in HEADERS:
                raise ConfigError(f"{path}:1: expected the header {HEADERS[0]} or {HEADERS[1]}")
            continue
        seconds, *counts = _fields(text, f"{path}:{number}")
        start_s = seconds if start_s is None else start_s
        if seconds - start_s < earlier_s:
            raise ConfigError(f"{path}:{number}: the time is before that of the line above")
        earlier_s = seconds - start_s
        yield Row(earlier_s, int(counts[0]), int(counts[1]))


def _fields(text: str, where: str) -> tuple[float, float, float]:
    fields = text.split(",")
    if len(fields) != 3:
        raise ConfigError(f"{where}: expected 3 fields, got {len(fields)}")
    try:
        time_s, given, made = _seconds(fields[0]), int(fields[1]), int(fields[2])
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    if given < 1 or made < 0:
        raise ConfigError(f"{where}: expected at least 1 input token and 0 output tokens, got {given} and {made}")
    return time_s, given, made


def _seconds(text: str) -> float:
    """Read seconds, or a date and time of any precision."""
    if ":" not in text:
        return float(text)
    whole, _, fraction = text.partition(".")
    digits = fraction.rstrip("Z")
    moment = datetime.fromisoformat(f"{whole}+00:00").timestamp()
    return moment + (float(f"0.{digits}") if digits else 0.0)
