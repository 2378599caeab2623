"""The tutorial's commands, typed as they stand into one shell. Only ports are replaced, by free ones."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

pytest.importorskip("warmfront.core", reason="the core is not built", exc_type=ImportError)

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "tutorials" / "first-route.md"
COMMANDS = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PORTS = ("8001", "8002", "8080", "8081")
MARK = "=== block"
DEADLINE_S = 60.0
WARMFRONT = """#!{shell}
case "$1" in
  serve) set -- "$@" --listen 127.0.0.1:{clients} --admin-listen 127.0.0.1:{admin} ;;
  explain | fleet) set -- "$@" --admin http://127.0.0.1:{admin} ;;
esac
exec {python} -m warmfront "$@"
"""
"""What is on the `PATH` as `warmfront`: the page relies on default ports, of which a test may take none."""


def free_ports() -> dict[str, str]:
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in PORTS]
        return {port: str(listener.getsockname()[1]) for port, listener in zip(PORTS, listeners, strict=True)}


def write_warmfront(directory: Path, ports: Mapping[str, str]) -> None:
    path = directory / "warmfront"
    python = shlex.quote(sys.executable)
    text = WARMFRONT.format(shell="/bin/sh", python=python, clients=ports["8080"], admin=ports["8081"])
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


def script(ports: Mapping[str, str]) -> str:
    blocks = COMMANDS.findall(PAGE.read_text(encoding="utf-8"))
    text = "".join(f"echo '{MARK}'\n{block}" for block in blocks)
    return re.sub("|".join(PORTS), lambda found: ports[found.group()], "set -e\n" + text)


def run(text: str, directory: Path) -> list[str]:
    """Return what each block printed; nothing outlives the call."""
    directory.joinpath("tutorial.sh").write_text(text, encoding="utf-8")
    path = f"{directory}{os.pathsep}{os.environ['PATH']}"
    printed = directory / "printed.txt"
    with printed.open("wb") as output:
        shell = subprocess.Popen(
            ["bash", "tutorial.sh"],
            cwd=directory,
            env=os.environ | {"PATH": path},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        shell.wait(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        pytest.fail(f"still running after {DEADLINE_S:.0f} s:\n{printed.read_text(encoding='utf-8')}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()
    said = printed.read_text(encoding="utf-8")
    assert shell.returncode == 0, said
    return said.split(MARK)[1:]


def test_the_tutorial_does_what_it_says(tmp_path: Path) -> None:
    ports = free_ports()
    write_warmfront(tmp_path, ports)
    _, check, ready, asked, explained, stopped, restarted, counted = run(script(ports), tmp_path)
    assert check.count(": ready, vllm, block size 16, events from tcp://") == 2
    assert '"tokens":"exact"' in ready
    assert re.findall(r'"cached_tokens": (\d+)', asked) == ["0", "1104", "1104"]
    assert re.findall(r"predicted-cached-tokens: (\d+)", asked) == ["0", "1104", "1104"]
    (holder,) = set(re.findall(r"x-warmfront-replica: (\S+)", asked))
    assert f"choice: {holder} (warm)" in explained
    assert "1,120 prompt tokens, 70 blocks (exact tokens)" in explained
    (other,) = set(re.findall(r"x-warmfront-replica: (\S+)", stopped))
    assert other != holder
    assert re.search(rf"^{re.escape(holder)} +no ", stopped, re.MULTILINE)
    assert f"choice: {other} (warm)" in restarted
    assert re.search(rf"^ +{re.escape(holder)} +0 +0 ", restarted, re.MULTILINE)
    assert 'warmfront_requests_total{model="sim",outcome="finished"} 5' in counted
