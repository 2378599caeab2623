"""`docs/explanation/lab-checks.md` from the figures of the checks and hand-written reasons, and from nothing else.

Every difference above a bound is listed with its reason; one without a reason says so, and a reason for something that
does not differ is refused. The same data give the same page, byte for byte; a test compares them.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lab_checks import page_ladder, page_mocker, page_processes
from lab_checks.text import Difference, listed

PAGE = "docs/explanation/lab-checks.md"
DATA = "docs/explanation/lab-checks.json"
REASONS = "docs/explanation/lab-checks.reasons.toml"

INTRODUCTION = """\
# The lab against others

<!-- Rendered by `benchmarks/lab_check.py` from lab-checks.json and lab-checks.reasons.toml. Do not edit. -->

A simulator can be wrong in ways its author does not see. Three checks hold [the engine model](engine-model.md) and the
lab against things that were made without them: the simulator of NVIDIA Dynamo, the benchmark that llm-d publishes of a
fleet of 16 GPUs, and real `warmfront engine` processes behind a real router. Every difference above 5 %, or outside the
stated tolerance, is listed with its reason."""

SECTIONS = {"mocker": page_mocker, "ladder": page_ladder, "processes": page_processes}
MADE = """\
## How this was made

{rows}

All figures are in [lab-checks.json](lab-checks.json)."""


def read(root: Path) -> dict[str, Any]:
    """Read the figures below the root of a source tree."""
    content: dict[str, Any] = json.loads((root / DATA).read_text(encoding="utf-8"))
    return content


def read_reasons(root: Path) -> dict[str, dict[str, str]]:
    """Read the reasons: section, then what differs, then the sentence."""
    return tomllib.loads((root / REASONS).read_text(encoding="utf-8"))


def render(data: Mapping[str, Any], reasons: Mapping[str, Mapping[str, str]]) -> str:
    """Return the page.

    Raises:
        ValueError: A reason is given for something that does not differ.
    """
    return "\n\n".join([INTRODUCTION, *_sections(data, reasons), MADE.format(rows=_made(data))]) + "\n"


def _sections(data: Mapping[str, Any], reasons: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    for name, section in SECTIONS.items():
        if name not in data:
            continue
        differences: Sequence[Difference] = section.differences(data[name])
        yield section.render(data[name])
        yield listed(section.DIFFERS, differences, reasons.get(name, {}), section=name)


def _made(data: Mapping[str, Any]) -> str:
    rows = ["| check | command | date | commit | machine |", "| --- | --- | --- | --- | --- |"]
    for name in SECTIONS:
        if name in data:
            about = data[name]["about"]
            machine = f"{about['cores']} cores, load average {about['load_average']:g} at the start"
            command = f"`python benchmarks/lab_check.py {name}`"
            rows.append(f"| {name} | {command} | {about['date']} | {about['commit']} | {machine} |")
    return "\n".join(rows)
