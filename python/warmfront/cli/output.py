"""Tables in the terminal. Text is printed as it is: an IPv6 address must not be taken for markup."""

from __future__ import annotations

import sys
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

PIPE_WIDTH = 200
"""Columns when the output is no terminal: wide enough that nothing is cut."""


def width() -> int:
    """Return the columns that a line of standard output may have."""
    return Console().width if sys.stdout.isatty() else PIPE_WIDTH


def show(*parts: Table | str) -> None:
    """Print tables and lines to standard output."""
    console = Console(width=width(), highlight=False, markup=False)
    for part in parts:
        console.print(part)


def show_json(content: Any) -> None:
    """Print indented JSON."""
    click.echo(msgspec.json.format(msgspec.json.encode(content), indent=2).decode())


def table(*columns: str, title: str | None = None) -> Table:
    """Return an empty table; columns whose name begins with `#` hold numbers."""
    made = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    for column in columns:
        is_number = column.startswith("#")
        made.add_column(column.removeprefix("#"), justify="right" if is_number else "left", no_wrap=is_number)
    return made


def number(value: float | None, digits: int = 0) -> str:
    """Return a number with thousands separators; `-` when not known."""
    return "-" if value is None else f"{value:,.{digits}f}"
