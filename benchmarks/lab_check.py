"""Hold the lab against Dynamo's mocker, llm-d's published ladder and real engine processes.

    python benchmarks/lab_check.py mocker       same traces through both simulators, about five minutes
    python benchmarks/lab_check.py ladder       every rung of the ladder, about two minutes
    python benchmarks/lab_check.py processes    real processes for a minute; the machine should have nothing else to do
    python benchmarks/lab_check.py render       the page again from the figures that are there

Each writes its part of docs/explanation/lab-checks.json and the page. `mocker` needs the wheel of `ai-dynamo-runtime`,
which it installs into an environment of its own on first use.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from lab_checks import ladder, mocker, page, processes
from places import ROOT

CHECKS: dict[str, Callable[[], dict[str, Any]]] = {
    "mocker": mocker.check,
    "ladder": ladder.check,
    "processes": processes.check,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("check", choices=[*CHECKS, "render"])
    name = parser.parse_args().check
    logging.getLogger("warmfront").setLevel(logging.ERROR)  # the router's warnings are for who runs a fleet
    if name in CHECKS:
        _keep(name, {"about": about(), **CHECKS[name]()})
    (ROOT / page.PAGE).write_text(page.render(page.read(ROOT), page.read_reasons(ROOT)), encoding="utf-8")
    return 0


def about() -> dict[str, Any]:
    """Say when, of what and where something is measured."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
    }


def _keep(name: str, part: dict[str, Any]) -> None:
    path = ROOT / page.DATA
    data = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    ordered = {key: (data | {name: part})[key] for key in CHECKS if key in data or key == name}
    path.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
