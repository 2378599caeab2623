"""The page about workloads shows what is read: its regime loads, its lines are a workload file, no kind is missing."""

from __future__ import annotations

import re
from pathlib import Path

from warmfront.lab import regime
from warmfront.lab.traces import workload
from warmfront.lab.workloads import KINDS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "how-to" / "make-a-workload.md").read_text(encoding="utf-8")


def block(language: str, start: str) -> str:
    """The code block that begins so."""
    found = re.search(rf"^```{language}\n({re.escape(start)}.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, start
    return found[1]


def test_the_regime_on_the_page_loads_and_runs(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(block("toml", "title ="), encoding="utf-8")
    found = regime.load(str(path))
    assert len(list(regime.source(found, found.loads[0], 0).arrivals())) > 500


def test_the_lines_on_the_page_are_a_workload_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(block("json", '{"format"'), encoding="utf-8")
    (job,) = workload.jobs(path)
    assert [step.turn for step in job.walk()] == [0, 1]


def test_the_table_names_every_kind() -> None:
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", PAGE.partition("| `kind` |")[2].partition("\n\n")[0], re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == set(KINDS)
