"""`warmfront simulate`, with real runs of a few requests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.lab_figures import is_running
from warmfront.cli import main
from warmfront.lab.results_file import read

pytest.importorskip("warmfront.core", reason="the core is not built", exc_type=ImportError)

SMALL = ("simulate", "chat", "--policy", "random,round_robin", "--load", "4", "--requests", "60", "--jobs", "1")
DEADLINE_S = 60.0


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def test_figures_and_what_reproduces_them_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["warmfront", *SMALL])
    path = tmp_path / "results.json"
    result = run(*SMALL, "--seed", "3,4", "--set", "router.choices_max=2", "--json", str(path))
    assert result.exit_code == 0, result.output
    written = read(path)
    assert "chat: " in result.output
    assert "over all cells" in result.output
    assert written.command == "warmfront " + " ".join(SMALL)
    assert written.seeds == (3, 4)
    assert written.config["choices_max"] == 2
    assert [regime.requests for regime in written.regimes] == [60]
    assert {(cell.policy, cell.load) for cell in written.cells} == {("random", 4.0), ("round_robin", 4.0)}
    assert json.loads(path.read_text(encoding="utf-8"))["version"] == written.version


def test_the_same_seed_gives_the_same_figures(tmp_path: Path) -> None:
    texts = []
    for number in range(2):
        path = tmp_path / f"{number}.json"
        run(*SMALL, "--json", str(path))
        texts.append([(cell.policy, cell.measures.ttft_p99_s, cell.measures.goodput) for cell in read(path).cells])
    assert texts[0] == texts[1]


def test_a_search_names_the_highest_load(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    result = run(*SMALL, "--policy", "random", "--search", "--json", str(path))
    assert result.exit_code == 0, result.output
    (search,) = read(path).searches
    assert search.policy == "random"
    assert (search.load, True) in search.tried
    assert "highest load" in result.output


def test_the_page_stands_alone(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra lab is not installed")
    path = tmp_path / "report.html"
    assert run(*SMALL, "--html", str(path)).exit_code == 0
    assert "<svg" in path.read_text(encoding="utf-8")


def test_without_the_extra_the_page_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "warmfront.lab.html", raising=False)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    result = run(*SMALL, "--html", "report.html")
    assert result.exit_code == 2
    assert result.output.strip() == "Error: --html needs jinja2: pip install 'warmfront[lab]'"


def test_regimes_and_policies_are_listed() -> None:
    result = run("simulate", "--list")
    assert result.exit_code == 0
    for name in ("chat", "llmd-ladder", "marginal_cost", "cacheroute", "sessions/s"):
        assert name in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give a regime"),
        (("nothing",), "no regime is called nothing"),
        (("chat", "chat", "--policy", "chance"), "no policy named 'chance'; known: "),
        (("chat", "--load", "0"), "'0' is out of range"),
        (("chat", "--load", "nan"), "'nan' is out of range"),
        (("chat", "--load", "fast"), "'fast' is no list of numbers"),
        (("chat", "--seed", "-1"), "'-1' is out of range"),
        (("chat", "--requests", "0"), "0 is not in the range"),
        (("chat", "--set", "front.io_threads=2"), "a simulation has only a router"),
        (("chat", "--set", "router.policy.name=random"), "give --policy instead"),
        (("chat", "--set", "router.flow.queue_max=-1"), "router.flow.queue_max"),
        (("chat", "--json", "/nowhere/results.json"), "there is no directory /nowhere"),
    ],
)
def test_bad_input_is_one_clear_line(arguments: tuple[str, ...], message: str) -> None:
    result = run("simulate", *arguments)
    assert result.exit_code == 2
    assert message in result.output.splitlines()[-1]


def test_two_regimes_of_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "chat.toml"
    path.write_text('extends = "chat"\n', encoding="utf-8")
    result = run("simulate", "chat", str(path))
    assert result.exit_code == 2
    assert "several regimes are named chat" in result.output


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in found.read_text(encoding="utf-8").split()] if found.exists() else []


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to see processes")
def test_ctrl_c_leaves_no_process() -> None:
    arguments = ["simulate", "chat", "--policy", "all", "--jobs", "2"]
    command = subprocess.Popen(
        [sys.executable, "-m", "warmfront", *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        # A shell starts background jobs, tests among them, with this signal ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        text=True,
    )
    try:
        deadline = time.monotonic() + DEADLINE_S
        while len(children(command.pid)) < 3:  # two workers, and the tracker that Python starts beside them
            assert time.monotonic() < deadline
            assert command.poll() is None, command.communicate()[0]
            time.sleep(0.05)
        workers = children(command.pid)
        os.killpg(command.pid, signal.SIGINT)
        said, _ = command.communicate(timeout=DEADLINE_S)  # returns when nobody holds the pipe any more
    finally:
        command.kill()
    assert command.returncode == 130
    assert said.strip() == "interrupted: no results"
    while any(is_running(pid) for pid in workers):  # the tracker ends a moment after its parent
        assert time.monotonic() < deadline
        time.sleep(0.05)
