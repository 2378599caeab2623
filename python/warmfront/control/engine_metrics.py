"""What warmfront reads from an engine's `/metrics`: load per rank, capacity, and the process's start.

A vLLM page has a thousand lines, most of them histogram buckets; one regular expression picks the few wanted lines
without looking at the rest. Everything may be absent, and names changed over time: see `NAMES`. Label values are text
in the engine's own spelling, `"None"` among them.

Source of names: vLLM 0.9 to 0.33, `vllm/v1/metrics/loggers.py`; `vllm:gpu_cache_usage_perc` until 0.11.
"""

from __future__ import annotations

import math
import re

from msgspec import Struct

NAMES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:gpu_cache_usage_perc": "kv_usage",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "generation_tokens",
}
"""Engine metric → our field of `RankMetrics`; current names come before old ones of the same field."""

CONFIG_INFO = "vllm:cache_config_info"
STARTED = "process_start_time_seconds"

_LINE = re.compile(
    rf"^({'|'.join(map(re.escape, [*NAMES, CONFIG_INFO, STARTED]))})(?:\{{(.*)\}})? ([^ \n]+)", re.MULTILINE
)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class RankMetrics(Struct, frozen=True):
    """One data-parallel rank; `None`: not reported."""

    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    """Share of KV blocks in use by running requests, 0 to 1."""
    prompt_tokens: float | None = None
    generation_tokens: float | None = None
    block_size: int | None = None
    capacity_tokens: int | None = None
    """KV capacity of this rank, without the block that vLLM keeps as null block."""
    prefix_caching: bool | None = None


class EngineMetrics(Struct, frozen=True):
    """One scrape."""

    ranks: dict[int, RankMetrics] = {}
    started_s: float | None = None
    """Unix time at which the HTTP process started; absent when the engine runs several of them."""


def parse(text: str) -> EngineMetrics:
    """Read a page in Prometheus text form. Lines that cannot be read are skipped; an empty result is a valid one."""
    values: dict[int, dict[str, float]] = {}
    configs: dict[int, dict[str, str]] = {}
    started_s = None
    for name, labels_text, value_text in _LINE.findall(text):
        value = _number(value_text)
        if value is None:
            continue
        if name == STARTED:
            started_s = value
            continue
        labels = dict(_LABEL.findall(labels_text))
        rank = _count(labels.get("engine")) or 0
        if name == CONFIG_INFO:
            configs[rank] = labels
        else:
            values.setdefault(rank, {}).setdefault(NAMES[name], value)
    ranks = {
        rank: RankMetrics(**values.get(rank, {}), **_capacity(configs.get(rank, {}), ranks=len(configs)))  # type: ignore[arg-type] # fields by name
        for rank in sorted(values.keys() | configs.keys())
    }
    return EngineMetrics(ranks, started_s)


def _capacity(labels: dict[str, str], *, ranks: int) -> dict[str, object]:
    """Block size and KV capacity in tokens.

    `kv_cache_size_tokens` is one rank's; `num_gpu_blocks` is the sum over all ranks of the server. Both count the null
    block, which never holds a prompt.
    """
    block_size, tokens = _count(labels.get("block_size")), _count(labels.get("kv_cache_size_tokens"))
    blocks = _count(labels.get("num_gpu_blocks"))
    if tokens is None and block_size and blocks:
        tokens = blocks // ranks * block_size
    caching = labels.get("enable_prefix_caching")
    return {
        "block_size": block_size or None,
        "capacity_tokens": max(0, tokens - (block_size or 0)) if tokens else None,
        "prefix_caching": caching == "True" if caching else None,
    }


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _count(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None
