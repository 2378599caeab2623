"""How to talk to an engine, as data: what probing, scraping and event discovery need to know.

A new engine that uses known codecs is one file with one `Dialect`. What is easy to get wrong: names change between
versions, so every metric is a list of names, newest first; the first that a scrape contains wins, and none is an error.
"""

from __future__ import annotations

from msgspec import Struct


class MetricNames(Struct, frozen=True):
    """Names in the engine's Prometheus text, newest first. Counters may come with or without `_total`."""

    running: tuple[str, ...] = ()
    """Requests being computed."""
    waiting: tuple[str, ...] = ()
    """Requests queued in the engine."""
    kv_usage: tuple[str, ...] = ()
    """Share of KV blocks referenced by running requests, 0 to 1."""
    prefix_queries: tuple[str, ...] = ()
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: tuple[str, ...] = ()
    """Those of them that were found."""
    prompt_tokens: tuple[str, ...] = ()
    """Tokens of prompts that were prefilled."""
    generated_tokens: tuple[str, ...] = ()
    """Tokens of answers, counted as they are produced."""
    preemptions: tuple[str, ...] = ()
    """Requests thrown out for lack of memory."""
    cache_info: tuple[str, ...] = ()
    """A gauge of 1 whose labels describe the cache."""
    rank_label: str | None = None
    """Label that holds the data-parallel rank."""
    model_label: str | None = None
    """Label that holds the served model's name."""


class CacheLabels(Struct, frozen=True):
    """Labels of `MetricNames.cache_info`; numbers in decimal, `None` or absent when not known."""

    block_size: tuple[str, ...] = ()
    capacity_tokens: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    """Blocks in all; times the block size, this is the capacity where no label tells it in tokens."""
    blocks_reserved: int = 0
    """Of these, never usable for prompts."""
    prefix_caching: tuple[str, ...] = ()
    """`True` or `False`."""


class EventDefaults(Struct, frozen=True):
    """Where KV events are, when nobody says."""

    sources_path: str | None = None
    """GET answers rank → where its events are."""
    port: int | None = None
    """TCP port of rank 0; rank r publishes on `port + r`."""
    topic: str = ""
    unspecified_hosts: tuple[str, ...] = ("*", "0.0.0.0", "::", "[::]")
    """Bind addresses to be replaced by the host the engine was reached at."""


class Dialect(Struct, frozen=True):
    """One engine."""

    name: str
    health_path: str = "/health"
    models_path: str = "/v1/models"
    version_path: str | None = None
    metrics_path: str | None = "/metrics"
    recognized_by: tuple[str, ...] = ()
    """Any metric with one of these prefixes proves the engine."""
    metrics: MetricNames = MetricNames()
    cache_labels: CacheLabels = CacheLabels()
    events: EventDefaults | None = None
    """`None`: the engine publishes no events that are understood."""
    rank_header: str | None = None
    """Request header that pins a data-parallel rank."""
    rank_header_ignored_by: tuple[str, ...] = ()
    """Paths that ignore it."""
    cached_tokens_fields: tuple[tuple[str, ...], ...] = ()
    """Paths inside an answer's `usage` that tell cached tokens, in order of preference."""
    computes_last_token: bool = True
    """A hit never covers the whole prompt: at most `(prompt_tokens - 1) // block_size` blocks are found."""
    model_directory_field: str | None = None
    """Field of a model card that may name a readable model directory."""
    context_length_field: str | None = None
    """Field of a model card with the longest context in tokens."""
