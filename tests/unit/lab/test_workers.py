"""Workers do what they are given, tell what goes wrong, and never outlive their parent. Real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import lab_figures
from support.lab_figures import die, double, fail_on_odd, is_running, raise_a_bug, wait_for_ever
from warmfront.lab.workers import Done, Failure, Progress, spread


def test_every_task_is_done_once_and_tells_how_far_it_is() -> None:
    messages = list(spread(double, range(5), jobs=2))
    assert sorted((message.number, message.result) for message in messages if isinstance(message, Done)) == [
        (number, 2 * number) for number in range(5)
    ]
    assert sorted(message.number for message in messages if isinstance(message, Progress)) == list(range(5))


def test_one_task_that_fails_does_not_stop_the_others() -> None:
    messages = list(spread(fail_on_odd, range(3), jobs=1))
    assert messages == [Done(0, 0), Failure(1, "1 is odd"), Done(2, 2)]


def test_a_bug_is_told_with_its_traceback() -> None:
    (message,) = spread(raise_a_bug, [4], jobs=1)
    assert isinstance(message, Failure)
    assert "raise_a_bug" in message.message
    assert message.message.endswith("IndexError: bug in 4\n")


def test_a_process_that_dies_is_told_and_replaced() -> None:
    assert list(spread(die, range(2), jobs=1)) == [
        Failure(number, "the process died with exit code 7") for number in range(2)
    ]


def test_no_tasks_are_no_work() -> None:
    assert list(spread(double, [], jobs=3)) == []


def test_leaving_early_ends_the_processes() -> None:
    messages = spread(wait_for_ever, [0, 1], jobs=2)
    started = [next(messages), next(messages)]
    pids = [int(message.share) for message in started if isinstance(message, Progress)]
    messages.close()
    assert len(pids) == 2
    assert not any(is_running(pid) for pid in pids)


ORPHANS = """
import os, signal
from support.lab_figures import report_for_ever
from warmfront.lab.workers import spread
if __name__ == "__main__":
    for message in spread(report_for_ever, [0], jobs=1):
        print(int(message.share), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_parent_that_is_killed_leaves_nobody(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(ORPHANS, encoding="utf-8")
    path = os.pathsep.join([str(Path(lab_figures.__file__).parents[1]), *sys.path])
    parent = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        timeout=60,
        check=False,
    )  # returns when the last holder of the pipe, the worker, is gone
    pid = int(parent.stdout)
    assert parent.returncode == -9
    assert not is_running(pid)


@pytest.mark.parametrize("jobs", [1, 8])
def test_results_do_not_depend_on_the_number_of_processes(jobs: int) -> None:
    done = [message for message in spread(double, range(4), jobs=jobs) if isinstance(message, Done)]
    assert {message.number: message.result for message in done} == {0: 0, 1: 2, 2: 4, 3: 6}
