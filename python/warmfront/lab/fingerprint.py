"""What code a run depends on, as one hash: an old result is good as long as this has not changed.

Follows the imports of a module through the package, without running it, and hashes every source, the compiled core and
the traces that come with the package. Policies are loaded by name and so are not found this way: the caller names the
one that runs. A change of one policy therefore leaves the results of all others valid.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import util
from pathlib import Path

PACKAGE = "warmfront"
NOT_FOLLOWED = ("warmfront.lab.peers",)
"""A table of all policies of others: importing it does not mean depending on each."""
DATA = ("lab/traces",)
"""Folders of the package whose files are read by name."""


def fingerprint(modules: Iterable[str]) -> str:
    """Return a hash of everything that modules import, themselves included.

    Args:
        modules: Full names, such as `warmfront.lab.run`. Followed whatever `NOT_FOLLOWED` says.
    """
    digest = hashlib.sha256()
    for name in sorted(closure(tuple(sorted(modules)))):
        digest.update(f"{name}\n{_file_hash(_origin(name))}\n".encode())
    for path in _data():
        digest.update(f"{path.name}\n{_file_hash(path)}\n".encode())
    return digest.hexdigest()


@cache
def closure(modules: tuple[str, ...]) -> frozenset[str]:
    """Return the names of all modules of the package that are reached by imports."""
    reached: set[str] = set()
    waiting = list(modules)
    while waiting:
        name = waiting.pop()
        if name in reached or _origin(name) is None:
            continue
        reached.add(name)
        waiting += [found for found in _imports(name) if not found.startswith(NOT_FOLLOWED)]
    return frozenset(reached)


@cache
def _imports(name: str) -> tuple[str, ...]:
    path = _origin(name)
    if path is None or path.suffix != ".py":
        return ()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return tuple(found for node in ast.walk(tree) for found in _named(node) if found.startswith(PACKAGE))


def _named(node: ast.AST) -> Iterator[str]:
    """Yield what a node may import: of `from a import b`, b may be a module or a name in a."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def _origin(name: str) -> Path | None:
    try:
        spec = util.find_spec(name)
    except ModuleNotFoundError:  # `a.b` where a is a module and b a name in it
        return None
    return Path(spec.origin) if spec is not None and spec.origin is not None else None


@cache
def _file_hash(path: Path | None) -> str:
    assert path is not None  # only modules with a file are in a closure
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _data() -> list[Path]:
    root = Path(__file__).resolve().parents[1]
    return sorted(
        path for folder in DATA for path in (root / folder).rglob("*") if path.is_file() and path.suffix != ".pyc"
    )
