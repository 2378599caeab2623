"""The commands of the page on simulating, typed as they stand into one shell. Only runs are made shorter."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from warmfront.lab.results_file import read

pytest.importorskip("warmfront.core", reason="the core is not built", exc_type=ImportError)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "simulate.md"
COMMANDS = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
REQUESTS = re.compile(r"(requests(?: = | ))1000")
DEADLINE_S = 120.0


def test_the_page_does_what_it_says(tmp_path: Path) -> None:
    blocks = [block for block in COMMANDS.findall(PAGE.read_text(encoding="utf-8")) if "pip install" not in block]
    shim = tmp_path / "warmfront"
    shim.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m warmfront "$@"\n', encoding="utf-8")
    shim.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        ["bash", "-ec", REQUESTS.sub(r"\g<1>100", "\n".join(blocks))],
        cwd=tmp_path,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    written = read(tmp_path / "chat.json")
    assert (written.policies(), written.seeds) == (["least_loaded", "marginal_cost", "session"], (1,))
    assert "chat: Conversations" in done.stdout
    assert "ours: Our assistants" in done.stdout
    assert "highest load with p99 TTFT and p99 TPOT within the targets" in done.stdout
