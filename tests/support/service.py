"""A process of the test run that serves HTTP.

What one would get wrong: vLLM is several processes, and its engine core outlives a killed API server. Every service
runs in a session of its own; ending it means ending the whole process group and waiting until the group is empty.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

END_TIMEOUT_S = 15.0
POLL_S = 0.05
LOG_TAIL_BYTES = 6000


def free_port() -> int:
    """Ask the kernel for a port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(condition: Callable[[], bool], what: str, *, timeout_s: float) -> None:
    """Block until the condition holds.

    Raises:
        AssertionError: It did not within the time.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(POLL_S)


class Service:
    """One service. `start` returns at once, `wait` blocks until it answers, `kill` and `stop` end all of it."""

    name = "service"
    health_path = "/health"
    start_timeout_s = 30.0

    def __init__(self, log: Path) -> None:
        self.log = log
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.descriptors: tuple[int, ...] = ()
        """Open files of ours that it inherits."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        raise NotImplementedError

    def variables(self) -> dict[str, str]:
        return dict(os.environ)

    def start(self) -> None:
        assert self.process is None, f"{self.name} runs already"
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=self.variables(),
                pass_fds=self.descriptors,
                cwd=self.log.parent,
            )

    def wait(self) -> None:
        """Block until the health path answers 200.

        Raises:
            RuntimeError: The service ended or the time is up; the message holds the end of its log.
        """
        deadline = time.monotonic() + self.start_timeout_s
        while not self.is_healthy():
            if self.process is None or self.process.poll() is not None:
                raise RuntimeError(f"{self.name} on port {self.port} ended\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} on port {self.port} did not start in time\n{self.log_tail()}")
            time.sleep(POLL_S)

    def is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + self.health_path, timeout=5) as answer:
                return bool(answer.status == 200)
        except urllib.error.HTTPError as error:
            error.close()
            return False
        except OSError:
            return False

    def kill(self) -> None:
        """End every process of the service at once, as a crash does."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Ask the service to end; insist when it does not."""
        try:
            self._end(signal.SIGTERM)
        except TimeoutError:
            self._end(signal.SIGKILL)

    def log_tail(self) -> str:
        content = self.log.read_bytes() if self.log.exists() else b""
        return content[-LOG_TAIL_BYTES:].decode(errors="replace")

    def _end(self, number: signal.Signals) -> None:
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)
        deadline = time.monotonic() + END_TIMEOUT_S
        while self._is_group_alive():
            if time.monotonic() > deadline:
                raise TimeoutError(f"process group {self.process.pid} outlives {number.name}")
            time.sleep(POLL_S)
        self.process = None

    def _is_group_alive(self) -> bool:
        assert self.process is not None
        self.process.poll()  # reaps the leader, which would else stay in the group as a zombie
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return False
        return True
