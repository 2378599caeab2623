"""A progress bar for work that takes seconds: on a terminal only, on standard error, gone when the work is done."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

REFRESH_PER_S = 4.0


@contextlib.contextmanager
def bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Give a function that takes how much is done and how much there is."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, refresh_per_second=REFRESH_PER_S, disable=not console.is_terminal
    ) as shown:
        task = shown.add_task(title, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)
