"""What warmfront reads from an engine's metrics page: load per rank, capacity, and the process's start.

Names come from the dialects in `engines/`; the first dialect with a metric of its own on the page reads it. A vLLM
page has a thousand lines, most of them histogram buckets, so a line that is not wanted is dropped by its beginning.
Everything may be absent, and label values are text in the engine's own spelling, `"None"` among them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from functools import cache

from msgspec import Struct

from warmfront.engines import DIALECTS, Dialect

STARTED = "process_start_time_seconds"
"""Of every Prometheus client library; absent when the engine runs several HTTP processes."""

FIGURES = ("running", "waiting", "kv_usage", "prefix_queries", "prefix_hits", "prompt_tokens", "generated_tokens")
"""Fields of `RankMetrics` that are plain samples, by the name they have in `MetricNames`."""

COUNT_DIGITS_MAX = 18
"""Longer whole numbers are not read: nothing that is counted here is so large, and Python refuses the longest."""

_SAMPLE = re.compile(r"([^{ ]+)(?:\{(.*)\})? (\S+).*")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class RankMetrics(Struct, frozen=True):
    """One data-parallel rank; `None`: not reported."""

    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    """Share of KV blocks in use by running requests, 0 to 1."""
    prefix_queries: float | None = None
    """Prompt tokens looked up in the prefix cache since the start."""
    prefix_hits: float | None = None
    """Those of them that were found."""
    prompt_tokens: float | None = None
    """Tokens of prompts that were prefilled since the start."""
    generated_tokens: float | None = None
    """Tokens of answers, counted as they are produced."""
    block_size: int | None = None
    capacity_tokens: int | None = None
    """KV capacity of this rank in tokens, without blocks that never hold a prompt."""
    prefix_caching: bool | None = None

    @property
    def worked_tokens(self) -> float | None:
        """What moves while the engine works: tokens looked up, prefilled and produced. Needs the last of these."""
        if self.generated_tokens is None:
            return None
        return self.generated_tokens + (self.prompt_tokens or 0.0) + (self.prefix_queries or 0.0)


class EngineMetrics(Struct, frozen=True):
    """One scrape."""

    engine: str | None = None
    """Name of the dialect that the page speaks; `None`: none that we know."""
    ranks: dict[int, RankMetrics] = {}
    started_s: float | None = None
    """Unix time at which the HTTP process started."""


def parse(text: str) -> EngineMetrics:
    """Read a page in Prometheus text form. Lines that cannot be read are skipped; an empty result is a valid one."""
    dialect = next((dialect for dialect in DIALECTS.values() if _speaks(dialect, text)), None)
    if dialect is None:
        return EngineMetrics(started_s=_started(text))
    values: dict[int, dict[str, float]] = {}
    caches: dict[int, dict[str, str]] = {}
    for name, labels_text, value_text in _samples(text, _names(dialect)):
        value, labels = _number(value_text), dict(_LABEL.findall(labels_text))
        if value is None:
            continue
        rank = _count(labels.get(dialect.metrics.rank_label or "")) or 0
        if name in dialect.metrics.cache_info:
            caches[rank] = labels
        else:
            values.setdefault(rank, {})[name] = value
    ranks = {
        rank: _rank(dialect, values.get(rank, {}), caches.get(rank, {}), ranks=len(caches))
        for rank in sorted(values.keys() | caches.keys())
    }
    return EngineMetrics(dialect.name, ranks, _started(text))


def _rank(dialect: Dialect, values: dict[str, float], cache_labels: dict[str, str], *, ranks: int) -> RankMetrics:
    figures = {figure: _first(values, getattr(dialect.metrics, figure)) for figure in FIGURES}
    known = dialect.cache_labels
    block_size = _label_count(cache_labels, known.block_size)
    caching = next((cache_labels[label] for label in known.prefix_caching if label in cache_labels), None)
    return RankMetrics(
        **figures,
        block_size=block_size,
        capacity_tokens=_capacity_tokens(dialect, cache_labels, block_size=block_size, ranks=ranks),
        prefix_caching=None if caching is None else caching == "True",
    )


def _capacity_tokens(
    dialect: Dialect, cache_labels: dict[str, str], *, block_size: int | None, ranks: int
) -> int | None:
    """KV capacity of one rank.

    The figure in tokens is one rank's; the figure in blocks is the sum over all ranks of the server. Both count the
    reserved blocks.

    Source: tests/fixtures/vllm/metrics_dp2.txt, two ranks with 64 blocks each.
    """
    known = dialect.cache_labels
    tokens, blocks = _label_count(cache_labels, known.capacity_tokens), _label_count(cache_labels, known.blocks)
    if tokens is None and blocks is not None and block_size is not None:
        tokens = blocks // ranks * block_size
    return None if tokens is None else max(0, tokens - known.blocks_reserved * (block_size or 0))


def _speaks(dialect: Dialect, text: str) -> bool:
    return any(text.startswith(prefix) or f"\n{prefix}" in text for prefix in dialect.recognized_by)


@cache
def _names(dialect: Dialect) -> tuple[str, ...]:
    """Names of the wanted metrics."""
    figures = (name for figure in FIGURES for name in getattr(dialect.metrics, figure))
    return (*dialect.metrics.cache_info, *figures)


def _samples(text: str, names: tuple[str, ...]) -> Iterator[tuple[str, str, str]]:
    """Name, labels and value of each line whose metric is wanted; other lines cost one comparison."""
    for line in text.splitlines():
        if line.startswith(names) and (sample := _SAMPLE.fullmatch(line)) and sample[1] in names:
            yield sample[1], sample[2] or "", sample[3]


def _started(text: str) -> float | None:
    return next((_number(value) for _, _, value in _samples(text, (STARTED,))), None)


def _first(values: dict[str, float], names: Sequence[str]) -> float | None:
    return next((values[name] for name in names if name in values), None)


def _label_count(labels: dict[str, str], names: Sequence[str]) -> int | None:
    return next((count for name in names if (count := _count(labels.get(name)))), None)


def _number(text: str) -> float | None:
    """Read a value; counts and shares are never negative, so one that is says nothing."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None


def _count(text: str | None) -> int | None:
    if text is None or not text.isdecimal() or len(text) > COUNT_DIGITS_MAX:
        return None
    return int(text)
