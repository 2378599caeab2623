"""Results as a file: JSON with one row a cell, small enough to be kept beside the sources and easy to read elsewhere.

`columns` names the values of the rows under `cells`. Figures have five significant digits, so what is read back is what
was written only up to these.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from warmfront.errors import ConfigError
from warmfront.lab.measures import Measures
from warmfront.lab.results import Results

PLACE = ("regime", "policy", "load")
FIGURES = Measures.__struct_fields__


def write(results: Results, path: Path) -> None:
    """Write a file that `read` takes: one cell a line.

    Raises:
        OSError: It cannot be written.
    """
    tree = rounded(msgspec.to_builtins(results))
    rows = [[cell[name] for name in PLACE] + [cell["measures"][name] for name in FIGURES] for cell in tree.pop("cells")]
    tree["columns"] = [*PLACE, *FIGURES]
    lists = {"searches": tree.pop("searches"), "cells": rows}
    head = msgspec.json.format(msgspec.json.encode(tree), indent=1).decode().removesuffix("\n}")
    parts = [f',\n "{name}": [\n{_lines(content)}\n ]' for name, content in lists.items()]
    path.write_text(f"{head}{''.join(parts)}\n}}\n", encoding="utf-8")


def read(path: Path) -> Results:
    """Read what `write` wrote.

    Raises:
        ConfigError: There is no such file, or it is something else.
    """
    try:
        tree = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        columns = tree.pop("columns", [])
        cells = [dict(zip(columns, row, strict=True)) for row in tree.pop("cells", [])]
        tree["cells"] = [{"measures": cell, **{name: cell[name] for name in PLACE}} for cell in cells]
        return msgspec.convert(tree, Results)
    except (OSError, msgspec.DecodeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error


def _lines(rows: Iterable[Any]) -> str:
    return ",\n".join("  " + msgspec.json.encode(row).decode() for row in rows)


def rounded(tree: Any) -> Any:
    """Return a tree with all numbers at five significant digits."""
    if isinstance(tree, float):
        return float(f"{tree:.5g}")
    if isinstance(tree, dict):
        return {name: rounded(value) for name, value in tree.items()}
    return [rounded(value) for value in tree] if isinstance(tree, list | tuple) else tree
