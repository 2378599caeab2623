"""Tasks spread over processes that never outlive the one that asked.

Each worker is a spawned process (forking is not safe once the core's threads run) at the end of one pipe. Ctrl-C, which
a terminal sends to the whole group, does not reach it: the parent ends its workers when it stops iterating for any
reason. A parent that is killed closes its pipes with it, and a worker leaves when it can neither read nor write.

`concurrent.futures` is not used because its workers survive a killed parent: they hold both ends of their queue.
"""

from __future__ import annotations

import signal
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import connection, get_context, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, Generic, TypeVar

from msgspec import Struct

from warmfront.errors import WarmfrontError

Task = TypeVar("Task")
Result = TypeVar("Result")

Report = Callable[[float], None]
"""Takes the share of a task that is done."""
REPORT_STEP = 0.02
"""Least progress worth a message."""
JOIN_S = 5.0
"""How long a worker may take to die when it is told to."""


class Progress(Struct, frozen=True):
    """A task came further."""

    number: int
    share: float


class Done(Struct, Generic[Result], frozen=True):
    """A task is finished."""

    number: int
    result: Result


class Failure(Struct, frozen=True):
    """A task raised, or its process died."""

    number: int
    message: str
    """One line for an error on purpose, a traceback for a bug."""


def spread(
    perform: Callable[[Task, Report], Result], tasks: Sequence[Task], *, jobs: int
) -> Generator[Progress | Done[Result] | Failure]:
    """Perform tasks in `jobs` processes and yield what becomes of them, in the order in which it happens.

    Args:
        perform: A function of a module, so that a new process can import it.
        tasks: What it is called with; anything that can be pickled. They begin in this order.
        jobs: Processes, at least 1; no more are started than there are tasks.

    Closing the iterator, or leaving it by an exception, ends every process.
    """
    waiting = deque(enumerate(tasks))
    workers: dict[Connection, _Worker] = {}
    try:
        while waiting or workers:
            while waiting and len(workers) < jobs:
                worker = _Worker(perform)
                workers[worker.pipe] = worker
                worker.give(*waiting.popleft())
            for pipe in connection.wait(list(workers)):
                assert isinstance(pipe, Connection)
                message = workers[pipe].message()
                yield message
                if isinstance(message, Progress):
                    continue
                if waiting and not isinstance(message, Failure):
                    workers[pipe].give(*waiting.popleft())
                else:
                    workers.pop(pipe).end()
    finally:
        for worker in workers.values():
            worker.end()


class _Worker:
    def __init__(self, perform: Callable[[Any, Report], Any]) -> None:
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._number = -1
        self._process: SpawnProcess = context.Process(target=_serve, args=(theirs, perform), daemon=True)
        with _interrupts_blocked():
            self._process.start()
        theirs.close()

    def give(self, number: int, task: object) -> None:
        self._number = number
        self.pipe.send((number, task))

    def message(self) -> Any:
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(JOIN_S)
            return Failure(self._number, f"the process died with exit code {self._process.exitcode}")

    def end(self) -> None:
        self.pipe.close()
        self._process.terminate()
        self._process.join(JOIN_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Keep SIGINT back; a process that is started meanwhile inherits that, from its first instruction on."""
    resource_tracker.ensure_running()  # else the first start would start it, which ends the blocking
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(pipe: Connection, perform: Callable[[Any, Report], Any]) -> None:
    """Perform what comes until nobody is at the other end."""
    while True:
        try:
            number, task = pipe.recv()
            pipe.send(_perform(number, task, perform, _Reporter(pipe, number)))
        except (EOFError, ConnectionError):
            return


def _perform(number: int, task: Any, perform: Callable[[Any, Report], Any], report: Report) -> Done[Any] | Failure:
    try:
        return Done(number, perform(task, report))
    except WarmfrontError as error:
        return Failure(number, str(error))
    except ConnectionError:
        raise
    except Exception:
        return Failure(number, traceback.format_exc())


class _Reporter:
    """Sends progress, but not every request's."""

    def __init__(self, pipe: Connection, number: int) -> None:
        self._pipe = pipe
        self._number = number
        self._sent = 0.0

    def __call__(self, share: float) -> None:
        if share >= self._sent + REPORT_STEP:
            self._sent = share
            self._pipe.send(Progress(self._number, share))
