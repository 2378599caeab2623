"""Progress of a phase: a live bar on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from warmfront.demo.load import Progress
from warmfront.demo.report import percentile

REFRESH_INTERVAL_S = 0.25
LINE_INTERVAL_S = 5.0


@contextlib.asynccontextmanager
async def shown(console: Console, name: str, progress: Progress) -> AsyncIterator[None]:
    """Show `progress` while the block runs."""
    task = asyncio.create_task(
        _bar(console, name, progress) if console.is_terminal else _lines(console, name, progress)
    )
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _bar(console: Console, name: str, progress: Progress) -> None:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[live]}"),
    )
    with Bar(*columns, console=console) as bar:
        task = bar.add_task(f"{name:<14}", total=progress.planned, live="")
        try:
            while True:
                bar.update(task, completed=_done(progress), live=figures(progress))
                await asyncio.sleep(REFRESH_INTERVAL_S)
        finally:
            bar.update(task, completed=_done(progress), live=figures(progress))


async def _lines(console: Console, name: str, progress: Progress) -> None:
    while True:
        await asyncio.sleep(LINE_INTERVAL_S)
        console.print(f"{name:<14} {_done(progress)}/{progress.planned} requests  {figures(progress)}")


def figures(progress: Progress) -> str:
    """Return what is known so far in one short line."""
    outcomes = progress.outcomes
    prompt = sum(outcome.prompt_tokens for outcome in outcomes)
    if not prompt:
        return f"{progress.in_flight} in flight"
    hits = sum(outcome.cached_tokens for outcome in outcomes) / prompt
    median_s = percentile(sorted(outcome.ttft_s for outcome in outcomes), 0.5)
    return f"{progress.in_flight} in flight, hit rate {hits:.0%}, TTFT p50 {median_s * 1000:.0f} ms"


def _done(progress: Progress) -> int:
    return len(progress.outcomes) + len(progress.errors)
