"""A bar that says how far a long run is, on standard error, and only where somebody looks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def progress(total: int) -> Iterator[Callable[[float], None]]:
    """Show a bar; what is yielded takes the tasks that are done, fractions included."""
    console = Console(stderr=True)
    columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        bar = shown.add_task("", total=total)
        yield lambda done: shown.update(bar, completed=done)
