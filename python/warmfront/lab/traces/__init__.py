"""Recorded traffic: published traces that ship with the package, and readers of their formats.

A name without a directory or suffix means a shipped file (see README.md beside this one for origin and licence);
anything else is a path. Errors name file and line.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from warmfront.errors import ConfigError

DIRECTORY = Path(__file__).parent
LINE_BYTES_MAX = 64 * 1024 * 1024
"""Longest line that is read."""


def shipped() -> list[str]:
    """Return the names of the traces in the package."""
    return sorted(path.stem for path in DIRECTORY.iterdir() if path.suffix in {".jsonl", ".csv"})


def locate(name: str) -> Path:
    """Return the path of a shipped trace, or the path itself.

    Raises:
        ConfigError: There is no such file.
    """
    if Path(name).name == name and not Path(name).suffix:
        found = [path for path in DIRECTORY.glob(f"{name}.*") if path.suffix in {".jsonl", ".csv"}]
        if not found:
            raise ConfigError(f"no trace is called {name}; shipped are {', '.join(shipped())}, others need a path")
        return found[0]
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"{name} is not there; expected a trace file, or one of {', '.join(shipped())}")
    return path


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file that are not blank, with their numbers from 1.

    Raises:
        ConfigError: The file cannot be read, or a line is too long.
    """
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(LINE_BYTES_MAX + 1):
                number += 1
                if len(line) > LINE_BYTES_MAX:
                    raise ConfigError(f"{path}:{number}: the line is longer than {LINE_BYTES_MAX} bytes")
                if line.strip():
                    yield number, line
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
