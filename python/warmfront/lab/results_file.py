"""Results as a file: JSON with one row a cell, small enough to be kept beside the sources and easy to read elsewhere.

`columns` names the values of the rows under `cells`, `group_columns` those under `groups`: a row for each cell and each
group that its regime declares. Figures have five significant digits, so what is read back is what was written only up
to these. A file without `format` is of format 1, which knew no groups.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from warmfront.errors import ConfigError
from warmfront.lab.measures import Figures, Measures
from warmfront.lab.results import Results

Found = TypeVar("Found", bound=Struct)

FORMAT = 2
"""Of the files written; older ones are read."""
PLACE = ("regime", "policy", "load")
FIGURES = tuple(name for name in Measures.__struct_fields__ if name != "groups")
GROUP_FIGURES = Figures.__struct_fields__


def write(results: Results, path: Path) -> None:
    """Write a file that `read` takes: one cell a line.

    Raises:
        OSError: It cannot be written.
    """
    tree = {"format": FORMAT, **rounded(msgspec.to_builtins(results))}
    cells, searches = tree.pop("cells"), tree.pop("searches")
    tree["columns"], tree["group_columns"] = [*PLACE, *FIGURES], [*PLACE, "group", *GROUP_FIGURES]
    groups = [
        [cell[name] for name in PLACE] + [group] + [figures[name] for name in GROUP_FIGURES]
        for cell in cells
        for group, figures in cell["measures"]["groups"].items()
    ]
    rows = [[cell[name] for name in PLACE] + [cell["measures"][name] for name in FIGURES] for cell in cells]
    head = msgspec.json.format(msgspec.json.encode(tree), indent=1).decode().removesuffix("\n}")
    lists = {"searches": searches, "cells": rows, "groups": groups}
    parts = [f',\n "{name}": [\n{_lines(content)}\n ]' for name, content in lists.items()]
    path.write_text(f"{head}{''.join(parts)}\n}}\n", encoding="utf-8")


def read(path: Path) -> Results:
    """Read what `write` wrote, be it of an older format.

    Raises:
        ConfigError: There is no such file, or it is something else, or of a format that is not known yet.
    """
    try:
        tree = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        number = tree.pop("format", 1)
        if number not in range(1, FORMAT + 1):
            raise ConfigError(f"{path}: format {number} is not known; this version reads up to {FORMAT}")
        groups: dict[tuple[Any, ...], dict[str, Any]] = defaultdict(dict)
        for row in _rows(tree, "group_columns", "groups"):
            groups[_place(row)][row["group"]] = row
        tree["cells"] = [
            {"measures": {**cell, "groups": groups[_place(cell)]}, **{name: cell[name] for name in PLACE}}
            for cell in _rows(tree, "columns", "cells")
        ]
        return msgspec.convert(tree, Results)
    except (OSError, msgspec.DecodeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error


def _rows(tree: dict[str, Any], columns: str, rows: str) -> list[dict[str, Any]]:
    names = tree.pop(columns, [])
    return [dict(zip(names, row, strict=True)) for row in tree.pop(rows, [])]


def _place(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in PLACE)


def _lines(rows: Iterable[Any]) -> str:
    return ",\n".join("  " + msgspec.json.encode(row).decode() for row in rows)


def write_rows(found: Struct, path: Path, *, rows: str) -> None:
    """Write a value that `read_rows` takes: one of its field `rows` a line."""
    tree = rounded(msgspec.to_builtins(found))
    lines = _lines(tree.pop(rows))
    head = msgspec.json.format(msgspec.json.encode(tree), indent=1).decode().removesuffix("\n}")
    path.write_text(f'{head},\n "{rows}": [\n{lines}\n ]\n}}\n', encoding="utf-8")


def read_rows(path: Path, kind: type[Found]) -> Found | None:
    """Read what `write_rows` wrote; `None`: nothing was run.

    Raises:
        ConfigError: The file holds something else.
    """
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}") from error


def rounded(tree: Any) -> Any:
    """Return a tree with all numbers at five significant digits."""
    if isinstance(tree, float):
        return float(f"{tree:.5g}")
    if isinstance(tree, dict):
        return {name: rounded(value) for name, value in tree.items()}
    return [rounded(value) for value in tree] if isinstance(tree, list | tuple) else tree
