"""Finished tasks in a file, so that a long run can stop and go on.

One JSON line a task, appended as soon as it is done. The key is a hash of the code that the result depends on and of
everything the task carries; a line whose key nobody asks for is old and harmless.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from types import TracebackType
from typing import IO

import msgspec
from msgspec import Struct

from warmfront.errors import ConfigError
from warmfront.lab.cells import Result, SearchTask, Task
from warmfront.lab.fingerprint import fingerprint
from warmfront.lab.measures import Measures
from warmfront.lab.peers import PEERS
from warmfront.lab.search import Sustained
from warmfront.policy import registry

ROOTS = ("warmfront.lab.run", "warmfront.lab.regime", "warmfront.lab.measures", "warmfront.lab.search")
"""Modules that every result depends on, those that are imported by name among them."""
NOT_RUN = {"title": "", "expects": "", "tags": (), "loads": ()}
"""Fields of a regime that do not change a run at one load."""


class _Line(Struct, frozen=True):
    key: str
    task: str
    """In words, for people."""
    measures: Measures | None = None
    sustained: Sustained | None = None


class Cache:
    """Results by task. A context manager: appends while it is open."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._results: dict[str, Result] = {}

    def __enter__(self) -> Cache:
        """Read what is there.

        Raises:
            ConfigError: The file holds something else.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        content = self._path.read_bytes() if self._path.exists() else b""
        *lines, rest = content.split(b"\n")
        for number, line in enumerate(lines, start=1):
            self._take(line, number)
        self._file = self._path.open("ab")
        if rest:  # cut off in the middle of a line: what follows must not continue it
            self._file.truncate(len(content) - len(rest))
        return self

    def _take(self, line: bytes, number: int) -> None:
        try:
            read = msgspec.json.decode(line, type=_Line)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{self._path}, line {number}: {error}; remove the file to begin again") from error
        result = read.measures or read.sustained
        if result is not None:
            self._results[read.key] = result

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        assert self._file is not None
        self._file.close()

    def get(self, task: Task) -> Result | None:
        """Return what came of a task, if it was done by the same code."""
        return self._results.get(key(task))

    def put(self, task: Task, result: Result) -> None:
        """Keep what came of a task, on disk when this returns."""
        assert self._file is not None
        name = key(task)
        self._results[name] = result
        kept = {"measures": result} if isinstance(result, Measures) else {"sustained": result}
        line = msgspec.structs.replace(_Line(name, str(task)), **kept)
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()


def key(task: Task) -> str:
    """Return the hash of a task and of the code that does it."""
    regime = msgspec.structs.replace(task.regime, **_ignored(task))
    content = msgspec.json.encode([type(task).__name__, msgspec.structs.replace(task, regime=regime)], order="sorted")
    return hashlib.sha256(_code(task.policy).encode() + content).hexdigest()


def _ignored(task: Task) -> dict[str, object]:
    """A search does depend on the loads: it begins at their middle."""
    return {name: value for name, value in NOT_RUN.items() if name != "loads" or not isinstance(task, SearchTask)}


@functools.cache
def _code(policy: str) -> str:
    factory = PEERS[policy] if policy in PEERS else registry.factory(policy)
    return fingerprint([*ROOTS, factory.__module__])


def default_path() -> Path:
    """Return where results are kept unless another file is named: the user's cache, outside any source tree."""
    return Path.home() / ".cache" / "warmfront" / "lab.jsonl"
