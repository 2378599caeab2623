"""The page about bugs of other routers: what happened there, and which tests of ours would notice it here.

The facts are in `docs/reference/bugs-of-others.toml`, the tests are found by their marks: `@pytest.mark.bug(1, 2)` on a
Python test, `// bug 1, 2` in front of a Rust test and its attributes. Files are read, not run, so that the page can be
checked without a build.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

FACTS = "docs/reference/bugs-of-others.toml"
NAMES_SHOWN = 2
RUST_MARK = re.compile(r"^ *((?:// bug [\d, ]+\n *)+)(?:#\[.*\]\n *)*(?:async )?fn (\w+)", re.MULTILINE)

PROJECTS = {
    "VR": "vllm-project/router",
    "SG": "sgl-project/sglang",
    "SMG": "smg-project/smg",
    "PS": "vllm-project/production-stack",
    "AX": "vllm-project/aibrix",
    "RAY": "ray-project/ray",
    "EAG": "envoyproxy/ai-gateway",
    "LL": "BerriAI/litellm",
    "KS": "kserve/kserve",
    "DY": "ai-dynamo/dynamo",
    "VL": "vllm-project/vllm",
    "VIME": "vllm-project/vime",
    "PRL": "PrimeIntellect-ai/prime-rl",
    "IN": "AMD Infera",
}


class Bug(NamedTuple):
    """One entry of the facts."""

    id: int
    origin: str
    what: str
    seen: bool
    absent: str | None
    open: bool


def bugs(root: Path) -> list[Bug]:
    """Read the facts, in the order of the file."""
    rows = tomllib.loads((root / FACTS).read_text(encoding="utf-8"))["bug"]
    return [
        Bug(
            row["id"], row["from"], row["what"], row.get("seen", False), row.get("absent"), bool(row.get("open", False))
        )
        for row in rows
    ]


def marked(root: Path) -> dict[int, list[str]]:
    """Return the tests by the id that they are marked with, each as `path::name`."""
    found: dict[int, list[str]] = defaultdict(list)
    for path in sorted(root.glob("tests/**/test_*.py")):
        for ids, name in _python_marks(path.read_text(encoding="utf-8")):
            _note(found, ids, f"{path.relative_to(root)}::{name}")
    for path in sorted(root.glob("crates/*/**/*.rs")):
        for ids, name in _rust_marks(path.read_text(encoding="utf-8")):
            _note(found, ids, f"{path.relative_to(root)}::{name}")
    return dict(found)


def parts(root: Path) -> list[str]:
    """Return the paragraphs of the page; the first one begins with the title."""
    tests = marked(root)
    rows = [
        (str(bug.id), bug.origin + (" †" if bug.seen else ""), bug.what, _state(bug, tests.get(bug.id, [])))
        for bug in bugs(root)
    ]
    table = [("id", "from", "what went wrong", "here"), ("---",) * 4, *rows]
    lines = ("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in table)
    projects = "; ".join(f"{key} {name}" for key, name in PROJECTS.items())
    return [HEAD, f"Projects: {projects}.", "\n".join(lines)]


def _state(bug: Bug, names: list[str]) -> str:
    if names:
        shown = ", ".join(f"`{name}`" for name in names[:NAMES_SHOWN])
        return shown if len(names) <= NAMES_SHOWN else f"{shown} and {len(names) - NAMES_SHOWN} more"
    return f"not built: {bug.absent}" if bug.absent else "no test yet"


def _note(found: Mapping[int, list[str]], ids: list[int], name: str) -> None:
    for number in ids:
        found[number].append(name)


def _python_marks(source: str) -> Iterator[tuple[list[int], str]]:
    if "mark.bug(" not in source:
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.bug":
                    yield [int(ast.literal_eval(argument)) for argument in mark.args], node.name


def _rust_marks(source: str) -> Iterator[tuple[list[int], str]]:
    for comments, name in RUST_MARK.findall(source):
        yield [int(number) for number in re.findall(r"\d+", comments)], name


HEAD = """# Bugs of others

What users of other routers ran into, in our words, and the tests here that would notice the same. The tests are marked
with the ids, so `pytest -m bug` runs those in Python. A row is a situation, not a verdict: the version in which it
happened may be old. † marks what we saw ourselves when we ran the published packages."""
